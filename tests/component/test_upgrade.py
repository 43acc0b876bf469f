"""Two agents of one node at once, as in a rolling update with ``maxSurge: 1``: the new one takes
over when it is ready to serve, and the old one serves again if the new one fails.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests import constants
from tests.component.conftest import QUICK, SHARED, Stage
from tests.component.volcano import NUMBER, VolcanoStage, asks, volcano_stage
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.agent.succession import SOCKET
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.kubelet.faults import AdmissionError
from vgpu_agent.sim.kubelet.kubelet import Pod

PODS = 40
MANY = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 40}]}}\n"


async def _start_beside(stage: Stage, config: str = QUICK + SHARED) -> AgentProcess:
    """A second agent, started while the first runs, once it serves."""
    second = stage.agent(config)
    await second.start()
    await second.until_ready()
    return second


async def test_the_new_agent_takes_over_between_two_pods(stage: Stage) -> None:
    """Pods are admitted all the time, and none fails. No id is given twice, and the new agent knows
    the holders of all of them.
    """
    old = await stage.ready_agent(QUICK + MANY)
    pods = asyncio.ensure_future(_admit(stage))
    new = await _start_beside(stage, QUICK + MANY)
    admitted, failed_at = await pods
    assert not failed_at
    ids = [one for pod in admitted for one in stage.ids(pod)]
    assert len(ids) == len(set(ids)) == PODS
    assert (await new.until_logged("agent.took_over"))["predecessor"]
    status, text = await old.get_text("/readyz")
    assert status == 503
    assert "another agent has taken over this node" in text
    # pods that the old agent served meanwhile come with the next reading of the kubelet's records
    await new.until(
        "/debug/ledger",
        lambda ledger: {one for grant in ledger["grants"] for one in grant["ids"]} == set(ids),
    )
    assert await old.terminate() == 0
    await stage.allocatable(80)
    assert (await new.get_text("/readyz"))[0] == 200


async def _admit(stage: Stage) -> tuple[list[Pod], list[float]]:
    """Admit pods one after the other; return them, and when others failed."""
    admitted, failed_at = [], []
    for number in range(PODS):
        try:
            admitted.append(await stage.admit(f"pod-{number}"))
        except AdmissionError:
            failed_at.append(time.time())
        await asyncio.sleep(0.05)
    return admitted, failed_at


async def test_the_kubelet_notices_the_end_of_the_new_agent(stage: Stage) -> None:
    """It disconnects the client that it noted when the new agent registered."""
    await stage.ready_agent()
    new = await _start_beside(stage)
    await stage.allocatable(8)
    await new.kill()
    await stage.kubelet.until(lambda: stage.kubelet.called("stream ended")[-1].facts["noticed"])


async def test_a_resource_that_the_new_agent_does_not_offer_has_no_healthy_ids(
    stage: Stage,
) -> None:
    """The kubelet keeps those of the others only."""
    one = "{name: gpu, replicas: 4, rename: %s, devices: [0]}"
    two = f"sharing: {{timeSlicing: {{resources: [{one}]}}}}\n"
    await stage.ready_agent(QUICK + two % "nvidia.com/old")
    await stage.kubelet.until(lambda: stage.kubelet.resource("nvidia.com/old").allocatable == 4)
    await _start_beside(stage, QUICK + two % "nvidia.com/new")
    await stage.kubelet.until(lambda: stage.kubelet.resource("nvidia.com/new").allocatable == 4)
    await stage.kubelet.until(lambda: stage.kubelet.resource("nvidia.com/old").allocatable == 0)


@pytest.mark.parametrize("fault", ["tells_clients_apart", "asks_no_options"])
async def test_another_kubelet_has_no_healthy_ids_for_a_moment(stage: Stage, fault: str) -> None:
    """The end of the old stream takes them away, and the new agent registers at once. Only pods
    that are admitted in between fail.
    """
    setattr(stage.kubelet.faults, fault, True)
    old = await stage.ready_agent(QUICK + MANY)
    pods = asyncio.ensure_future(_admit(stage))
    new = await _start_beside(stage, QUICK + MANY)
    admitted, failed_at = await pods
    assert len(admitted) > PODS / 2
    ended = _moment(await old.until_logged("stream.ended"))
    registration = await new.until_logged("plugin.registered")
    registered = _moment(registration)
    assert registered - ended < 1  # less than `UNLINK_SECONDS`

    def lists() -> list[float]:
        return [
            call.at
            for call in stage.kubelet.called("list")
            if call.facts["endpoint"] == registration["endpoint"]
        ]

    await stage.kubelet.until(lambda: bool(lists()))
    listed = time.time() - time.monotonic() + lists()[0]
    last = max(registered, listed) + 0.2
    assert all(ended <= at <= last for at in failed_at), (ended, registered, listed, failed_at)
    await stage.allocatable(80)
    assert (await new.get_text("/readyz"))[0] == 200


def _moment(line: dict[str, Any]) -> float:
    return dt.datetime.fromisoformat(line["ts"]).timestamp()


async def test_the_old_agent_serves_again_when_the_new_one_is_killed(stage: Stage) -> None:
    """A new version that dies before the old pod is deleted does not leave the node without an
    agent.
    """
    old = await stage.ready_agent()
    new = await _start_beside(stage)
    await old.until_logged("agent.handed_over")
    await new.kill()
    assert (await old.until_logged("agent.successor_lost"))["level"] == "warning"
    # until then the kubelet still has the list of the killed one
    await stage.kubelet.until(lambda: stage.kubelet.called("stream ended")[-1].facts["noticed"])
    await stage.allocatable(8)
    pod = await stage.admit("train")
    assert len(stage.ids(pod)) == 1
    assert await old.terminate() == 0


async def test_a_bad_configuration_of_the_new_agent_changes_nothing(stage: Stage) -> None:
    """The new one ends before it asks for anything; the old one goes on."""
    old = await stage.ready_agent()
    new = stage.agent("version: v1\nsharing: 7\n")
    await new.spawn()
    assert await new.wait() == 2
    assert (await old.get_text("/readyz"))[0] == 200
    await stage.admit("train")


async def test_a_third_agent_takes_over_from_the_second(stage: Stage) -> None:
    """The first one does not come back when the second has ended: the third serves."""
    first = await stage.ready_agent()
    second = await _start_beside(stage)
    third = await _start_beside(stage)
    await second.until_logged("agent.handed_over")
    assert await second.terminate() == 0
    await stage.admit("train")
    assert len([line for line in first.log_lines() if line["msg"] == "agent.starting"]) == 1
    assert await first.terminate() == 0
    assert (await third.get_text("/readyz"))[0] == 200


async def test_what_a_killed_agent_leaves_is_no_predecessor(stage: Stage) -> None:
    """kill -9 leaves the socket behind, on which nobody listens."""
    old = await stage.ready_agent()
    await old.kill()
    new = await _start_beside(stage)
    assert not [line for line in new.log_lines() if line["msg"].startswith("agent.took")]
    await stage.allocatable(8)


async def test_a_predecessor_that_hangs_is_not_waited_for_for_ever(stage: Stage) -> None:
    """A stopped process accepts the connection and never answers."""
    stage.constants[constants.SUCCESSION_ANSWER] = 1
    old = await stage.ready_agent()
    os.kill(old.pid, signal.SIGSTOP)
    try:
        new = await _start_beside(stage)
        assert (await new.until_logged("agent.predecessor_silent"))["level"] == "warning"
        await stage.admit("train")
    finally:
        os.kill(old.pid, signal.SIGCONT)
        await old.kill()


async def test_of_two_agents_that_start_together_one_serves(stage: Stage) -> None:
    """Such as the two of a roll-out that was stuck, after a boot. The second takes over from the
    first, and never do both answer.
    """
    both = [stage.agent(), stage.agent()]
    await asyncio.gather(*(agent.start() for agent in both))
    await stage.allocatable(8)
    async with asyncio.timeout(30):
        while not [one for one in both if "agent.took_over" in _events(one)]:  # noqa: ASYNC110 - a log
            await asyncio.sleep(0.05)
    served = [one for one in both if "agent.took_over" not in _events(one)]
    assert len(served) == 1
    await served[0].until_logged("agent.handed_over")
    await next(one for one in both if one not in served).until_ready()
    await stage.admit("train")


def _events(agent: AgentProcess) -> set[str]:
    return {str(line["msg"]) for line in agent.log_lines()}


async def test_an_agent_whose_socket_was_deleted_is_not_waited_for_for_ever(stage: Stage) -> None:
    """It serves and has the lock, and cannot be asked. A roll-out must not stop at it."""
    stage.constants[constants.SUCCESSION_ANSWER] = 1
    await stage.ready_agent()
    _socket(stage).unlink()
    new = stage.agent(QUICK + SHARED)
    await new.spawn()
    assert (await new.until_logged("agent.waiting"))["reason"]
    await stage.admit("meanwhile")
    assert (await new.until_logged("agent.predecessor_silent"))["level"] == "warning"
    await new.until_logged("agent.started")
    rebuilt = [line["grants"] for line in new.log_lines() if line["msg"] == "ledger.rebuilt"]
    assert rebuilt == [0, 1]  # before the wait, and after it
    await stage.admit("train")


async def test_where_there_can_be_no_socket_the_next_agent_does_not_wait(stage: Stage) -> None:
    """It registers as it would without a hand-over, and both logs have the reason."""
    (stage.node.directory / "agent-state" / "succession.new").mkdir(parents=True)
    old = await stage.ready_agent()
    assert "stateDirectory" in (await old.until_logged("succession.unavailable"))["remedy"]
    new = await _start_beside(stage)
    assert not _events(new) & {"agent.waiting", "agent.predecessor_silent", "agent.took_over"}
    await stage.admit("train")


async def test_a_predecessor_that_wakes_up_does_not_take_the_node_back(stage: Stage) -> None:
    """It answers too late, and then waits for the end of the one that serves by now."""
    stage.constants[constants.SUCCESSION_ANSWER] = 1
    old = await stage.ready_agent()
    os.kill(old.pid, signal.SIGSTOP)
    new = await _start_beside(stage)
    os.kill(old.pid, signal.SIGCONT)
    await old.until_logged("agent.handed_over")
    # this kubelet forgets the new one's client, too, when the old one's stream ends
    await new.until_logged("plugin.registering_again")
    await new.until_ready()
    await stage.allocatable(8)
    assert await old.terminate() == 0
    assert not [line for line in old.log_lines() if line["msg"] == "agent.successor_lost"]
    assert (await new.get_text("/readyz"))[0] == 200


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"x" * 100_000, b'{"protocol": 99, "version": "9", "kubeletDirectory": "/"}\n'],
    ids=["nothing", "an empty line", "no end", "another protocol"],
)
async def test_nonsense_on_the_socket_releases_nothing(stage: Stage, line: bytes) -> None:
    """The agent goes on, and another one can still take over."""
    old = await stage.ready_agent()
    reader, writer = await asyncio.open_unix_connection(os.fspath(_socket(stage)))
    writer.write(line)
    if not line:
        writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    assert not answer or not json.loads(answer).get("released")
    _, idle = await asyncio.open_unix_connection(os.fspath(_socket(stage)))
    writer.close()
    assert (await old.get_text("/readyz"))[0] == 200
    await _start_beside(stage)
    await old.until_logged("agent.handed_over")
    idle.close()  # it is not the successor, so its end means nothing
    assert await old.terminate() == 0
    assert not [line for line in old.log_lines() if line["msg"] == "agent.successor_lost"]


async def test_an_agent_registers_again_when_the_new_one_dies_before_it_has(stage: Stage) -> None:
    """Its streams have ended by then, so the kubelet would learn neither of an ill GPU nor of the
    agent's end.
    """
    old = await stage.ready_agent()
    reader, writer = await asyncio.open_unix_connection(os.fspath(_socket(stage)))
    request = {
        "protocol": 1,
        "version": "0",
        "kubeletDirectory": os.fspath(stage.kubelet.plugins),
        "resources": ["nvidia.com/gpu"],
        "waitsUntil": time.monotonic() + 30,
    }
    writer.write(json.dumps(request).encode() + b"\n")
    assert json.loads(await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS))["serving"]
    await stage.kubelet.until(lambda: bool(stage.kubelet.called("stream ended")))
    assert not stage.kubelet.called("stream ended")[-1].facts["noticed"]
    lists = len(stage.kubelet.called("List"))
    await stage.admit("meanwhile")
    # A second after a booking the agent would compare it with the kubelet's records. Calls may wait
    # at the other agent by now, and the kubelet would forget their ids.
    await asyncio.sleep(1.5)
    assert len(stage.kubelet.called("List")) == lists

    writer.close()
    assert (await old.until_logged("agent.successor_lost"))["level"] == "warning"
    lists = len(stage.kubelet.called("List"))
    await stage.admit("afterwards")
    assert (await old.get_text("/readyz"))[0] == 200
    await stage.allocatable(8)
    # the comparison with the kubelet's records, which is stopped for a hand-over, goes on
    await stage.kubelet.until(lambda: len(stage.kubelet.called("List")) > lists)
    await old.kill()
    await stage.kubelet.until(lambda: stage.kubelet.called("stream ended")[-1].facts["noticed"])


def _socket(stage: Stage) -> Path:
    (found,) = stage.folder.rglob(SOCKET)
    return found


@pytest.fixture
async def volcano(folder: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10 in a cluster with Volcano."""
    async with volcano_stage(folder) as stage:
        yield stage


