"""The first process in a rig's namespaces: prepares them, starts the control plane and the nodes,
then supervises until it is killed.

As process 1 of the pid namespace it takes every other process of the rig with it when it dies.

Called by keeper.py as ``python -m tests.real_node.rig.inside NAME`` in new pid, mount and network
namespaces.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real_node.rig import config, mounts, pki
from tests.real_node.rig.api import Api, ApiError
from tests.real_node.rig.errors import RigError
from tests.real_node.rig.layout import SERVICE_ADDRESS, Layout, Plan, node_address
from tests.real_node.rig.supervisor import Supervisor, say
from tests.real_node.rig.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE_SECONDS = 60.0


def main(name: str) -> None:
    """Bring rig ``name`` up, write its ready file, and supervise it."""
    layout = Layout(name)
    plan = Plan.load(layout)
    began = time.monotonic()
    timings: dict[str, float] = {}

    def reached(step: str) -> None:
        timings[step] = round(time.monotonic() - began, 2)
        say(f"{step} after {timings[step]} s")

    mounts.cover_host_settings(layout)
    if plan.options.numa_nodes == 2:
        mounts.pretend_numa_nodes(layout)
    _make_network(plan.options.nodes)
    pki.write(layout, nodes=plan.options.nodes)
    _write_tools(plan, layout)
    reached("prepared")

    environment = config.environment(plan)
    commands = {
        "etcd": config.etcd(plan, layout),
        "apiserver": config.apiserver(plan, layout),
        "controller-manager": config.controller_manager(plan, layout),
        "scheduler": config.scheduler(plan, layout),
    }
    for index in range(1, plan.options.nodes + 1):
        own_mounts = ["unshare", "--mount", "--propagation", "private", "--"]
        commands[f"node-{index}"] = [
            *own_mounts,
            sys.executable,
            "-m",
            "tests.real_node.rig.node",
            name,
            str(index),
        ]
    supervisor = Supervisor(
        commands, log=layout.log, environment=environment, socket_path=layout.control
    )
    supervisor.start("etcd")
    supervisor.start("apiserver")
    for index in range(1, plan.options.nodes + 1):
        # containerd starts and imports images while the API server starts
        supervisor.start(f"node-{index}")

    def step(what: str, predicate: Callable[[], bool]) -> None:
        def holds() -> bool:
            supervisor.check()  # waiting for a component that has died would only hide why
            return predicate()

        wait_until(what, holds, timeout_seconds=_PATIENCE_SECONDS)

    with contextlib.closing(Api.of(layout)) as api:
        step("the API server", api.is_ready)
        reached("apiserver")
        supervisor.start("controller-manager")
        supervisor.start("scheduler")
        for index in range(1, plan.options.nodes + 1):
            step(f"node-{index} to be Ready", partial(_node_takes_pods, api, f"node-{index}"))
        reached("nodes")
        # no pod can start without them
        for needed in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
            step(needed, partial(api.exists, f"/api/v1/namespaces/default/{needed}"))
        reached("service account")

    def ready() -> None:
        complete = layout.ready.with_suffix(".writing")
        complete.write_text(json.dumps(timings))
        complete.rename(layout.ready)

    supervisor.run(starting=lambda: False, listening=ready)


def _node_takes_pods(api: Api, name: str) -> bool:
    try:
        node = api.find(f"/api/v1/nodes/{name}")
    except ApiError:
        return False
    return (
        node is not None
        and not node["spec"].get("taints")
        and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in node["status"].get("conditions", ())
        )
    )


def _make_network(nodes: int) -> None:
    """A bridge for pods that also holds the nodes' addresses and the address
    of the `kubernetes` service.

    Without a hardware address of its own it has the lowest one among its pods', which changes with
    the end of a pod. The others then send to the old one until their ARP entry expires.
    """
    for arguments in (
        ["link", "set", "lo", "up"],
        ["link", "add", config.BRIDGE, "address", "02:00:00:00:00:01", "type", "bridge"],
        ["address", "add", f"{node_address(1)}/24", "dev", config.BRIDGE],
        *(
            ["address", "add", f"{node_address(index)}/32", "dev", config.BRIDGE]
            for index in range(2, nodes + 1)
        ),
        ["address", "add", f"{SERVICE_ADDRESS}/32", "dev", config.BRIDGE],
        ["link", "set", config.BRIDGE, "up"],
    ):
        result = subprocess.run(["ip", *arguments], text=True, capture_output=True, check=False)
        if result.returncode:
            raise RigError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _write_tools(plan: Plan, layout: Layout) -> None:
    folder = config.tools_dir(layout)
    folder.mkdir()
    for name, content in config.wrapper_scripts(plan, layout).items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)


if __name__ == "__main__":
    main(sys.argv[1])
