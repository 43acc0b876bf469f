"""MPS daemons are started as the contract says, adopted, proven, restarted and ended, against
processes that behave like the real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from tests.mps.supervised import RESOURCE, Node, until, until_running, why_not
from vgpu_agent.mps import host_tools
from vgpu_agent.sim.mps_tools import daemon_pid, end_daemon
from vgpu_agent.status import MpsState, Withheld

NOBODY: frozenset[str] = frozenset()

# each test starts dozens of processes
pytestmark = [pytest.mark.component, pytest.mark.usefixtures("nothing_blocks")]


def _told(node: Node, tool: str) -> list[str]:
    """Return the commands that a tool received, questions left out."""
    lines = [
        " ".join(call["arguments"] or call["commands"])
        for call in node.tools.calls
        if call["tool"] == tool
    ]
    return [line for line in lines if not line.startswith("get_")]


async def test_a_daemon_is_started_with_the_golden_commands(node: Node) -> None:
    """nvidia:§17.3: exclusive mode for each GPU, -d, a memory limit for each, the thread
    percentage; at the end quit and default mode.
    """
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        assert supervision.withheld(node.plan()) is None
        assert node.compute_modes == [3, 3]
        await until((node.root / RESOURCE / ".started").exists)
        await until((node.root / ".ready").exists)
    u0, u1 = node.gpus.uuids
    assert _told(node, "nvidia-smi") == [
        f"-i {u0} -c EXCLUSIVE_PROCESS",
        f"-i {u1} -c EXCLUSIVE_PROCESS",
        f"-i {u0} -c DEFAULT",
        f"-i {u1} -c DEFAULT",
    ]
    assert _told(node, "nvidia-cuda-mps-control") == [
        "-d",
        "set_default_device_pinned_mem_limit 0 20480M",
        "set_default_device_pinned_mem_limit 1 20480M",
        "set_default_active_thread_percentage 25",
        "quit",
    ]
    environments = [
        call["environment"]
        for call in node.tools.calls
        if call["tool"] == "nvidia-cuda-mps-control"
    ]
    directory = f"{node.root}/{RESOURCE}"
    wanted = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{directory}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{directory}/log",
    }
    assert all(environment == wanted for environment in environments)
    assert daemon_pid(node.pipe) is None
    assert not (node.root / RESOURCE / ".started").exists()


async def test_nothing_is_offered_before_the_limits_are_read_back(node: Node) -> None:
    """NVIDIA's issue 1946: a daemon that forgets its commands keeps the resource from being
    offered, and the reason says what it has.
    """
    node.tools.misbehave(set_default_active_thread_percentage="forget")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        assert supervision.withheld(node.plan()) == Withheld(
            "its MPS control daemon is being started", temporary=True
        )
        await until(lambda: supervision.statuses[0].state is MpsState.FAILED)
        refused = supervision.withheld(node.plan())
        assert refused is not None
        assert not refused.temporary
        assert "received its limits but has 100 % of compute instead of 25 %" in refused.reason
        node.tools.behave()
        await until_running(supervision)
        assert supervision.withheld(node.plan()) is None


async def test_a_killed_daemon_is_noticed_and_comes_back(node: Node) -> None:
    """nvidia:D7: upstream asks once, at its start. Here a death is seen, clients are counted, their
    pods named, and a new one starts.
    """
    node.pods = ("team/train-0", "team/train-1")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        first = daemon_pid(node.pipe)
        client = node.tools.client(node.pipe)
        await until(lambda: supervision.statuses[0].clients)
        end_daemon(node.pipe)
        await until(lambda: node.events("mps.daemon_lost"))
        await until_running(supervision)
        status = supervision.statuses[0]
        assert daemon_pid(node.pipe) not in (None, first)
        assert (status.restarts, status.clients_lost) == (1, 1)
        lost = node.events("mps.daemon_lost")[0]
        assert (lost["clients"], lost["pods"]) == ([client.pid], ["team/train-0", "team/train-1"])
        client.communicate()
        node.pods = ()


async def test_a_new_agent_adopts_the_daemon_of_the_last_one(node: Node) -> None:
    """NVIDIA's issue 669: an agent that stops leaves the daemon of running pods alone, and the next
    one takes it over with its clients.
    """
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        client = node.tools.client(node.pipe)
        await until(lambda: supervision.statuses[0].clients)
    first = daemon_pid(node.pipe)
    assert first is not None
    assert node.compute_modes == [3, 3]
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        status = await until_running(supervision)
        assert status.adopted
        assert status.clients == (client.pid,)
        assert client.poll() is None
        assert daemon_pid(node.pipe) == first
        client.terminate()
        client.communicate()
        await until(lambda: not supervision.statuses[0].clients)
        node.pods = ()


async def test_new_limits_wait_for_the_holders_of_the_old_ones(node: Node) -> None:
    """A running daemon with other limits is replaced when no pod holds a share. Until then nothing
    new is offered, and the pod is named.
    """
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(4), NOBODY)})
        await until_running(supervision)
        first = daemon_pid(node.pipe)
        supervision.want({RESOURCE: (node.plan(2), NOBODY)})
        assert (
            why_not(supervision, node.plan(2))
            == "its MPS control daemon is about to receive other limits"
        )
        await until(
            lambda: (
                "gets its new limits once team/train-0 have ended"
                in why_not(supervision, node.plan(2))
            )
        )
        assert daemon_pid(node.pipe) == first
        node.pods = ()
        await until(lambda: why_not(supervision, node.plan(2)) == "")
        assert supervision.statuses[0].thread_percentage == 50
        assert daemon_pid(node.pipe) != first


async def test_another_agents_limits_wait_for_their_holders_too(node: Node) -> None:
    """The same where the limits were changed while no agent ran."""
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(4), NOBODY)})
        await until_running(supervision)
    first = daemon_pid(node.pipe)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(2), NOBODY)})
        await until(lambda: "25 % of compute instead of 50 %" in why_not(supervision, node.plan(2)))
        assert daemon_pid(node.pipe) == first
        node.pods = ()
        await until_running(supervision)
        assert supervision.statuses[0].thread_percentage == 50


async def test_a_daemon_that_nobody_wants_ends_with_its_last_holder(node: Node) -> None:
    """Sharing is switched off while pods run:
    the daemon stays for them, then it quits and the GPUs are in default mode.
    """
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        supervision.want({})
        await until(lambda: "ends once team/train-0 have ended" in supervision.statuses[0].trouble)
        assert daemon_pid(node.pipe) is not None
        node.pods = ()
        await until(lambda: supervision.statuses[0].state is MpsState.STOPPED)
        assert daemon_pid(node.pipe) is None
        assert node.compute_modes == [0, 0]
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)


async def test_a_daemon_that_does_not_answer_is_left_alone_while_pods_run(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a signal it may still serve its clients: the resource is withheld, and the daemon
    replaced once the pods have ended.
    """
    monkeypatch.setattr(host_tools, "COMMAND_TIMEOUT_SECONDS", 1.0)
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        first = daemon_pid(node.pipe)
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        await until(
            lambda: "left alone while these run: team/train-0" in why_not(supervision, node.plan())
        )
        assert "has not ended after 1 s" in why_not(supervision, node.plan())
        assert daemon_pid(node.pipe) == first
        node.pods = ()
        await until_running(supervision)
        assert daemon_pid(node.pipe) != first


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"start": "refuse"}, "-d ended with status 1: 'Insufficient permissions'"),
        ({"start": "crash"}, "the daemon was started and does not answer"),
        ({"start": "hang"}, "-d has not ended after 1 s and was killed"),
        (
            {"get_default_active_thread_percentage": "nonsense"},
            "lorem ipsum' to get_default_active_thread_percentage, expected a percentage",
        ),
        ({"get_default_device_pinned_mem_limit": "nonsense"}, "expected a limit such as 10240M"),
        (
            {"get_default_device_pinned_mem_limit": "crash"},
            "(get_default_device_pinned_mem_limit 0) ",
        ),
        (
            {"nvidia_smi": "refuse"},
            "EXCLUSIVE_PROCESS ended with status 1: 'Insufficient permissions'",
        ),
    ],
    ids=str,
)
async def test_tools_that_fail_withhold_the_resource_with_the_reason(
    node: Node, faults: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusing, dying, hanging and babbling each give one sentence,
    which stays as long as the tool is ill.
    """
    seconds = 1.0 if "start" in faults else 10.0
    monkeypatch.setattr(host_tools, "COMMAND_TIMEOUT_SECONDS", seconds)
    node.tools.misbehave(**faults)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until(
            lambda: (
                supervision.statuses[0].state is MpsState.FAILED
                and reason in why_not(supervision, node.plan())
            )
        )
        node.tools.behave()


async def test_a_missing_control_binary_is_named_with_its_remedy(node: Node) -> None:
    """The reason says which program is missing, where it comes from, and where it is looked for."""
    node.use_programs(control="/nowhere/nvidia-cuda-mps-control")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until(lambda: supervision.statuses[0].state is MpsState.FAILED)
        assert "cannot run /nowhere/nvidia-cuda-mps-control: No such file or directory" in why_not(
            supervision, node.plan()
        )
        assert "add the program's directory to its PATH" in why_not(supervision, node.plan())


async def test_a_server_that_outlives_its_daemon_is_waited_for(node: Node) -> None:
    """It may still serve its clients, and keeps the GPU from another one: no client counts as lost,
    and it ends with the last pod.
    """
    node.tools.misbehave(server="orphan")
    node.pods = ("team/train-0",)
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        client = node.tools.client(node.pipe)
        await until(lambda: supervision.statuses[0].clients)
        end_daemon(node.pipe)
        await until(
            lambda: (
                "still runs, and no other can be started beside it"
                in why_not(supervision, node.plan())
            )
        )
        assert supervision.statuses[0].clients_lost == 0
        assert client.poll() is None
        node.pods = ()
        await until_running(supervision)
        client.communicate()


async def test_limits_that_somebody_changed_are_put_back(node: Node) -> None:
    """An administrator's experiment on the daemon lasts until the next proof.
    The journal says what was found.
    """
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(node.pipe)}
        process = await asyncio.create_subprocess_exec(
            node.tools.control, stdin=asyncio.subprocess.PIPE, env=environment
        )
        await process.communicate(b"set_default_device_pinned_mem_limit 1 81920M\n")
        await until(lambda: node.events("mps.limits_restored"))
        assert (
            node.events("mps.limits_restored")[0]["previous"] == "81920M on GPU 1 instead of 20480M"
        )
        assert supervision.withheld(node.plan()) is None


async def test_a_gpu_that_another_family_holds_takes_any_process(node: Node) -> None:
    """One family at a time: while another holds the GPU it takes any process,
    and becomes exclusive again afterwards.
    """
    u0, _ = node.gpus.uuids
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until_running(supervision)
        supervision.want({RESOURCE: (node.plan(), frozenset({u0}))})
        await until(lambda: node.compute_modes == [0, 3])
        supervision.want({RESOURCE: (node.plan(), NOBODY)})
        await until(lambda: node.compute_modes == [3, 3])


async def test_limits_shown_in_whole_gib_are_understood(node: Node) -> None:
    """Driver 595 shows 13653M as 13G, which is no difference."""
    node.tools.misbehave(shown="gib")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (node.plan(6), NOBODY)})
        await until_running(supervision)


async def test_one_daemon_that_fails_stops_no_other(node: Node) -> None:
    """Each resource has a daemon of its own. Only the one in trouble is withheld."""
    other = node.plan(2, "nvidia.com/other")
    bad = msgspec.structs.replace(node.plan(), pipe="/proc/no/pipe")
    async with node.agent() as supervision:
        supervision.want({RESOURCE: (bad, NOBODY), other.resource: (other, NOBODY)})
        await until(lambda: why_not(supervision, other) == "")
        await until(lambda: supervision.statuses[0].state is MpsState.FAILED)
        assert "cannot prepare /proc/no" in why_not(supervision, bad)
        assert not (node.root / ".ready").exists()
