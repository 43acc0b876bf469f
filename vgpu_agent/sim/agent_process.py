"""Commands of the package as processes beside simulated nodes: started, asked over HTTP, stopped
and killed.

The demo, the benchmark and the component tests all drive the agent (`AgentProcess`) and the
scheduler extender (`ExtenderProcess`) through this, so that they use them as an operator does: the
real command line, the real log on stderr, the real signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import with_constants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO, ClassVar

# Pauses between two questions. They grow, for each answer costs milliseconds of processor time.
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.05
_PAUSE_GROWTH = 1.25
_HTTP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)
# our own child is behind no proxy
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StartedProcess(Protocol):
    """A process that was started here, as `asyncio.subprocess.Process` shows one."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""

    async def wait(self) -> int:
        """Wait for its end, and return its exit status."""


class StartModule(Protocol):
    """A way to start a process that does what ``python -m`` does with these words.

    It has this environment alone, and its stdout and stderr go into the file.
    """

    async def __call__(
        self, words: Sequence[str], environment: Mapping[str, str], log: BinaryIO, /
    ) -> StartedProcess:
        """Start it."""


async def start_interpreter(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: BinaryIO,
    *,
    through: Sequence[str] = (),
) -> StartedProcess:
    """Start ``python -m`` with these words in a new interpreter that ends with this process.

    Args:
        words: the module and its arguments.
        environment: all its variables.
        log: where its stdout and stderr go.
        through: a command that executes the one after it in its own place.
    """
    return await asyncio.create_subprocess_exec(
        *through,
        *(sys.executable, "-m"),
        *words,
        stderr=log,
        stdout=log,
        env=environment,
        preexec_fn=end_with_parent,
    )


class CommandProcess:
    """One run of a command of the package.

    State: the child process and its log file; `spawn` may be called again after it has ended, and
    appends to the log.

    Attributes:
        log_path: where its log goes.
        public_address: ``host:port`` of its probes and metrics, once it serves them.
        start_module: starts the process of any run without ``through``.
    """

    start_module: ClassVar[StartModule] = staticmethod(start_interpreter)

    def __init__(
        self,
        log_path: Path,
        *,
        name: str,
        environment: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        module: str = "vgpu_agent",
        constants: Mapping[str, float | str] | None = None,
        launcher: str = with_constants.MODULE,
        opener: urllib.request.OpenerDirector | None = None,
    ) -> None:
        """Prepare the run, without starting the process.

        Args:
            log_path: where its log goes.
            name: of the program, for error messages.
            environment: its variables in addition to ours.
            through: a command that executes the one after it in its own place (exec), such as
                ``nsenter``, for a process in another network.
            module: the Python module that is run: the package, or one that changes it.
            constants: other values for constants of the package, such as shorter pauses; see
                `with_constants`.
            launcher: the Python module that sets the constants, and then runs ``module``.
            opener: how its HTTP servers are reached from here; directly by default.
        """
        self.log_path, self._name = log_path, name
        self._through, self._opener = tuple(through), opener or _DIRECT
        self._program = [module]
        if constants:
            self._program = [launcher, json.dumps(dict(constants)), module]
        self._environment = dict(environment or {})
        self.public_address = ""
        self._process: StartedProcess | None = None
        self._log_from = 0  # the size of the log file before this run

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    def _arguments(self) -> list[str]:
        """Return the command and its flags."""
        raise NotImplementedError

    async def spawn(self) -> None:
        """Start the process and return at once."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self._environment}
        with await asyncio.to_thread(self.log_path.open, "ab") as log:
            self._log_from = log.tell()
            words = [*self._program, *self._arguments()]
            if self._through:
                self._process = await start_interpreter(
                    words, environment, log, through=self._through
                )
            else:
                self._process = await self.start_module(words, environment, log)

    async def until_ready(self, *, timeout_seconds: float = 30.0) -> None:
        """Wait until ``/readyz`` succeeds.

        Raises:
            SimulationError: not in time; the message has the reason.
        """
        deadline, pauses = time.monotonic() + timeout_seconds, _pauses()
        while True:
            status, text = await self.get_text("/readyz")
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise SimulationError(
                    f"the {self._name} was not ready after {timeout_seconds:g} s: {text.strip()}"
                )
            await asyncio.sleep(next(pauses))

    async def get_text(self, path: str) -> tuple[int, str]:
        """Return status and body of a GET, or (0, reason) if there is no answer."""
        return await self._get_from(self.public_address, path)

    async def metric(self, name: str) -> float:
        """The sum of all samples of one metric; 0 when there are none."""
        _, text = await self.get_text("/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def _get_from(self, address: str, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(_get, self._opener, f"http://{address}{path}")

    async def until_logged(self, event: str, *, timeout_seconds: float = 30.0) -> dict[str, Any]:
        """The first log line of this run with that event name.

        Raises:
            SimulationError: there is none in time, or the process has ended without one.
        """
        deadline, pauses = time.monotonic() + timeout_seconds, _pauses()
        while True:
            ended = self._process is not None and self._process.returncode is not None
            for line in await asyncio.to_thread(self.log_lines):
                if line.get("msg") == event:
                    return line
            if ended or time.monotonic() > deadline:
                what = (
                    f"ended with status {self._process.returncode}"
                    if ended and self._process
                    else f"did not say {event}"
                )
                raise SimulationError(
                    f"the {self._name} {what}:\n{await asyncio.to_thread(self.log_tail)}"
                )
            await asyncio.sleep(next(pauses))

    def log_lines(self) -> list[dict[str, Any]]:
        """The log of this run, one object per line; a line without JSON becomes ``{"msg": …}``."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_from)
            lines = log.read().decode(errors="replace").splitlines()
        return [_parsed(line) for line in lines if line.strip()]

    def log_tail(self) -> str:
        """The last lines of this run, for an error message."""
        return "\n".join(
            json.dumps(line) if len(line) > 1 else str(line["msg"])
            for line in self.log_lines()[-15:]
        )

    async def terminate(self, *, timeout_seconds: float = 30.0) -> int:
        """Stop it gracefully (SIGTERM) and return its exit status."""
        return await self._end(signal.SIGTERM, timeout_seconds)

    async def kill(self) -> int:
        """Kill it (SIGKILL) and return its exit status."""
        return await self._end(signal.SIGKILL, _HTTP_SECONDS)

    async def wait(self, *, timeout_seconds: float = 30.0) -> int:
        """Wait for a process that ends by itself, and return its exit status.

        Raises:
            TimeoutError: it does not.
        """
        if self._process is None:
            return 0
        async with asyncio.timeout(timeout_seconds):
            return await self._process.wait()

    async def _end(self, number: signal.Signals, timeout_seconds: float) -> int:
        if self._process is None:
            return 0
        _send(self._process, number)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._process.wait()
        except TimeoutError:
            _send(self._process, signal.SIGKILL)
            await self._process.wait()
            raise SimulationError(
                f"the {self._name} did not end within {timeout_seconds:g} s of {number.name}"
            ) from None