def _beside(volcano: VolcanoStage) -> AgentProcess:
    """Another agent of the same node, not started, which ends with the stage."""
    volcano.agent = AgentProcess(
        volcano.folder / "new.log",
        kubelet=volcano.cluster.kubelet_directory,
        simulate=volcano.gpus.directory,
        config=volcano.config,
        constants=volcano.constants,
    )
    return volcano.agent


async def test_no_id_of_a_waiting_call_becomes_free_again(volcano: VolcanoStage) -> None:
    """A kubelet forgets the ids of a call of Allocate that waits, when a pod has ended meanwhile
    and somebody lists pod-resources (kubelet §7); the next pod may get them, too. So neither agent
    lists them while calls wait for the end of the hand-over.
    """
    old, kubelet = await volcano.start_agent(), volcano.cluster.kubelet
    await volcano.serve("early", asks(1, 2))
    (early,) = kubelet.pods.values()
    new = _beside(volcano)
    await new.spawn()
    # for each of three resources: of the old agent, its one that fails on purpose, the new agent's
    await kubelet.until(lambda: len(kubelet.called("Register")) == 9)
    os.kill(old.pid, signal.SIGSTOP)  # it lets go of the node only later
    try:
        await kubelet.until(lambda: len(kubelet.called("stream opened")) == 6)
        calls = len(kubelet.called("Allocate"))
        volcano.cluster.create_pod("waiting", asks(1, 2))
        await asyncio.sleep(0.3)
        await kubelet.delete(early)  # it was ending before; no other pod is looked at meanwhile
        assert len(kubelet.called("Allocate")) == calls  # it is noted when it is answered
    finally:
        os.kill(old.pid, signal.SIGCONT)
    await new.until_logged("agent.took_over")
    await volcano.cluster.running("waiting")
    assert await old.terminate() == 0
    assert kubelet.forgotten_ids == 0
    volcano.check()


