"""A real Kubernetes node whose GPUs are shared as by vgpu-manager: the stand-in extender as a
process, pods for it, and what their containers found.

For the tests test_vgpu_manager*.py. The agent runs on the host, in the rig's network; what it makes
for containers lies in its own folder, which has the same path on the node. The library only passes
for one: busybox is static, so it is never loaded.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from tests.real_node.rig.manifests import container, pod
from tests.real_node.volcano import VolcanoScheduler
from tests.real_node.volcano_node import U0, U1, waiting_reasons
from vgpu_agent.sim.stand_in_library import deliver_stand_in_control_library
from vgpu_agent.sim.vgpu_manager.formats import Claim, Claims, read_claims
from vgpu_agent.sim.vgpu_manager.ledger import Use, footprint

DOMAIN = "nvidia.com"
NUMBER = f"{DOMAIN}/vgpu-number"
PRE, REAL = f"{DOMAIN}/pre-allocated", f"{DOMAIN}/real-allocated"
PLANNED, TIME = f"{DOMAIN}/predicate-node", f"{DOMAIN}/predicate-time"
PHASE, REGISTER = f"{DOMAIN}/assigned-phase", f"{DOMAIN}/node-device-register"
SPLIT = 30
MEMORY_MIB = 23028
# A watch that an outage broke may come back half a minute late.
PATIENCE_SECONDS = 60

_CONFIG = f"""\
{QUICK}families: {{nvidia: false, vgpuManager: true}}
stateDirectory: FOLDER/state
vgpuControl: {{hostDirectory: FOLDER/control}}
vgpuManager: {{deviceSplitCount: {SPLIT}}}
"""
_CONSTANTS = QUICK_CONSTANTS | {constants.API_BACKOFF_MIN: 0.2, constants.API_BACKOFF_MAX: 1}
# The file that the library reads (vgpu-manager §7.7): pod UID, container, and of each slot the
# memory in bytes and percent of compute.
_FILE = "/etc/vgpu-manager/config/vgpu.config"
_TEXTS = (("OWNER_POD", 128, 48), ("OWNER_CONTAINER", 304, 64))


def reading(slots: int = 2) -> str:
    """A shell command that prints what `wrong` compares: whose the library's file is, and so many
    of its slots, as NAME=value lines; nothing where there is no file.
    """
    numbers = (
        (f"{name}_{slot}", 512 + 128 * slot + at, size)
        for slot in range(slots)
        for name, at, size in (("SLOT_BYTES", 56, 8), ("SLOT_CORES", 72, 4))
    )
    lines = [
        f"echo {name}=$(dd if={_FILE} bs=1 skip={at} count={size} 2>/dev/null | tr -d '\\000')"
        for name, at, size in _TEXTS
    ] + [
        f"echo {name}=$(od -An -v -t u{size} -j {at} -N {size} {_FILE})"
        for name, at, size in numbers
    ]
    return f"test ! -e {_FILE} || {{ {'; '.join(lines)}; }}"


_SHOW = f"env; {reading()}; echo READY"


class Extender(VolcanoScheduler):
    """The stand-in for vgpu-manager's scheduler on a rig's API server."""

    module = "vgpu_agent.sim.vgpu_manager.extender"
    started = "sim.vgpu_extender.started"

    def __init__(self, rig: Rig, *, policy: str = "binpack") -> None:
        super().__init__(rig)
        self._flags = ["--device-policy", policy]


def vgpu_manager_agent(rig: Rig) -> NodeAgent:
    """An agent for two A10, not started yet, which binds late."""
    agent = NodeAgent(
        rig,
        f"{_CONFIG}binding: {{mode: late, cdiDirectory: {rig.cdi_dir()}}}\n",
        gpus=2,
        model="A10",
        uuids=[U0, U1],
        in_cluster=True,
        constants=_CONSTANTS,
    )
    deliver_stand_in_control_library(agent.folder / "control")
    return agent


def start(agent: NodeAgent) -> NodeAgent:
    """Start it and wait until the Node shows its vGPUs and its annotations, which are written
    independently.
    """
    agent.start()
    wait_allocatable(agent.rig, 2 * SPLIT, PATIENCE_SECONDS, resource=NUMBER)
    wait_annotated(agent.rig, REGISTER)
    return agent


def asks(number: int = 1, cores: int = 0, memory: int = 0) -> dict[str, int]:
    """The limits of a container; what is 0 is not mentioned."""
    named = {"vgpu-number": number, "vgpu-cores": cores, "vgpu-memory": memory}
    return {f"{DOMAIN}/{name}": value for name, value in named.items() if value}


def showing(
    name: str = "main", limits: Mapping[str, int] | None = None, *, then: str = "sleep 100000"
) -> dict[str, Any]:
    """A container that prints what `check_container` reads, and then does ``then``."""
    return container(name, command=f"{_SHOW}; {then}", limits=limits)


def extender_pod(
    name: str, containers: Sequence[dict[str, Any]], *, init: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """A pod for the stand-in extender."""
    more: dict[str, Any] = {"initContainers": list(init)} if init else {}
    return pod(
        name,
        containers=list(containers),
        schedulerName="vgpu-scheduler",
        **more,
    )


def unequal_pods(prefix: str, number: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Pods of all shapes, no two containers with the same memory: one or two GPU containers, one
    card or two, beside containers without, behind an init container or a sidecar.
    """
    memory = rng.sample(range(50, 450), 2 * number)
    for place in range(number):

        def asked(cards: int = 1) -> dict[str, int]:
            return asks(cards, rng.randint(1, 2), memory.pop())

        shape = place % 5
        containers, init = [showing(limits=asked())], []
        if shape == 1:
            containers = [showing("first", asked()), showing("second", asked())]
        elif shape == 2:
            containers = [showing("plain"), showing(limits=asked(2))]
        elif shape == 3:
            init = [showing("prepare", asked(), then="true")]
        elif shape == 4:
            init = [showing("side", asked()) | {"restartPolicy": "Always"}]
        made = extender_pod(f"{prefix}-{place:02}", containers, init=init)
        # A network for each pod would cost this machine more than all else.
        made["spec"]["hostNetwork"] = True
        yield made


