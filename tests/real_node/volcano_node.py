"""A real Kubernetes node whose Volcano resources the agent offers, and what its containers find.

For the tests test_volcano*.py. The agent runs on the host, in the rig's network; what it makes for
containers lies in its own folder, which has the same path on the node. The library only passes for
one: busybox is static, so it is never loaded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from tests import constants
from tests.real_node.agents import (
    QUICK,
    QUICK_CONSTANTS,
    NodeAgent,
    wait_allocatable,
    wait_annotated,
)
from tests.real_node.rig import Rig
from tests.real_node.rig.api import ApiError
from tests.real_node.rig.manifests import container
from tests.real_node.volcano import VGPU, annotations_of
from vgpu_agent.sim.stand_in_library import deliver_stand_in_library

REGISTER = "volcano.sh/node-vgpu-register"
U0, U1 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
MODEL, MEMORY_MIB = "A10", 23028

_VGPU = """\
families: {nvidia: false, volcanoVgpu: true}
stateDirectory: FOLDER/state
hamiCore: {hostDirectory: FOLDER/hook}
"""
# everything that is no path as on a node whose admin has set nothing
PLAIN_CONFIG = f"version: v1\n{_VGPU}"
VGPU_CONFIG = f"{QUICK}{_VGPU}"
VGPU_CONSTANTS = QUICK_CONSTANTS | {
    constants.API_BACKOFF_MIN: 0.2,
    constants.API_BACKOFF_MAX: 1,
    constants.HANDSHAKE: 1,
}
# Where many pods ask for memory and its unit is not what matters: kubelet keeps each unit as an id,
# in a file that it writes anew for each pod.
UNIT_MIB = 64
COARSE_CONFIG = f"{VGPU_CONFIG}volcanoVgpu: {{gpuMemoryFactor: {UNIT_MIB}}}\n"
GPUSHARE_CONFIG = VGPU_CONFIG.replace("volcanoVgpu: true", "volcanoGpushare: true")

# Offsets in the region that the library maps (hami-core §2.2): mark, number of GPUs, first two
# limits of memory and of compute.
_REGION = (0, 4), (56, 8), (1600, 16), (1728, 16)
_SHOW_REGION = "; ".join(
    f"echo REGION $(od -An -v -t u{min(size, 8)} -j {at} -N {size} /tmp/cudevshr.cache)"
    for at, size in _REGION
)
SHOW = f"env; cat /proc/mounts; test ! -e /tmp/cudevshr.cache || {{ {_SHOW_REGION}; }}; echo READY"


@dataclasses.dataclass(frozen=True)
class Seen:
    """Observations of a container when it started.

    Attributes:
        environment: its variables.
        mounts: path → options of what is mounted there.
        region: the numbers of `_REGION`, bytes and percent; empty without one.
    """

    environment: Mapping[str, str]
    mounts: Mapping[str, str]
    region: tuple[int, ...]

    @property
    def limit(self) -> str:
        """The memory limit of its first GPU in its environment; empty when there is none."""
        return self.environment.get("CUDA_DEVICE_MEMORY_LIMIT_0", "")

    @property
    def gpus(self) -> str:
        """Its GPUs."""
        return self.environment.get("NVIDIA_VISIBLE_DEVICES", "")


def volcano_agent(
    rig: Rig,
    config: str = VGPU_CONFIG,
    *,
    cdi: bool = True,
    constants: Mapping[str, float] = VGPU_CONSTANTS,
) -> NodeAgent:
    """An agent for the golden node, two A10, not started yet;
    ``cdi`` binds late, in the rig's directory of CDI specs.
    """
    binding = (
        f"binding: {{mode: late, cdiDirectory: {rig.cdi_dir()}}}\n"
        if cdi
        else "binding: {mode: early}\n"
    )
    agent = NodeAgent(
        rig,
        config + binding,
        gpus=2,
        model=MODEL,
        uuids=[U0, U1],
        in_cluster=True,
        constants=constants,
    )
    hook = agent.folder / "hook"
    hook.mkdir()
    deliver_stand_in_library(hook)
    return agent


def start_vgpu(agent: NodeAgent, unit_mib: int = 1) -> NodeAgent:
    """Start it and wait until the Node shows all of its vGPU resources and its cards, which are
    written independently.
    """
    agent.start()
    for name, number in {
        "number": 20,
        "memory": 2 * (MEMORY_MIB // unit_mib),
        "cores": 200,
    }.items():
        wait_allocatable(agent.rig, number, resource=VGPU + name)
    wait_annotated(agent.rig, REGISTER)
    return agent


def showing(
    name: str = "main", limits: Mapping[str, int] | None = None, *, then: str = "sleep 100000"
) -> dict[str, Any]:
    """A container that prints what `seen` reads, and then does ``then``."""
    return container(name, command=f"{SHOW}; {then}", limits=limits)


def seen(rig: Rig, pod: str, container_name: str = "main", timeout: float = 30) -> Seen:
    """Return the observations of a `showing` container since its last start,
    once it has printed them all.
    """

    def printed() -> list[str] | None:
        try:
            lines = rig.logs(pod, container=container_name).splitlines()
        except ApiError as err:
            # kubelet has not started it, or not seen the pod
            if err.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
                return None
            raise
        return lines if "READY" in lines else None

    try:
        lines = rig.wait_for(printed, timeout)
    except TimeoutError as err:
        raise TimeoutError(
            f"{pod}/{container_name} printed nothing in {timeout:g} s: "
            f"{waiting_reasons(rig).get(pod, '')}"
        ) from err
    mounts = [
        line.split() for line in lines if len(line.split()) == 6 and line.split()[1].startswith("/")
    ]
    return Seen(
        environment=dict(line.split("=", 1) for line in lines if "=" in line and " /" not in line),
        mounts={fields[1]: fields[3] for fields in mounts},
        region=tuple(
            int(number)
            for line in lines
            if line.startswith("REGION")
            for number in line.split()[1:]
        ),
    )


def wait_served(rig: Rig, pod: str, timeout: float = 30) -> dict[str, str]:
    """The pod's annotations once the agent has written
    that all its containers are served (volcano-vgpu:G5).

    It does not while other pods are being started, ten seconds at most
    (`STARTS_FIRST_SECONDS`).
    """

    def served() -> dict[str, str] | None:
        found = annotations_of(rig, pod)
        return found if found.get("volcano.sh/bind-phase") == "success" else None

    return rig.wait_for(
        served, timeout, what=f"{pod} to be served; it says {annotations_of(rig, pod)}"
    )


def wait_running(rig: Rig, names: Collection[str], timeout: float = 60) -> None:
    """Wait until all of these pods, which exist, run.

    Only names are asked for, in one request a look: kubelet writes each id that a pod holds into
    its status, hundreds of KiB in all.
    """

    def running() -> bool | None:
        left = rig.api.names("/api/v1/namespaces/default/pods?fieldSelector=status.phase!=Running")
        return True if set(names).isdisjoint(left) else None

    try:
        rig.wait_for(running, timeout)
    except TimeoutError as err:
        raise TimeoutError(
            "\n".join(f"{name}: {why}" for name, why in waiting_reasons(rig).items())
        ) from err


def waiting_reasons(rig: Rig) -> dict[str, str]:
    """Pod → why it does not run, for those that do not."""
    reasons = {}
    for pod in rig.pods():
        status = pod["status"]
        states = [each["state"].get("waiting", {}) for each in status.get("containerStatuses", [])]
        texts = [
            status.get("message", ""),
            *(f"{state.get('reason', '')} {state.get('message', '')}".strip() for state in states),
        ]
        if status.get("phase") != "Running":
            reasons[pod["metadata"]["name"]] = (
                f"{status.get('phase')} {' | '.join(filter(None, texts))}"
            )
    return reasons


def restarted(rig: Rig, pod: str, timeout: float = 60) -> None:
    """Wait until the pod's container has been started anew and runs."""

    def runs_again() -> bool | None:
        status = (rig.pod(pod) or {})["status"]["containerStatuses"][0]
        return True if status["restartCount"] >= 1 and "running" in status["state"] else None

    rig.wait_for(runs_again, timeout, what=f"a restart of {pod}")


def seen_limit(rig: Rig, pod: str) -> str:
    """Return the ``LIMIT=…`` that a running container printed."""
    found = rig.wait_for(
        lambda: re.findall(r"^LIMIT=(.*)$", rig.logs(pod), re.MULTILINE) or None,
        what=f"the output of {pod}",
    )
    return str(found[-1])
