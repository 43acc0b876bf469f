"""The agent as it is deployed: the image that scripts/image builds, the manifests as they are, a
real API server that accepts them.

Which of its rights that API server enforces is in test_manifests_rights, and what it accepts in
test_manifests_accepted.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_node.agents import GPU, kubelets_view, visible, wait_allocatable
from tests.real_node.deployment import (
    MERGE,
    NAMESPACE,
    SLOTS,
    Deployed,
    deployed_agent,
    kustomized,
    wait_until_rolled_out,
)
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import pod


@pytest.fixture(scope="module")
def deployed(rig: Rig) -> Iterator[Deployed]:
    """The base and hami-core, applied; gone afterwards with all it left on the node."""
    with deployed_agent(rig) as running:
        yield running


def test_the_daemon_set_serves_pods_with_the_rights_it_asks_for(deployed: Deployed) -> None:
    """Root without a single capability, on a read-only file system:
    it registers, pods run, and a rolling update loses none.
    """
    rig = deployed.rig
    wait_allocatable(rig, 2)
    rig.create_pod(
        pod(
            "user",
            command='echo "NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES"; sleep 100000',
            limits={GPU: 1},
        )
    )
    rig.wait_for_phase("user", "Running")
    assert kubelets_view(rig) == {"user": [visible(rig, "user")]}

    rig.kubectl("rollout", "restart", "daemonset/vgpu-agent", "-n", NAMESPACE)
    wait_until_rolled_out(rig)
    wait_allocatable(rig, 2)
    # Without a shell: the image has none.
    status = rig.kubectl(
        "exec",
        "-n",
        NAMESPACE,
        "daemonset/vgpu-agent",
        "--",
        "vgpu-agent",
        "status",
        "--wait",
        "ready",
    )
    assert "default/user" in status
    assert "SIMULATED" in status


def test_the_pod_sees_the_nodes_folders_and_can_write_where_it_must(deployed: Deployed) -> None:
    """Each folder under its own path, the token that the API server gave,
    and nothing else of the container can be written.
    """
    probe = (
        "import os, pathlib\nfor path in ('/var/run/cdi', '/var/lib/vgpu-agent', '/usr/local/"
        "vgpu', '/var/lib/kubelet/device-plugins', '/etc', '/var/lib/kubelet/pod-resources', '/"
        "config'):\n    file = pathlib.Path(path, '.probe')\n"
        "    try:\n        file.write_text('')\n        file.unlink()\n"
        "        print(path)\n    except OSError: pass\nprint(len(pathlib.Path('/var/run/secrets/"
        "kubernetes.io/serviceaccount/token').read_text()) > 100)\n"
        "print(pathlib.Path('/proc/self/status').read_text().split('CapEff:')[1].split()[0], "
        "os.path.exists('/bin/sh'))\n"
    )
    said = deployed.rig.kubectl(
        "exec", "-n", NAMESPACE, "daemonset/vgpu-agent", "--", "python3", "-c", probe
    ).splitlines()
    written = [
        "/var/run/cdi",
        "/var/lib/vgpu-agent",
        "/usr/local/vgpu",
        "/var/lib/kubelet/device-plugins",
    ]
    assert said == [*written, "True", "0000000000000000 False"]


def test_the_init_container_delivers_the_library(deployed: Deployed) -> None:
    """Whole and under its name, on the node; nothing half-written stays."""
    incoming = deployed.folder / "hami-core" / "incoming"
    assert [path.name for path in incoming.iterdir()] == ["libvgpu.so"]
    assert (incoming / "libvgpu.so").stat().st_size == Path("/bin/busybox").stat().st_size


def test_slots_for_regions_are_mounted_before_the_agent_starts(deployed: Deployed) -> None:
    """Mounted by a container that has ended.
    The agent, which may not mount, has them from the node, as the runtime has.
    """
    probe = "import os; print(*[name for name in sorted(os.listdir('.')) if os.path.ismount(name)])"
    command = ["python3", "-c", f"import os; os.chdir('/usr/local/vgpu/vgpu/slots'); {probe}"]
    said = deployed.rig.kubectl(
        "exec", "-n", NAMESPACE, "daemonset/vgpu-agent", "-c", "agent", "--", *command
    )
    assert said.split() == [f"{number:03}" for number in range(SLOTS)]


def test_a_killed_agent_is_registered_again_within_seconds(deployed: Deployed) -> None:
    """The kubelet fails pods that it admits meanwhile. It notices the end of a container, makes a
    new one, and the agent starts.
    """
    rig = deployed.rig
    wait_allocatable(rig, 2)
    (agent,) = rig.pods(namespace=NAMESPACE)
    name = agent["metadata"]["name"]
    pids = [
        pid
        for pid in _processes("vgpu-agent run --config")
        if f"pod{agent['metadata']['uid']}".replace("-", "_") in _cgroup(pid)
    ]
    assert pids, "no process of the agent's pod"
    killed_at = time.time()
    os.kill(min(pids), signal.SIGKILL)

    def registered() -> float:
        lines = rig.kubectl("logs", "-n", NAMESPACE, name, "-c", "agent").splitlines()
        events = [json.loads(line) for line in lines if '"plugin.registered"' in line]
        at = [dt.datetime.fromisoformat(event["ts"]).timestamp() for event in events]
        return min((moment for moment in at if moment > killed_at), default=0.0)

    rig.wait_for(lambda: registered() > 0, 60, what="the agent's registration")
    took = registered() - killed_at
    assert took < 15.0


def _processes(command: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if command in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def _cgroup(pid: int) -> str:
    """Empty for a process that has ended, such as one of another test's cluster."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text().replace("-", "_")
    return ""


