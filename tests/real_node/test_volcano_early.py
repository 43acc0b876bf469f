"""Early binding on a real node: the kubelet does not name the pod of an Allocate, so a guess is
proven before the container starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.real_node.agents import NodeAgent
from tests.real_node.rig import Rig
from tests.real_node.volcano import VolcanoScheduler, vgpu, volcano_pod
from tests.real_node.volcano_node import (
    COARSE_CONFIG,
    UNIT_MIB,
    seen,
    showing,
    start_vgpu,
    volcano_agent,
    wait_served,
    waiting_reasons,
)

STORM = 10


@pytest.fixture
def agent(volcano_rig: Rig) -> Iterator[NodeAgent]:
    """An agent whose runtime takes nothing after the answer."""
    running = volcano_agent(volcano_rig, COARSE_CONFIG, cdi=False)
    try:
        yield start_vgpu(running, UNIT_MIB)
    finally:
        running.close()


def test_pods_one_after_the_other(volcano_rig: Rig, agent: NodeAgent) -> None:
    """volcano-vgpu:G4, volcano-vgpu:G5: without CDI the answer is complete in Allocate,
    and no spec is written.
    """
    rig = volcano_rig
    with VolcanoScheduler(rig):
        for name, memory in {"early-1": 30, "early-2": 40, "early-3": 50}.items():
            rig.create_pod(volcano_pod(name, containers=[showing(limits=vgpu(1, memory, 20))]))
            found = seen(rig, name)
            assert (found.limit, found.region[2], found.region[4]) == (
                f"{memory * UNIT_MIB}m",
                memory * UNIT_MIB << 20,
                20,
            )
            wait_served(rig, name)
    assert not list(rig.cdi_dir().iterdir())


def test_in_a_storm_nobody_runs_with_another_ones_limits(
    volcano_rig: Rig, agent: NodeAgent, record_property: Callable[[str, object], None]
) -> None:
    """volcano-vgpu:D2: unequal pods at once:
    each that runs has its own limit, and a refusal names the pod of its answer.
    """
    rig, limits = volcano_rig, {f"storm-{number}": 30 + 2 * number for number in range(STORM)}
    for name, memory in limits.items():
        rig.create_pod(volcano_pod(name, containers=[showing(limits=vgpu(1, memory))]))
    with VolcanoScheduler(rig, policy="spread"):
        running, refused = _settled(rig, limits)
        for name in running:
            assert seen(rig, name).limit == f"{limits[name] * UNIT_MIB}m"
    wrong = {name: text for name, text in refused.items() if "was made for" not in text}
    record_property("started, refused", (len(running), len(refused)))
    # `pytest -rP` shows it
    print(f"storm of {STORM}: {len(running)} started, {len(refused)} refused: {refused}")  # noqa: T201
    assert not wrong
    assert len(running) + len(refused) == STORM


def _settled(rig: Rig, names: dict[str, int]) -> tuple[list[str], dict[str, str]]:
    """Return the running pods, and why the others do not run, once each pod is one or the other."""
    deadline = time.monotonic() + 60
    while True:
        running = [
            pod["metadata"]["name"] for pod in rig.pods() if pod["status"].get("phase") == "Running"
        ]
        refused = {
            name: text
            for name, text in waiting_reasons(rig).items()
            if "PreStartContainer" in text or text.startswith("Failed")
        }
        lasting = [text for text in refused.values() if "the kubelet will retry" not in text]
        if len(running) + len(lasting) == len(names) or time.monotonic() > deadline:
            return running, refused
        time.sleep(0.2)
