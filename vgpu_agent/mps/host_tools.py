"""The runner of ``nvidia-cuda-mps-control`` and ``nvidia-smi``, which may be missing, hang,
crash or print anything.

Called by `control` and `compute_mode`. The output of a program goes to a file in memory of a fixed
size, so it cannot fill the agent's memory, and a daemon that keeps its parent's stdout open does
not block the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from vgpu_agent.errors import MpsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# NVIDIA's control daemon, and the program that sets the compute mode of a GPU; looked for in the
# agent's PATH.
CONTROL_BINARY = "nvidia-cuda-mps-control"
SMI_BINARY = "nvidia-smi"
# How long one command of the control daemon or of nvidia-smi may take before it counts as hung.
COMMAND_TIMEOUT_SECONDS = 10.0
_LONGEST_OUTPUT = 65536  # bytes; a list of all processes of a node is shorter
_SHOWN_CHARACTERS = 200  # of the output, in a message
# How long a killed program may take to disappear; one that waits for the driver in the kernel
# stays.
_KILL_SECONDS = 1.0


class HostTool:
    """One host program of one daemon.

    State: a process that was killed and did not end. While it is there no other is started, so that
    processes do not pile up behind a hung driver.
    """

    def __init__(self, program: str, *, timeout_seconds: float) -> None:
        self._program, self._timeout = program, timeout_seconds
        self._stuck: asyncio.subprocess.Process | None = None

    async def is_there(self) -> bool:
        """Tell whether there is such a program on this node, as far as the agent sees it."""
        return await asyncio.to_thread(shutil.which, self._program) is not None

    async def run(
        self, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> str:
        """Run the program to its end and return its output.

        Args:
            arguments: of the program.
            stdin: the text that it reads.
            environment: its complete environment; None for that of the agent.

        Raises:
            MpsError: it cannot be started, does not end in time, or fails; the message has its
                output and the remedy.
        """
        command = self._name(arguments, stdin)
        if self._stuck is not None and self._stuck.returncode is None:
            raise MpsError(
                f"an earlier {self._program} (process {self._stuck.pid}) does not end even when "
                "killed; the driver hangs, see dmesg"
            )
        self._stuck = None
        with _file(stdin.encode()) as source, _file() as output, _file() as errors:
            process = await self._start(arguments, source, output, errors, environment)
            try:
                await asyncio.wait_for(process.wait(), self._timeout)
            except TimeoutError as err:
                await self._kill(process)
                raise MpsError(
                    f"{command} has not ended after {self._timeout:g} s and was killed; check "
                    "whether the driver answers (nvidia-smi, dmesg)"
                ) from err
            except asyncio.CancelledError:
                await self._kill(process)
                raise
            printed, complained = _content(output), _content(errors)
        if process.returncode:
            how = (
                f"ended with status {process.returncode}"
                if process.returncode > 0
                else f"was ended by signal {-process.returncode}"
            )
            raise MpsError(f"{command} {how}: {quoted_output(complained or printed)}")
        return printed

    async def _start(
        self,
        arguments: Sequence[str],
        source: int,
        output: int,
        errors: int,
        environment: Mapping[str, str] | None,
    ) -> asyncio.subprocess.Process:
        # By the agent's own PATH: the environment of a daemon has none.
        found = await asyncio.to_thread(shutil.which, self._program)
        try:
            return await asyncio.create_subprocess_exec(
                found or self._program,
                *arguments,
                stdin=source,
                stdout=output,
                stderr=errors,
                env=environment if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as err:
            raise MpsError(
                f"cannot run {self._program}: {err.strerror}; it comes with NVIDIA's driver: give "
                "the agent's container the capabilities compute,utility, or add the program's "
                "directory to its PATH"
            ) from err

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            await asyncio.wait_for(process.wait(), _KILL_SECONDS)
        except TimeoutError:
            self._stuck = process

    def _name(self, arguments: Sequence[str], stdin: str) -> str:
        command = " ".join([self._program, *arguments])
        return f"{command} ({stdin.strip()})" if stdin.strip() else command


def quoted_output(text: str) -> str:
    """Quote a program's output on one line, short enough for a message."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return repr(line[:_SHOWN_CHARACTERS]) if line else "no output"


@contextlib.contextmanager
def _file(content: bytes | None = None) -> Iterator[int]:
    """A file in memory: with ``content``, or empty and unable to grow beyond the longest output."""
    descriptor = os.memfd_create("mps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if content is None:
            os.ftruncate(descriptor, _LONGEST_OUTPUT)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        elif content:
            os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> str:
    return os.pread(descriptor, _LONGEST_OUTPUT, 0).rstrip(b"\0").decode(errors="replace")
