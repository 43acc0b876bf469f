"""Starts, stops and watches a handful of processes inside the rig,
and takes orders through a unix socket in the rig's folder.

Why: a test wants to stop the kubelet and start it again, as often as it likes, from outside the
namespaces. Restarting by itself is what a supervisor must not do here: a component that dies is a
finding, so it is only noted in the log. Except while the rig starts: then it is the end of the
start.

Used by inside.py for the control plane (there it is process 1 and must also reap orphans) and by
node.py for containerd and kubelet; `order` is what lifecycle.Rig calls. One JSON object each way
per connection: ``{"do": "stop", "name": "kubelet", "signal": 15}``.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.real_node.rig.errors import RigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_STOP_SECONDS = 10.0


def say(text: str) -> None:
    """One line for the log of the process that calls it."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Supervisor:
    """The processes of one part of the rig.

    State: which of ``commands`` run. Single-threaded: everything happens in `run`, or before it.
    """

    def __init__(
        self,
        commands: Mapping[str, list[str]],
        *,
        log: Callable[[str], Path],
        environment: Mapping[str, str],
        socket_path: Path,
    ) -> None:
        self._commands = commands
        self._log = log
        self._environment = dict(environment)
        self._socket_path = socket_path
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: dict[str, int] = {}

    def start(self, name: str) -> None:
        """Start ``name`` unless it runs."""
        if name in self._running:
            return
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        say(f"{name} started, pid {self._running[name].pid}")

    def stop(self, name: str, signal_number: int) -> None:
        """Send ``signal_number`` to ``name`` and wait until it is gone;
        one that ignores it for 10 s is killed.
        """
        process = self._running.get(name)
        if process is None:
            return
        process.send_signal(signal_number)
        deadline = time.monotonic() + _STOP_SECONDS
        while name in self._running:  # until reaped
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.01)
            self.reap()

    def reap(self) -> None:
        """Collect every child that has died, our own and (as process 1) orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, process in list(self._running.items()):
                if process.pid == pid:
                    # Popen must not wait for it a second time
                    process.returncode = os.waitstatus_to_exitcode(status)
                    del self._running[name]
                    self._ended[name] = process.returncode
                    say(f"{name} ended with {process.returncode}")

    def check(self) -> None:
        """Raises: RigError when a component has ended, which cannot have been ordered yet."""
        self.reap()
        for name, code in self._ended.items():
            raise RigError(f"{name} ended with {code} during the start; see its log")

    def run(
        self, *, starting: Callable[[], bool], listening: Callable[[], None] = lambda: None
    ) -> None:
        """Reap and take orders until killed. ``listening`` is called once orders are taken.

        Raises:
            RigError: a component ends while ``starting``.
        """
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_write.fileno())
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
            selectors.DefaultSelector() as selector,
        ):
            listener.bind(str(self._socket_path))
            listener.listen()
            selector.register(wake_read, selectors.EVENT_READ)
            selector.register(listener, selectors.EVENT_READ)
            listening()
            while True:
                self.reap()  # at first: components that died before the wake-up was in place
                if self._ended and starting():
                    self.check()
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        with connection:
                            self._answer(connection)
                    else:
                        wake_read.recv(4096)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        try:
            with connection.makefile("rb") as lines:
                wanted = json.loads(lines.readline())
            connection.sendall(json.dumps(self._obey(wanted)).encode())
        except (OSError, ValueError, KeyError) as err:
            # a caller that went away or spoke nonsense must not end the rig
            say(f"bad order: {err!r}")

    def _obey(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["do"] != "status" and wanted["name"] not in self._commands:
            return {
                "error": (
                    f"no component named {wanted['name']!r}; there are {', '.join(self._commands)}"
                )
            }
        if wanted["do"] == "start":
            self.start(wanted["name"])
        elif wanted["do"] == "stop":
            self.stop(wanted["name"], wanted["signal"])
        return {"running": {name: process.pid for name, process in self._running.items()}}


def order(socket_path: Path, wanted: Mapping[str, Any]) -> dict[str, int]:
    """Give an order to the supervisor behind ``socket_path``;
    returns what runs now, name → pid inside the rig.

    Raises:
        RigError: it does not answer, or refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2 * _STOP_SECONDS)
            connection.connect(str(socket_path))
            connection.sendall(json.dumps(wanted).encode() + b"\n")
            with connection.makefile("rb") as answer:
                reply = json.loads(answer.read())
    except (OSError, ValueError) as err:
        raise RigError(
            f"the supervisor at {socket_path} does not answer ({err}); does the rig run?"
        ) from err
    if "error" in reply:
        raise RigError(reply["error"])
    running: dict[str, int] = reply["running"]
    return running
