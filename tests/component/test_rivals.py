"""Two device plugins for one resource on one kubelet:
what the other one leaves behind must not stay broken (kubelet §3).
"""

from __future__ import annotations

from pathlib import Path

from tests.component.conftest import GPU, QUICK, Stage
from tests.golden import U0
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.state import SimulatedNode


async def _second(stage: Stage, gpus: Path | None = None) -> AgentProcess:
    """Another agent beside the first, offering the same GPUs or those of another folder."""
    # with a state directory of its own it does not know that it could take over
    second = stage.agent(QUICK + f"stateDirectory: {stage.folder}/rival\n")
    if gpus is not None:
        second = AgentProcess(
            stage.folder / "rival.log",
            kubelet=stage.folder / "kubelet",
            simulate=gpus,
            config=stage.config,
            constants=stage.constants,
        )
        stage.agents.append(second)
    before = len(stage.kubelet.called("list", GPU))
    await second.start()
    await stage.kubelet.until(lambda: len(stage.kubelet.called("list", GPU)) > before)
    return second


def _last_errors(answer: list[dict[str, str]]) -> str:
    return " ".join(plugin["last_error"] for plugin in answer)


async def test_a_second_agent_that_goes_takes_nothing_with_it(stage: Stage) -> None:
    """The one that stays has an open stream and no error.
    It finds out by itself, and pods are admitted again.
    """
    first = await stage.ready_agent(QUICK)
    second = await _second(stage)
    await stage.allocatable(2)

    await second.terminate()
    await stage.allocatable(0)

    await stage.allocatable(2)
    said = await first.until_logged("plugin.not_listed")
    assert (said["resource"], said["missing"]) == (GPU, 2)
    pod = await stage.admit("train")
    assert stage.ids(pod) == [U0]
    await first.until("/debug/resources", lambda answer: not _last_errors(answer["resources"]))
    assert len(stage.kubelet.called("Register", GPU)) == 3


async def test_a_rival_is_named_and_the_resource_comes_back_when_it_goes(stage: Stage) -> None:
    """Ids that are not ours are an error with an example.
    Neither of the two gives up, and the last one there has it all.
    """
    first = await stage.ready_agent(QUICK)
    other = SimulatedNode.create(
        stage.folder / "others", model="A100-SXM4-40GB", gpus=2, seed="another"
    )
    rival = await _second(stage, other.directory)

    said = await first.until_logged("plugin.rival")
    assert said["level"] == "error"
    assert (
        "another plugin offers nvidia.com/gpu as well: 2 ids that are not the agent's, e.g. GPU-"
        in said["reason"]
    )
    await rival.terminate()

    await stage.kubelet.until(lambda: U0 in stage.kubelet.resource(GPU).healthy)
    await stage.allocatable(2)
    assert stage.ids(await stage.admit("train")) == [U0]


async def test_a_kubelet_that_does_not_tell_is_served_as_ever(stage: Stage) -> None:
    """No GetAllocatableResources: no line about it above debug, no new registration."""
    stage.kubelet.faults.no_allocatable = True
    agent = await stage.ready_agent(QUICK)
    await stage.kubelet.until(lambda: len(stage.kubelet.called("GetAllocatableResources")) == 1)
    asked = len(stage.kubelet.called("List"))
    await stage.kubelet.until(lambda: len(stage.kubelet.called("List")) > asked + 2)

    assert len(stage.kubelet.called("GetAllocatableResources")) == 1
    assert len(stage.kubelet.called("Register")) == 1
    assert [line["msg"] for line in agent.log_lines() if "allocatable" in line["msg"]] == []