def asking(made: Mapping[str, Any]) -> list[str]:
    """Return the containers of a pod that ask for GPUs, init containers first."""
    spec = made["spec"]
    return [
        each["name"]
        for each in (*spec.get("initContainers", ()), *spec["containers"])
        if NUMBER in each["resources"].get("limits", {})
    ]


def wait_done(rig: Rig, names: Collection[str], timeout: float = PATIENCE_SECONDS) -> set[str]:
    """Wait until the kubelet is done with each of these pods; those that have failed."""

    def done() -> dict[str, str] | None:
        phases = {each["metadata"]["name"]: each["status"].get("phase", "") for each in rig.pods()}
        found = {name: phases.get(name, "") for name in names}
        return found if set(found.values()) <= {"Running", "Failed"} else None

    try:
        found = rig.wait_for(done, timeout)
    except TimeoutError as err:
        raise TimeoutError(
            "\n".join(f"{name}: {why}" for name, why in waiting_reasons(rig).items())
        ) from err
    return {name for name, phase in found.items() if phase == "Failed"}


def wait_served(rig: Rig, name: str, timeout: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """The pod once the agent has written that all its containers are served."""

    def served() -> dict[str, Any] | None:
        found = rig.pod(name)
        assert found is not None, f"there is no pod {name}"
        return found if found["metadata"].get("labels", {}).get(PHASE) == "succeed" else None

    return rig.wait_for(served, timeout, what=f"{name} to be marked as served")


def claims_of(rig: Rig, name: str) -> Claims:
    """The claims that are planned for the pod."""
    found = rig.pod(name)
    assert found is not None, f"there is no pod {name}"
    claims = read_claims(found["metadata"].get("annotations", {}).get(PRE, ""))
    assert claims is not None, f"pod {name} has no claim"
    return claims


def check_pods(rig: Rig, names: Collection[str]) -> int:
    """Check what each container of these pods found against its claim, and that no card is given
    out beyond its size; return how many containers with GPUs there were.
    """
    checked, used = 0, dict[str, Use]()
    for item in rig.pods():
        name = item["metadata"]["name"]
        if name not in names:
            continue
        claims = claims_of(rig, name)
        assert list(claims) == asking(item)
        for container_name, cards in claims.items():
            found = environment(rig, name, container_name)
            problem = wrong(found, item["metadata"]["uid"], container_name, cards)
            assert not problem, f"{name}/{container_name}: {problem}"
            checked += 1
        for uuid, use in footprint(item, claims).items():
            used[uuid] = used.get(uuid, Use()) + use
    assert all(use.memory <= MEMORY_MIB and use.cores <= 100 for use in used.values()), used
    return checked


def wrong(
    found: Mapping[str, str],
    uid: str,
    container_name: str,
    cards: Sequence[Claim],
    *,
    slots: int = 2,
) -> str:
    """Explain in what a container's environment and file differ from its claim; empty when in
    nothing. ``slots`` of the file were printed by `reading`.
    """
    wanted = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(card.uuid for card in cards),
        "VGPU_POD_UID": uid,
        "VGPU_CONTAINER_NAME": container_name,
        "OWNER_POD": uid,
        "OWNER_CONTAINER": container_name,
    }
    wanted |= {f"SLOT_{what}_{slot}": "0" for what in ("BYTES", "CORES") for slot in range(slots)}
    for card in cards:
        wanted[f"CUDA_MEM_LIMIT_{card.index}"] = f"{card.memory}m"
        wanted[f"CUDA_CORE_LIMIT_{card.index}"] = str(card.cores) if 0 < card.cores < 100 else ""
        wanted[f"SLOT_BYTES_{card.index}"] = str(card.memory << 20)
        wanted[f"SLOT_CORES_{card.index}"] = str(card.cores)
    got = {
        key: value
        for key, value in found.items()
        if key in wanted or key.startswith(("CUDA_MEM_LIMIT_", "CUDA_CORE_LIMIT_"))
    }
    if got != wanted:
        return f"claimed is {wanted}, it got {got}"
    return ""


def environment(
    rig: Rig, name: str, container_name: str = "main", timeout: float = PATIENCE_SECONDS
) -> dict[str, str]:
    """Return what a `showing` container has printed since its last start: its environment, and what
    it has read from its file.
    """

    def printed() -> list[str] | None:
        try:
            lines = rig.logs(name, container=container_name).splitlines()
        except ApiError as err:
            if err.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
                return None
            raise
        return lines if "READY" in lines else None

    lines = rig.wait_for(printed, timeout, what=f"the output of {name}/{container_name}")
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name: value.strip() for name, value in pairs}
