"""The host tool behind its adapter, against the stand-in that divides simulated GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.errors import MigError
from vgpu_agent.mig.layouts import Division
from vgpu_agent.mig.parted import MigParted
from vgpu_agent.sim.mig_parted import Misbehaviour, calls, deliver, misbehave
from vgpu_agent.sim.state import ProcessUse, SimulatedNode

pytestmark = pytest.mark.component  # it starts programs

SETTING = "volcanoVgpu.migParted"


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    """Two A100."""
    return SimulatedNode.create(tmp_path / "gpus", model="A100-SXM4-40GB", gpus=2)


@pytest.fixture
def parted(node: SimulatedNode, tmp_path: Path) -> MigParted:
    """The tool, which may take its time."""
    return MigParted(
        str(deliver(node.directory, tmp_path / "nvidia-mig-parted")),
        tmp_path / "state" / "mig",
        timeout_seconds=PATIENCE_SECONDS,
        setting=SETTING,
    )


def _files(directory: Path) -> dict[str, int]:
    """Name → mode of what lies in the directory, and of itself."""
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    return found | {".": stat.S_IMODE(directory.stat().st_mode)}


def _locked(directory: Path) -> int:
    """The lock of a tool that runs."""
    directory.mkdir(parents=True)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


async def until_called(node: SimulatedNode) -> None:
    """Wait until the tool has been started."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        # a process has no event to wait for
        while not await asyncio.to_thread(calls, node.directory):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def end_tools(node: SimulatedNode) -> None:
    """Leave no tool behind that works on this node."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(node.directory).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def impatient(parted: MigParted) -> MigParted:
    """The same with half a second."""
    parted._timeout_seconds = 0.5
    return parted


async def test_it_shows_and_divides(node: SimulatedNode, parted: MigParted, tmp_path: Path) -> None:
    """One GPU is divided and the other left alone. The tool's file is readable by no other user."""
    await parted.apply(1, ["3g.20gb", "2g.10gb", "1g.5gb"])
    assert await parted.export(2) == {
        0: Division(enabled=False, instances={}),
        1: Division(enabled=True, instances={"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1}),
    }
    assert len(node.mig_uuids(1)) == 3
    directory = tmp_path / "state" / "mig"
    assert await asyncio.to_thread(_files, directory) == {
        "layout.yaml": 0o600,
        "lock": 0o600,
        ".": 0o700,
    }
    first, *_ = await asyncio.to_thread(calls, node.directory)
    assert first == ["apply", "-f", str(directory / "layout.yaml"), "-c", "current"]


async def test_a_tool_that_is_missing_is_named_with_its_setting(tmp_path: Path) -> None:
    """volcano-vgpu:D16: the replaced plugin ends itself. Here it is a reason."""
    with pytest.raises(
        MigError,
        match=r"cannot run /nowhere/nvidia-mig-parted: No such file.*volcanoVgpu\.migParted",
    ):
        await MigParted(
            "/nowhere/nvidia-mig-parted", tmp_path, timeout_seconds=1, setting=SETTING
        ).export(1)


async def test_a_failure_has_its_last_words(node: SimulatedNode, parted: MigParted) -> None:
    """The exit status and its text on stderr."""
    await asyncio.to_thread(
        misbehave,
        node.directory,
        Misbehaviour(fails="error setting MIGConfig: Insufficient Resources"),
    )
    with pytest.raises(
        MigError,
        match="apply failed with status 1: error setting MIGConfig: Insufficient Resources",
    ):
        await parted.apply(0, ["7g.40gb"])


async def test_a_tool_that_hangs_is_ended(
    node: SimulatedNode, parted: MigParted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes one that does not react to the first signal.
    The next run is not kept waiting by it.
    """
    monkeypatch.setattr("vgpu_agent.mig.parted._TERM_SECONDS", 0.2)
    await asyncio.to_thread(misbehave, node.directory, Misbehaviour(hangs=True))
    with pytest.raises(MigError, match=r"export has not ended after 0\.5 s and was ended"):
        await impatient(parted).export(2)
    await asyncio.to_thread(misbehave, node.directory, None)
    parted._timeout_seconds = PATIENCE_SECONDS
    assert set(await parted.export(2)) == {0, 1}


@pytest.mark.parametrize("leads", ["wait", "exit 0"])
async def test_a_child_that_ignores_the_first_signal_is_ended_as_well(
    parted: MigParted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    """The tool itself ends at SIGTERM, or has ended before, and its child has the lock."""
    monkeypatch.setattr("vgpu_agent.mig.parted._TERM_SECONDS", 0.2)
    script, works = tmp_path / "forking", parted._program
    await asyncio.to_thread(
        script.write_text,
        f"#!/bin/sh\n(trap '' TERM; exec sleep {FOR_EVER_SECONDS:.0f}) &\n"
        f"echo $! > {tmp_path}/child\n{leads}\n",
    )
    await asyncio.to_thread(script.chmod, 0o755)
    parted._program = str(script)
    with pytest.raises(MigError, match="has not ended after"):
        await impatient(parted).export(2)
    child = int(await asyncio.to_thread((tmp_path / "child").read_text))
    try:
        parted._program, parted._timeout_seconds = works, PATIENCE_SECONDS
        assert set(await parted.export(2)) == {0, 1}  # the lock is free again
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_nonsense_is_no_export(node: SimulatedNode, parted: MigParted) -> None:
    """The message says which tool it was and what it printed."""
    await asyncio.to_thread(misbehave, node.directory, Misbehaviour(prints="Segmentation fault"))
    with pytest.raises(
        MigError,
        match=(
            "export: its output does not have exactly one configuration below mig-configs: "
            "'Segmentation fault'"
        ),
    ):
        await parted.export(2)


async def test_an_endless_output_ends_it(tmp_path: Path) -> None:
    """No more than an export can have is kept in memory."""
    script = tmp_path / "endless"
    await asyncio.to_thread(script.write_text, "#!/bin/sh\nhead -c 3000000 /dev/zero\n")
    await asyncio.to_thread(script.chmod, 0o755)
    with pytest.raises(MigError, match="printed more than 262144 bytes"):
        await MigParted(
            str(script), tmp_path / "mig", timeout_seconds=PATIENCE_SECONDS, setting=SETTING
        ).export(1)


async def test_a_tool_of_an_earlier_agent_is_waited_for_by_nobody(
    parted: MigParted, tmp_path: Path
) -> None:
    """The tool inherits the lock, so one that outlived a killed agent keeps the next one
    from running a second beside it.
    """
    directory = tmp_path / "state" / "mig"
    lock = await asyncio.to_thread(_locked, directory)
    with pytest.raises(MigError, match="which an earlier agent has started, still runs"):
        await parted.export(2)
    os.close(lock)
    assert set(await parted.export(2)) == {0, 1}


_AN_AGENT = """
import asyncio, sys
from pathlib import Path
from vgpu_agent.mig.parted import MigParted
asyncio.run(MigParted(sys.argv[1], Path(sys.argv[2]), timeout_seconds=60, setting="").export(2))
"""


async def test_a_tool_that_outlives_its_agent_has_the_lock(
    node: SimulatedNode, parted: MigParted, tmp_path: Path
) -> None:
    """An agent that is killed leaves its tool running.
    The next one does not run a second beside it.
    """
    await asyncio.to_thread(misbehave, node.directory, Misbehaviour(seconds=FOR_EVER_SECONDS))
    arguments = (
        "-c",
        _AN_AGENT,
        str(tmp_path / "nvidia-mig-parted"),
        str(tmp_path / "state" / "mig"),
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    await until_called(node)
    agent.kill()
    await agent.wait()
    try:
        with pytest.raises(MigError, match="which an earlier agent has started, still runs"):
            await parted.export(2)
    finally:
        await asyncio.to_thread(end_tools, node)


@pytest.mark.parametrize(
    "behaviour", [Misbehaviour(seconds=FOR_EVER_SECONDS), Misbehaviour(hangs=True)]
)
async def test_a_run_that_is_cancelled_leaves_no_tool_behind(
    node: SimulatedNode,
    parted: MigParted,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Misbehaviour,
) -> None:
    """The agent is stopped while the tool runs: the tool is ended with it, also one that ignores
    SIGTERM.
    """
    monkeypatch.setattr("vgpu_agent.mig.parted._TERM_SECONDS", 0.2)
    await asyncio.to_thread(misbehave, node.directory, behaviour)
    run = asyncio.get_running_loop().create_task(parted.export(2))
    await until_called(node)
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run
    await asyncio.to_thread(misbehave, node.directory, None)
    assert set(await parted.export(2)) == {0, 1}  # the lock is free again


async def test_a_directory_that_cannot_be_used_is_named(parted: MigParted, tmp_path: Path) -> None:
    """A file where the directory should be."""
    await asyncio.to_thread((tmp_path / "state").touch)
    with pytest.raises(MigError, match=r"cannot use .*/state/mig: .*check stateDirectory"):
        await parted.export(2)


async def test_a_gpu_in_use_is_refused_by_the_tool(node: SimulatedNode, parted: MigParted) -> None:
    """The driver refuses it the same way, and the GPU stays as it was."""
    await asyncio.to_thread(node.set_mig, 0, ["7g.40gb"])
    await asyncio.to_thread(node.add_process, 0, 4711, ProcessUse(memory_mib=100))
    with pytest.raises(MigError, match="In use by another client"):
        await parted.apply(0, ["3g.20gb", "3g.20gb"])
    assert len(node.mig_uuids(0)) == 1
