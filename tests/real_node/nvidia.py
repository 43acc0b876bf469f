"""NVIDIA's resources on a real node: agents for a test, pods that print what they got, and how
often their containers were started.

For the tests test_nvidia_*.py. The agent runs on the host as in `agents`; containers print the
variables and device nodes that concern GPUs, and then stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.real_node.agents import GPU, NodeAgent
from tests.real_node.rig import ApiError, Rig
from tests.real_node.rig.manifests import container, pod

_PROJECT = Path(__file__).resolve().parents[2]
_END_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# Present on every simulated node; the agent lists those that are there.
CONTROL_NODES = (
    "/dev/nvidia-modeset",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidiactl",
)
_NAMES = "NVIDIA_|CUDA_|VGPU_|GRANTED"
PRINT = (
    f"env | grep -E '^({_NAMES})'; find /dev -name '*nvidia*' ! -type d | sort; echo READY; sleep "
    "100000"
)


@dataclasses.dataclass(frozen=True)
class Printed:
    """Observations of a container.

    Attributes:
        environment: the variables that concern GPUs.
        nodes: the device nodes that do, sorted.
    """

    environment: Mapping[str, str]
    nodes: Sequence[str]

    @property
    def devices(self) -> str:
        """Return the devices that the runtime should make visible."""
        return self.environment.get("NVIDIA_VISIBLE_DEVICES", "")


def plugin_config(**plugin: str) -> str:
    """The section ``plugin`` of a configuration."""
    return f"plugin: {{{', '.join(f'{key}: {value}' for key, value in plugin.items())}}}\n"


def cdi_config(rig: Rig, strategy: str, **plugin: str) -> str:
    """Sections of a configuration that tells containers of devices by CDI names, which containerd
    resolves in the rig's directory.
    """
    return (
        plugin_config(deviceListStrategy=f"[{strategy}]", **plugin)
        + f"binding: {{cdiDirectory: {rig.cdi_dir()}}}\n"
    )


@contextlib.contextmanager
def running(agent: NodeAgent) -> Iterator[NodeAgent]:
    """Start the agent; it is closed at the end."""
    with contextlib.closing(agent):
        agent.start()
        yield agent


@contextlib.contextmanager
def former_plugin(
    rig: Rig, offers: Mapping[str, Mapping[str, int]]
) -> Iterator[subprocess.Popen[bytes]]:
    """The plugin from before beside the kubelet, once that has its devices; see
    `tests.real_node.former_plugin`. The Node may still show those of another test's plugin.
    """
    command = [
        *_END_WITH_PARENT,
        sys.executable,
        "-m",
        "tests.real_node.former_plugin",
        str(rig.kubelet_dir()),
        json.dumps(offers),
    ]
    with subprocess.Popen(command, cwd=_PROJECT, stdout=subprocess.PIPE) as plugin:
        try:
            assert plugin.stdout is not None
            for _ in offers:
                assert plugin.stdout.readline() == b"listed\n"
            yield plugin
        finally:
            plugin.kill()
            plugin.wait()


def gpu_pod(name: str, limits: Mapping[str, int] | int = 1, **spec: Any) -> dict[str, Any]:
    """A pod that prints what it got; a number is one of ``nvidia.com/gpu``."""
    return pod(
        name, command=PRINT, limits={GPU: limits} if isinstance(limits, int) else limits, **spec
    )


def gpu_container(name: str, limits: Mapping[str, int]) -> dict[str, Any]:
    """One such container of a pod."""
    return container(name, command=PRINT, limits=limits)


def wait_running(rig: Rig, names: Collection[str], timeout: float = 40) -> None:
    """Wait until all of these pods run."""
    for name in names:
        rig.wait_for_phase(name, "Running", timeout)


def printed(rig: Rig, name: str, container_name: str = "main", timeout: float = 20) -> Printed:
    """Return the container's output since its last start, once that is all of it."""

    def found() -> list[str] | None:
        try:
            lines = rig.logs(name, container=container_name).splitlines()
        except ApiError as err:
            # kubelet has not started it yet
            if err.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
                return None
            raise
        return lines if "READY" in lines else None

    lines = rig.wait_for(found, timeout, what=f"the output of {name}/{container_name}")
    return Printed(
        dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("/")),
        [line for line in lines if line.startswith("/dev/")],
    )


def containers_of(rig: Rig, names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Pod → its first container's id and how often that was started again:
    what must not change under a running pod.
    """
    states = {}
    for name in names:
        found = rig.pod(name)
        assert found is not None, f"there is no pod {name}"
        status = found["status"]["containerStatuses"][0]
        states[name] = str(status.get("containerID", "")), int(status["restartCount"])
    return states


def restart_container(rig: Rig, name: str) -> None:
    """Let the pod's container crash, and wait until kubelet has started it again."""
    restarts = containers_of(rig, [name])[name][1]
    # A moment later, so that the exec itself does not die with the container.
    rig.exec(name, "sh", "-c", "(sleep 0.2; kill 1) </dev/null >/dev/null 2>&1 &")

    def again() -> bool | None:
        status = (rig.pod(name) or {})["status"]["containerStatuses"][0]
        return True if status["restartCount"] > restarts and "running" in status["state"] else None

    rig.wait_for(again, 40, what=f"a restart of {name}")
