"""kill -9 before each file operation of a whole life of the agent: its first start, a grant, a
container's restart, its end, a stop.

Nodes lose power and the kernel kills processes at any moment. Whatever is half done then, the next
agent finishes or clears away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.adversary import killed_before
from tests.component.volcano import MEMORY, NUMBER, VGPU, VolcanoStage, asks, volcano_stage
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess

pytestmark = [pytest.mark.component, pytest.mark.timeout(600)]

_NODES = 4  # lives at the same time: most of each is waiting
_NEVER = 0
# The wait may have a kill and the start of the next agent in it, beside three other nodes.
_WAIT_SECONDS = 4 * PATIENCE_SECONDS


class MortalStage(VolcanoStage):
    """A node whose agent kills itself before one of its file operations."""

    killed_before = _NEVER

    @property
    def count_file(self) -> Path:
        """A file with a line for each file operation that was made."""
        return self.folder / "operations"

    def new_agent(self) -> AgentProcess:
        """The agent of this node, not started."""
        launcher = (
            sys.executable,
            killed_before.__file__,
            str(self.folder),
            str(self.killed_before),
            str(self.count_file),
        )
        self.agent = AgentProcess(
            self.log,
            kubelet=self.cluster.kubelet_directory,
            simulate=self.gpus.directory,
            config=self.config,
            through=launcher if self.killed_before else (),
            constants=self.constants,
        )
        return self.agent

    async def live(self, name: str, before: int) -> bool:
        """Live one life on a node that knows no agent yet; true when it was killed on the way,
        before operation number ``before``.
        """
        await asyncio.to_thread(self._wipe)
        self.killed_before = before
        self.configure(VGPU)
        self.deliver_library()
        self.new_agent()
        deaths = 0

        async def alive() -> None:
            """Be ready, with another agent when this one was killed; that one is not."""
            nonlocal deaths
            if not self.agent.pid:
                # it was killed before it served anything
                with contextlib.suppress(SimulationError):
                    await self.agent.start()
            while not await self._is_ready():
                if await self._runs():
                    continue
                deaths += 1
                assert deaths == 1, (
                    f"{name}: the agent that was not to be killed has ended:\n"
                    f"{self.agent.log_tail()}"
                )
                self.killed_before = _NEVER
                await self.new_agent().start()

        async def lived(done: Coroutine[Any, Any, None]) -> None:
            """Wait until ``done``, with another agent when this one is killed meanwhile."""
            waiting = asyncio.create_task(done)
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.1)
                if not await self._runs():
                    await alive()
            await waiting

        await alive()
        await lived(self._shown())
        await lived(self._admitted(name))
        if self.cluster.phase(name) == "Failed":
            # It was being admitted at the kill, so it has failed for good, as with every device
            # plugin. A controller would make another one.
            await alive()
            assert deaths == 1, self.cluster.pod(name)["status"]
            await lived(self._admitted_anew(name))
        await lived(self.cluster.running(name, timeout_seconds=_WAIT_SECONDS))
        self.check()
        await lived(self.cluster.crash(name, timeout_seconds=_WAIT_SECONDS))
        self.check()
        uid = self.cluster.pod(name)["metadata"]["uid"]
        self.cluster.delete_pod(name)
        await lived(self._forgotten(uid))
        with contextlib.suppress(SimulationError):
            await self.agent.terminate()
        if deaths == 0 and self.killed_before and await self._killed_in_the_end():
            deaths += 1
            self.killed_before = _NEVER
            await self.new_agent().start()
            await self.agent.until_ready()
            await self.agent.terminate()
        return deaths > 0

    def files(self) -> set[str]:
        """All that lies where the agent writes; the lock without the number of this kubelet.

        The agent may remove a directory meanwhile, which `os.walk` passes over.
        """
        names = (
            str((Path(directory) / name).relative_to(self.folder))
            for root in (self.folder / "state", self.folder / "vgpu", self.cluster.cdi_directory)
            for directory, directories, files in os.walk(root)
            for name in (*directories, *files)
        )
        return {re.sub(r"/succession-\w{8}\.lock$", "/succession.lock", name) for name in names}

    async def _is_ready(self) -> bool:
        with contextlib.suppress(SimulationError):
            await self.agent.until_ready(timeout_seconds=0.2)
            return True
        return False

    async def _runs(self) -> bool:
        try:
            await self.agent.wait(timeout_seconds=0.001)
        except TimeoutError:
            return True
        return False

    async def _killed_in_the_end(self) -> bool:
        return await self.agent.wait() < 0

    async def _shown(self) -> None:
        """Wait until the scheduler may send pods."""
        await self.cluster.until(
            lambda: all(int(self.allocatable.get(name, 0)) > 0 for name in (NUMBER, MEMORY)),
            "the Node to show GPUs",
            timeout_seconds=_WAIT_SECONDS,
        )

    async def _admitted(self, name: str) -> None:
        """Create a pod, and wait until it runs or has failed."""
        self.cluster.create_pod(name, asks(1, 16))
        await self.cluster.until(
            lambda: self.cluster.phase(name) in {"Running", "Failed"},
            f"{name} to run or to fail",
            timeout_seconds=_WAIT_SECONDS,
        )

    async def _admitted_anew(self, name: str) -> None:
        """Do so again in place of the pod that has failed."""
        self.cluster.delete_pod(name)
        await self.cluster.until(lambda: not self.cluster.exists(name), f"the end of {name}")
        await self._shown()
        await self._admitted(name)

    async def _forgotten(self, uid: str) -> None:
        """Wait until nothing on the disk tells of the pod."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            files = await asyncio.to_thread(self.files)
            left = sorted(
                file for file in files if uid in file or file.startswith("cluster/cdi/vgpu-agent-")
            )
            if not left:
                return
            assert time.monotonic() < deadline, f"{left} are still there:\n{self.agent.log_tail()}"
            await asyncio.sleep(0.1)

    def _wipe(self) -> None:
        for directory in (self.folder / "state", self.folder / "vgpu"):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(self.cluster.cdi_directory, ignore_errors=True)
        self.count_file.unlink(missing_ok=True)


