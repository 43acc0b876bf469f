"""``nvidia-mig-parted``, the host tool that divides GPUs:
run with a time limit, one at a time, and always checked.

The replaced plugin runs it and ends itself when it fails (volcano-vgpu §4.3, D16). Here every
failure is a `MigError` that costs one pod its start: the tool is missing, hangs, prints nonsense,
fails, or sees other GPUs than the driver. Only the driver shows whether the GPU was divided;
`agent.devices.mig`, which calls this, checks there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING

from vgpu_agent.errors import MigError
from vgpu_agent.mig.layouts import CURRENT, layout_file, read_export

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from vgpu_agent.mig.layouts import Division

_MAX_BYTES = 256 * 1024  # of an export; sixteen GPUs take less than four KiB
_MAX_SHOWN = 400  # characters of its output in an error
# how long the end of the tool is waited for, after SIGTERM and then after SIGKILL; and the pause
# between two checks of whether it has ended
_TERM_SECONDS, _KILL_SECONDS = 2.0, 2.0
_LOOK_SECONDS = 0.02


class MigParted:
    """The runner of the tool.

    State: a file beside the configuration is locked while the tool runs, and the tool inherits the
    lock. So a tool that has survived a killed agent keeps the next agent from running a second
    one beside it.
    """

    def __init__(
        self, program: str, directory: Path, *, timeout_seconds: float, setting: str
    ) -> None:
        """Run ``program`` with files in ``directory``.

        Args:
            program: the tool's name, looked for in PATH, or its path.
            directory: where the tool's configuration is written; made if need be, and readable by
                the agent only.
            timeout_seconds: how long one run may take.
            setting: the settings key of ``program``, for messages.
        """
        self._program = program
        self._directory = directory
        self._timeout_seconds = timeout_seconds
        self._setting = setting

    async def export(self, gpus: int) -> Mapping[int, Division]:
        """Map the index of each GPU to its division as the tool sees it: whether MIG mode is on,
        and the number of instances of each profile.

        Args:
            gpus: the number of GPUs that the driver shows.

        Raises:
            MigError: the tool cannot be run, or its output does not have that many GPUs.
        """
        text = await self._run("export", ())
        try:
            return read_export(text, gpus)
        except MigError as err:
            raise MigError(
                f"{self._program} export: {err}; see whether it is nvidia-mig-parted and finds the "
                "driver"
            ) from err

    async def apply(self, index: int, profiles: Sequence[str]) -> None:
        """Divide the GPU of that NVML index into instances of these profiles, at least one;
        the other GPUs stay as they are.

        Raises:
            MigError: the tool cannot be run, or fails; the message has the end of its output.
        """
        path = self._directory / "layout.yaml"
        text = layout_file(index, profiles)
        try:
            await asyncio.to_thread(_write, path, text)
        except OSError as err:
            raise MigError(
                f"cannot write {path}: {err.strerror or err}; check stateDirectory"
            ) from err
        # `CURRENT` is the name of the only configuration in the file
        await self._run("apply", ("-f", str(path), "-c", CURRENT))

    async def _run(self, command: str, arguments: Sequence[str]) -> str:
        """Return the standard output of one successful run."""
        async with self._alone() as lock:
            try:
                process = await asyncio.create_subprocess_exec(
                    self._program,
                    command,
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
            except OSError as err:
                raise MigError(
                    f"cannot run {self._program}: {err.strerror or err}; install nvidia-mig-parted "
                    f"where the agent runs, or set {self._setting}"
                ) from err
            ended = False
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    output, complaints = await asyncio.gather(
                        _read(process.stdout), _read(process.stderr)
                    )
                    status = await process.wait()
                ended = True
            except TimeoutError:
                raise MigError(
                    f"{self._program} {command} has not ended after {self._timeout_seconds:g} s "
                    f"and was ended ({self._setting}TimeoutSeconds)"
                ) from None
            finally:
                if not ended:
                    await _end(process)
        if status != 0:
            words = (complaints or output).decode(errors="replace").strip()
            raise MigError(
                f"{self._program} {command} failed with status {status}: "
                f"{_shown(words) or 'no output'}"
            )
        if len(output) > _MAX_BYTES:
            raise MigError(f"{self._program} {command} printed more than {_MAX_BYTES} bytes")
        return output.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[int]:
        """Hold the lock for one run of the tool; yield its descriptor, which the tool inherits.

        Raises:
            MigError: an earlier agent's tool still runs, or the directory cannot be used.
        """
        try:
            lock = await asyncio.to_thread(_lock, self._directory)
        except BlockingIOError:
            raise MigError(
                f"another {self._program}, which an earlier agent has started, still runs"
            ) from None
        except OSError as err:
            raise MigError(
                f"cannot use {self._directory}: {err.strerror or err}; check stateDirectory"
            ) from err
        try:
            yield lock
        finally:
            os.close(lock)


def _lock(directory: Path) -> int:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _write(path: Path, text: str) -> None:
    """Write the file whole or not at all, readable and writable by the agent only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")  # always the same, so that nothing can pile up
    with os.fdopen(
        os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600),
        "w",
        encoding="utf-8",
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Return the output up to the limit and a little more.
    The rest is read and discarded, so that the tool does not block.
    """
    kept = b""
    while stream is not None and (chunk := await stream.read(65536)):
        if len(kept) <= _MAX_BYTES:
            kept += chunk
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """Make sure that nothing of the tool's process group runs any more, even when the agent itself
    is being stopped. A process that the kernel cannot end in time, because it waits for the driver,
    keeps the lock.
    """
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        # Not `asyncio.timeout`: with Python 3.11.2 it ends in a CancelledError in a task that is
        # cancelled, as here where the agent is being stopped. The tool's own children have no event
        # to wait for.
        give_up_at = time.monotonic() + seconds
        while process.returncode is None or _has_members(process.pid):
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            return


def _has_members(group: int) -> bool:
    """Tell whether the process group still has members; its leader must have been waited for."""
    # Where the agent is process 1 of its container, orphans are its children: until it has waited
    # for them, they stay in the group after their end.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _shown(words: str) -> str:
    return words if len(words) <= _MAX_SHOWN else "…" + words[-_MAX_SHOWN:]
