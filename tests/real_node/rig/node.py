"""One Kubernetes node of a rig: its view of the file system, containerd with the images, a kubelet;
supervised until the rig ends.

Called by inside.py as ``python -m tests.real_node.rig.node NAME INDEX`` in a mount namespace of its
own, and the rig's other namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

from tests.real_node.rig import config, mounts
from tests.real_node.rig.api import Api
from tests.real_node.rig.errors import RigError
from tests.real_node.rig.layout import Layout, NodeLayout, Plan
from tests.real_node.rig.supervisor import Supervisor, say
from tests.real_node.rig.waiting import wait_until

_PATIENCE_SECONDS = 60.0


def main(name: str, index: int) -> None:
    """Bring node ``index`` of rig ``name`` up, and supervise it."""
    layout = Layout(name)
    plan = Plan.load(layout)
    node = layout.node(index)
    mounts.make_node_view(node)
    node.process_id.write_text(str(os.getpid()))
    _write_configuration(plan, node)

    commands = {"containerd": config.containerd(plan, node), "kubelet": config.kubelet(plan, node)}
    supervisor = Supervisor(
        commands,
        log=lambda component: layout.log(f"{component}-{index}"),
        environment=config.environment(plan),
        socket_path=node.control,
    )
    supervisor.start("containerd")
    wait_until(
        "containerd",
        lambda: _ctr(plan, "version").returncode == 0,
        timeout_seconds=_PATIENCE_SECONDS,
    )
    for archive in sorted(plan.images.glob("*.tar")):
        imported = _ctr(plan, "images", "import", "--local", str(archive))
        if imported.returncode:
            raise RigError(f"importing {archive.name}: {imported.stderr.strip()}")
    say("images imported")
    with contextlib.closing(Api.of(layout)) as api:
        # a kubelet that finds none backs off for seconds
        wait_until("the API server", api.is_ready, timeout_seconds=_PATIENCE_SECONDS)
    supervisor.start("kubelet")
    supervisor.run(starting=lambda: not layout.ready.exists())


def _write_configuration(plan: Plan, node: NodeLayout) -> None:
    (node.etc / "cni").mkdir(parents=True)
    (node.etc / "kubelet.json").write_text(
        json.dumps(config.kubelet_configuration(plan.options, node), indent=1)
    )
    (node.etc / "containerd.toml").write_text(config.containerd_configuration(node))
    (node.etc / "cni" / "10-rig.conflist").write_text(
        json.dumps(config.cni_configuration(node), indent=1)
    )


def _ctr(plan: Plan, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*config.ctr(plan), *arguments], text=True, capture_output=True, check=False
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