async def test_killed_before_each_file_operation_the_agent_recovers_and_leaves_nothing(
    folder: Path,
) -> None:
    """Half-written files must not stop the next agent, reach a container, or pile up."""
    operations: list[str] = []
    left: set[str] = set()
    numbers: list[int] = []
    kills: list[bool] = []

    async def node(place: int) -> None:
        directory = folder / str(place)
        async with volcano_stage(directory, of=MortalStage) as stage:
            assert isinstance(stage, MortalStage)
            if place == 0:
                # on a fresh checkout, where Python writes its compiled modules
                await stage.live("first", 1_000_000)
                assert not await stage.live("whole", 1_000_000)
                operations.extend(
                    (await asyncio.to_thread(stage.count_file.read_text)).splitlines()
                )
                left.update(await asyncio.to_thread(stage.files))
                numbers.extend(range(len(operations), 0, -1))
                counted.set()
            await counted.wait()
            while numbers:
                number = numbers.pop()
                try:
                    killed = await stage.live(f"pod-{number}", number)
                except (AssertionError, SimulationError, TimeoutError) as err:
                    raise AssertionError(f"killed before {operations[number - 1]}: {err}") from err
                # On a busy machine a life may write some files fewer times than the first one did;
                # then it ended before that number.
                made = len((await asyncio.to_thread(stage.count_file.read_text)).splitlines())
                assert killed or made < number, (
                    f"no kill at {operations[number - 1]}, although {made} operations were made"
                )
                kills.append(killed)
                files = await asyncio.to_thread(stage.files)
                assert files == left, f"killed before {operations[number - 1]}: {files ^ left}"

    counted = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for place in range(_NODES):
            group.create_task(node(place))
    assert len(operations) > 15
    assert sum(kills) > 0.75 * len(operations)