class AgentProcess(CommandProcess):
    """One run of the agent.

    State: the child process and its log file; `start` may be called again after it has ended, and
    appends to the log.

    Attributes:
        debug_address: ``host:port`` of its debug pages, once it serves them.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        kubelet: Path,
        simulate: Path | None,
        config: Path | None = None,
        listen: str = "",
        debug_listen: str = "",
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        module: str = "vgpu_agent",
        constants: Mapping[str, float | str] | None = None,
        launcher: str = with_constants.MODULE,
        opener: urllib.request.OpenerDirector | None = None,
    ) -> None:
        """Prepare the run, without starting the process.

        Args:
            log_path: where its log goes.
            kubelet: the kubelet's root directory.
            simulate: directory of the simulated GPUs; None for the GPUs of this machine.
            config: its configuration file; None for none.
            listen: the value of the flag ``--listen``; a free port of 127.0.0.1 by default.
            debug_listen: the same for ``--debug-listen``.
            flags: more flags of ``run``.
            environment: its variables in addition to ours.
            through: a command that executes the one after it in its own place (exec), such as
                ``nsenter``, for an agent in another network.
            module: the Python module that is run: the agent, or one that changes it.
            constants: other values for constants of the package, such as shorter pauses; see
                `with_constants`.
            launcher: the Python module that sets the constants, and then runs ``module``.
            opener: how its HTTP servers are reached from here; directly by default.
        """
        super().__init__(
            log_path,
            name="agent",
            environment=environment,
            through=through,
            module=module,
            constants=constants,
            launcher=launcher,
            opener=opener,
        )
        self.debug_address = ""
        # Both addresses stay the same over a restart, as they do for a DaemonSet.
        self._ports = _Port(), _Port()
        self._listen = listen or f"127.0.0.1:{self._ports[0].number}"
        self._debug_listen = debug_listen or f"127.0.0.1:{self._ports[1].number}"
        self._flags = ["--kubelet-dir", str(kubelet), "--log-format", "json", *flags]
        if simulate is not None:
            self._flags += ["--simulate", str(simulate)]
        if config is not None:
            self._flags += ["--config", str(config)]

    def _arguments(self) -> list[str]:
        listen = ["--listen", self._listen, "--debug-listen", self._debug_listen]
        return ["run", *self._flags, *listen]

    async def start(self, *, timeout_seconds: float = 30.0) -> None:
        """Start the process and wait until it serves HTTP.

        Raises:
            SimulationError: it ended instead, or not in time; the message holds its last lines.
        """
        await self.spawn()
        line = await self.until_logged("web.listening", timeout_seconds=timeout_seconds)
        self.public_address, self.debug_address = line["listen"], line["debug_listen"]

    async def get_text(self, path: str, *, debug: bool = False) -> tuple[int, str]:
        """Return status and body of a GET, or (0, reason) if there is no answer; ``debug`` asks the
        debug address.
        """
        return await self._get_from(self.debug_address if debug else self.public_address, path)

    async def get(self, path: str) -> Any:
        """The JSON behind a debug path.

        Raises:
            SimulationError: there is none.
        """
        status, text = await self.get_text(path, debug=True)
        if status != 200:
            raise SimulationError(f"GET {path} answered {status}: {text[:300]}")
        return json.loads(text)

    async def until(
        self, path: str, condition: Callable[[Any], bool], *, timeout_seconds: float = 30.0
    ) -> Any:
        """Ask a debug path again and again until its JSON satisfies ``condition``, and return that
        JSON.

        Raises:
            SimulationError: not in time; the message holds the last answer.
        """
        deadline, pauses = time.monotonic() + timeout_seconds, _pauses()
        while True:
            answer = await self.get(path)
            if condition(answer):
                return answer
            if time.monotonic() > deadline:
                raise SimulationError(
                    f"{path} did not become what was expected within {timeout_seconds:g} s: "
                    f"{json.dumps(answer)[:2000]}"
                )
            await asyncio.sleep(next(pauses))


class ExtenderProcess(CommandProcess):
    """One run of the scheduler extender.

    State: as that of `CommandProcess`; `start` may be called again.
    """

    def __init__(self, log_path: Path, *, kubeconfig: Path, flags: Sequence[str] = ()) -> None:
        """Prepare the run, without starting the process.

        Args:
            log_path: where its log goes.
            kubeconfig: its access to the API server.
            flags: more flags of ``scheduler``.
        """
        super().__init__(log_path, name="extender")
        self._flags = ["--kubeconfig", str(kubeconfig), *flags]
        # It stays the same over a restart, as kube-scheduler's configuration has it.
        self._port = _Port()

    @property
    def url(self) -> str:
        """The URL below which kube-scheduler calls its verbs (``filter``, ``bind``, ``preempt``),
        once it is started.
        """
        return f"http://{self.public_address}/scheduler"

    def _arguments(self) -> list[str]:
        return ["scheduler", *self._flags, "--server-bind-port", str(self._port.number)]

    async def start(self, *, timeout_seconds: float = 30.0) -> None:
        """Start the process and wait until it serves HTTP.

        Raises:
            SimulationError: it ended instead, or not in time; the message holds its last lines.
        """
        await self.spawn()
        line = await self.until_logged("scheduler.listening", timeout_seconds=timeout_seconds)
        self.public_address = line["address"]

    async def why(self, pod: str) -> Any:
        """The answer of ``vgpu-agent why`` about a pod (``namespace/name``).

        Raises:
            SimulationError: it failed.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "vgpu_agent", "why", pod, "--json", "--scheduler", self.public_address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise SimulationError(f"vgpu-agent why {pod}: {output.decode(errors='replace')[:300]}")
        return json.loads(output)


