"""Commands of the package, forked from a process that has imported the agent.

With a new interpreter for each agent, all component tests took 663 s on two processors; with forks
they take 420 s, because an agent's imports take half a second. So `Preloaded` keeps one process
that has imported the agent, and each start is a fork of that one: a process of its own, with its
own arguments, environment, log, signals and exit status, that runs the module as ``python -m``
does. Real nodes, the demo and the benchmark start new interpreters, and so does a test that runs
the command through another one.

Run as a program, this module is that process. The tests talk to it over a socket: for each start
one message with a JSON object and two descriptors (the log, and a pipe for the exit status); it
answers with the process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Self

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.sim import with_constants
from vgpu_agent.sim.agent_process import StartedProcess, end_with_parent, start_interpreter

_MODULE = "tests.component.preloaded"
_MESSAGE_BYTES = 1 << 20
_POLL_SECONDS = 0.01

# What a running agent has imported.
_IMPORTED = (
    "vgpu_agent.agent.composition",
    "vgpu_agent.cli.run",
    "vgpu_agent.web.server",
)

# Modules with a token that no other process has.
_OF_ONE_PROCESS = ("vgpu_agent.kubelet.sockets",)

# An interpreter or a library reads variables that begin with these only when it starts.
_READ_AT_START = ("LD_", "MALLOC_", "PYTHON", "SSL_")


class Preloaded:
    """The process that has imported the agent; use it as a context.

    State: the process, its environment, and the socket to it.
    """

    def __enter__(self) -> Self:
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._one_at_a_time = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._socket.settimeout(3 * PATIENCE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(PATIENCE_SECONDS)

    async def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: BinaryIO
    ) -> StartedProcess:
        """Start a module in a fork, or with `start_interpreter` where a fork would not read a
        variable of the environment.
        """
        different = set(environment.items()) ^ set(self._environment.items())
        if any(name.startswith(_READ_AT_START) for name, _ in different):
            return await start_interpreter(words, environment, log)
        return await asyncio.to_thread(self._fork, words, environment, log)

    def _fork(
        self, words: Sequence[str], environment: Mapping[str, str], log: BinaryIO
    ) -> StartedProcess:
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        message = {"words": [*words], "environment": {**environment}, "folder": os.getcwd()}
        try:
            with self._one_at_a_time:
                socket.send_fds(self._socket, [json.dumps(message).encode()], [log.fileno(), write])
                return _Forked(int(self._socket.recv(100)), read)
        finally:
            os.close(write)


class _Forked:
    """A process that another one has forked, as `asyncio.subprocess.Process` shows a child."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._pipe = status  # its exit status comes here
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        if self._status is None:
            with contextlib.suppress(BlockingIOError):
                text = os.read(self._pipe, 100)
                os.close(self._pipe)
                # The end of the pipe without a status is the end of the process that forks.
                self._status = int(text) if text else -signal.SIGTERM
        return self._status

    async def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        while (status := self.returncode) is None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(_POLL_SECONDS)
        return status


def _next_start(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each start that is asked for, and report each exit status, until the other side
    closes the socket. Return what to run in a forked process, and None in this one.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid, status = key.data
                    _, code = os.waitpid(pid, 0)
                    os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                    os.close(status)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                text, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
                if not text:
                    return None
                log, status = descriptors
                pid = os.fork()
                if pid == 0:
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    return dict(json.loads(text))
                os.close(log)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                control.send(str(pid).encode())


def _become(start: Mapping[str, Any]) -> None:
    """Run a module in this forked process, as ``python -m`` does in a new interpreter."""
    end_with_parent()
    os.closerange(3, 1024)
    os.chdir(start["folder"])
    sys.path[0] = start["folder"]
    os.environ.clear()
    os.environ.update(start["environment"])
    for name in _OF_ONE_PROCESS:
        importlib.reload(sys.modules[name])
    words = start["words"]
    sys.modules.pop(with_constants.MODULE, None)  # runpy warns of a module that is imported
    sys.argv, sys.orig_argv = list(words), [sys.executable, "-m", *words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Import the agent, and fork as the tests ask."""
    end_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    start = _next_start(control)
    control.detach()
    if start is not None:
        _become(start)


if __name__ == "__main__":
    main()