async def test_pods_that_decide_start_with_their_shares_all_along(volcano: VolcanoStage) -> None:
    """Pods are bound and started while the agents change. Each container has its scheduler's share,
    and the scheduler never sees the node leave. None fails. Others end all the time, and the
    kubelet forgets no ids of a call that waits (kubelet §7).
    """
    old = await volcano.start_agent()
    names = [f"pod-{number}" for number in range(16)]
    others = [f"other-{number}" for number in range(16)]
    for name in others:
        await volcano.serve(name, asks(1, 2))

    async def create() -> None:
        for name, other in zip(names, others, strict=True):
            volcano.cluster.create_pod(name, asks(1, 2))
            await asyncio.sleep(0.1)
            volcano.cluster.delete_pod(other)
            await asyncio.sleep(0.05)

    pods = asyncio.ensure_future(create())
    new = _beside(volcano)
    await new.start()
    await new.until_ready()
    await new.until_logged("agent.took_over")
    kubelet = volcano.cluster.kubelet
    await kubelet.until(lambda: bool(kubelet.called("stream ended")))
    assert not any(call.facts["noticed"] for call in kubelet.called("stream ended"))
    await pods
    await volcano.settled(*names)
    volcano.check()
    assert volcano.cluster.kubelet.forgotten_ids == 0
    assert await old.terminate() == 0
    assert int(volcano.allocatable[NUMBER]) > 0
    await volcano.serve("after", asks(1, 2))