class _Port:
    """A TCP port that the kernel gives to nobody else for as long as this object exists: another
    process could take it before the one that it is meant for listens, or while that is restarted.

    A socket that is bound and does not listen keeps it. With SO_REUSEADDR, which is set only after
    ``bind`` has found a free port, others that set it as well can listen there (socket(7)).
    """

    def __init__(self) -> None:
        with socket.socket() as holder:
            holder.bind(("", 0))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.number: int = holder.getsockname()[1]
            weakref.finalize(self, os.close, holder.detach())


def _send(process: StartedProcess, number: signal.Signals) -> None:
    """Send a signal, if the process has not ended.

    `asyncio.subprocess.Process.send_signal` may collect the exit status of a process that has just
    ended, and asyncio then reports 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end_with_parent() -> None:
    """Let this child process end with its parent, even if that is killed (SIGKILL), so that no
    agent keeps a port.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait before each next question."""
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(_PAUSE_GROWTH * pause, _LONGEST_PAUSE_SECONDS)


def _get(opener: urllib.request.OpenerDirector, url: str) -> tuple[int, str]:
    try:
        with opener.open(url, timeout=_HTTP_SECONDS) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read().decode()
    except OSError as err:
        return 0, str(err)


def _parsed(line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError:
        return {"msg": line}
    return parsed if isinstance(parsed, dict) else {"msg": line}