def test_the_components_for_old_schedulers_change_the_one_for_new_ones(
    rig: Rig, tmp_path: Path
) -> None:
    """One line beside that of components/scheduler; tests/manifests compare what they say."""
    expected = {
        "scheduler-1.24": ("config.yaml", "--config", "policy/v1"),
        "scheduler-1.21": ("policy.json", "--policy-config-file", "policy/v1"),
        "scheduler-1.20": ("policy.json", "--policy-config-file", "policy/v1beta1"),
    }
    for name, (file, flag, version) in expected.items():
        objects = {
            each["kind"]: each
            for each in kustomized(rig, tmp_path, ["scheduler", name])
            if each["metadata"]["name"] == "vgpu-scheduler"
        }
        assert objects["ConfigMap"]["data"].keys() == {file}
        containers = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
        command = containers[0]["command"]
        assert f"{flag}=/etc/kube-scheduler/{file}" in command
        assert len(containers) == 2
        assert objects["PodDisruptionBudget"]["apiVersion"] == version
    assert '"preemptVerb"' not in objects["ConfigMap"]["data"]["policy.json"]


_SHARING = """\
version: v1
families: {nvidia: false, volcanoVgpu: true}
volcanoVgpu: {isolation: none}
cluster: {withdrawAtStop: true}
"""
_OF_THE_AGENT = ("volcano.sh/", "vgpu-agent.internal/")


def _left_on_the_node(rig: Rig) -> dict[str, str]:
    metadata = rig.api.get(f"/api/v1/nodes/{rig.node_name()}")["metadata"]
    keys = {**metadata.get("annotations", {}), **metadata["labels"]}
    return {key: value for key, value in keys.items() if key.startswith(_OF_THE_AGENT)}


def test_a_removal_leaves_nothing_on_the_node_but_the_deleted_handshake(deployed: Deployed) -> None:
    """docs/operations.md, Remove: with the rights it has until its end,
    the agent takes its annotations and labels off.

    The last test of this file, because the agent is gone afterwards.
    """
    rig = deployed.rig
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/vgpu-agent"
    rig.api.patch(path, {"data": {"config.yaml": _SHARING}}, content_type=MERGE)
    rig.kubectl("rollout", "restart", "daemonset/vgpu-agent", "-n", NAMESPACE)
    wait_until_rolled_out(rig)
    written = {"vgpu-agent.internal/volcano-vgpu-isolation", "volcano.sh/node-vgpu-register"}
    rig.wait_for(
        lambda: written < _left_on_the_node(rig).keys() or None,
        what="the agent's annotations, of which its readiness says nothing",
    )

    rig.kubectl("delete", "daemonset", "vgpu-agent", "-n", NAMESPACE, "--cascade=foreground")
    rig.wait_for(lambda: not rig.pods(namespace=NAMESPACE), 40, what="the agent's end")
    ((key, value),) = _left_on_the_node(rig).items()
    assert key == "volcano.sh/node-vgpu-handshake"
    assert value.startswith("Deleted_")
