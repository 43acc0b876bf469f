"""A program that behaves like ``nvidia-cuda-mps-control``, for nodes without NVIDIA's driver,
in tests and the demo.

``-d`` starts a daemon and returns; without arguments it reads commands from stdin, passes each to
the daemon through the socket ``control`` in ``CUDA_MPS_PIPE_DIRECTORY`` and prints the answers;
``client`` (which the real one does not have) stands for a CUDA program under MPS: it runs until its
server ends. Files, answers, log lines and exit codes are those of the real one (drivers 550 to
595).

`mps_tools` has it run as a compiled file, with the standard library alone: it is started for each
command, more than a thousand times in the tests, and gets only the environment of the real one, two
variables. So a command imports little: `socket`, `json`, `contextlib` and `typing` alone would take
longer than all the rest. What only the daemon or a fault needs is imported there.

``faults.json`` in the directory of the installation makes it misbehave: command (``start`` for
``-d``) → ``hang``, ``crash``, ``refuse``, ``nonsense`` or ``forget`` (prints nothing and does
nothing). There, ``"server": "orphan"`` lets a server outlive its daemon, and ``"shown": "gib"``
shows memory limits in whole GiB, as the newest drivers do.
"""

from __future__ import annotations

import _socket  # the part of `socket` that is quick to import
import os
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
PID_FILE = "nvidia-cuda-mps-control.pid"
CALLS_FILE = "calls"  # a Python dict in each line
NO_DAEMON = "Cannot find MPS control daemon process"
RUNNING_ALREADY = "An instance of this daemon is already running"
NONSENSE = "\x00\ufffd lorem ipsum\n"
CLIENT = "CLIENT"  # the line by which a client announces itself to the daemon

_GIB_MIB = 1024
_CHECK_SECONDS = 1.0  # how often an idle daemon checks that its directory is still there
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def main(arguments: list[str], directory: str) -> int:
    """Run as the control binary; ``directory``, that of the installation, holds the faults and the
    record of calls. Return the exit status.
    """
    # the default of the real one
    pipe = os.environ.get(PIPE_VARIABLE, "/tmp/nvidia-mps")  # noqa: S108
    commands = [] if arguments else [line.strip() for line in sys.stdin if line.strip()]
    record(directory, "nvidia-cuda-mps-control", arguments, commands)
    if arguments == ["client"]:
        return _client(pipe)
    if arguments == ["-d"]:
        return _start(pipe, directory)
    if arguments:
        sys.stderr.write(f"Unknown option {arguments[0]}\n")
        return 1
    return _send_commands(pipe, commands, directory)


def record(directory: str, tool: str, arguments: list[str], commands: list[str]) -> None:
    """Write down one call of a tool, for tests."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LC_CTYPE", "PWD", "SHLVL", "_")
    }
    call = {"tool": tool, "arguments": arguments, "commands": commands, "environment": environment}
    with open(os.path.join(directory, CALLS_FILE), "a", encoding="utf-8") as file:
        file.write(f"{call!r}\n")


def fault(directory: str, command: str) -> str:
    """Return the misbehaviour of ``command``; empty for none."""
    return str(_faults(directory).get(command, ""))


def misbehave(kind: str) -> int:
    """Apply a fault, as far as it is the same for each tool; return the exit status."""
    if kind == "hang":
        while True:
            time.sleep(3600)
    if kind == "nonsense":
        sys.stdout.write(NONSENSE)
        return 0
    if kind == "crash":
        import signal  # noqa: PLC0415 - slow to import, and few commands need it

        os.kill(os.getpid(), signal.SIGSEGV)
    sys.stderr.write("Insufficient permissions\n")
    return 1


def _faults(directory: str) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, "faults.json"), encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    import json  # noqa: PLC0415 - slow to import, and few commands need it

    return dict(json.loads(text))


# The program that is started for each command -----------------------------------------------------


def _send_commands(pipe: str, commands: list[str], directory: str) -> int:
    for command in commands:
        if (kind := fault(directory, command.split()[0])) and kind != "forget":
            return misbehave(kind)
        control = _socket.socket(_socket.AF_UNIX)
        try:
            control.connect(os.path.join(pipe, "control"))
            control.sendall(command.encode() + b"\n")
            control.shutdown(_socket.SHUT_WR)
            answer = _everything(control)
        except OSError:
            sys.stderr.write(NO_DAEMON + "\n")
            return 1
        finally:
            control.close()
        sys.stdout.write(answer.decode())
    return 0


def _everything(control: _socket.socket) -> bytes:
    return b"".join(iter(lambda: control.recv(65536), b""))


def _client(pipe: str) -> int:
    control = _socket.socket(_socket.AF_UNIX)
    try:
        control.connect(os.path.join(pipe, "control"))
    except OSError as err:
        sys.stderr.write(
            f"CUDA error 805: MPS client failed to connect to the MPS control daemon: {err}\n"
        )
        return 1
    control.sendall(CLIENT.encode() + b"\n")
    while limits := control.recv(4096):
        sys.stdout.write(limits.decode())
        sys.stdout.flush()
    control.close()
    sys.stderr.write("CUDA error 806: MPS server is not ready to accept new MPS client requests\n")
    return 1


def _start(pipe: str, directory: str) -> int:
    kind = fault(directory, "start")
    if kind not in ("", "forget", "crash"):
        return misbehave(kind)
    if kind == "forget":
        return 0
    if _answers(pipe):
        sys.stderr.write(RUNNING_ALREADY + "\n")
        return 1
    import socket  # noqa: PLC0415 - slow to import, and few commands need it

    if os.path.lexists(os.path.join(pipe, "control")):
        os.unlink(os.path.join(pipe, "control"))  # of a daemon that was killed
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(pipe, "control"))
        listener.listen(64)
        path = os.path.join(os.environ.get(LOG_VARIABLE, "/var/log/nvidia-mps"), "control.log")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as err:
        sys.stderr.write(f"Failed to start the daemon: {err}\n")
        return 1
    ready, started = os.pipe()
    if os.fork():
        os.close(started)
        os.read(ready, 1)  # ends when the daemon has written its pid, or is dead
        return 0
    os.close(ready)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    if kind == "crash":
        os._exit(1)
    with open(os.path.join(pipe, PID_FILE), "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    os.close(started)
    _Daemon(listener, pipe, directory, log).serve()
    os._exit(0)


def _answers(pipe: str) -> bool:
    control = _socket.socket(_socket.AF_UNIX)
    answered = control.connect_ex(os.path.join(pipe, "control")) == 0
    control.close()
    return answered


# The daemon ---------------------------------------------------------------------------------------


class _Daemon:
    """The control daemon and its server.

    State: the defaults that were set; the server process, which the first client starts and which
    takes the defaults of that moment as its limits; the sockets of its clients, by process id. A
    server that dies takes its clients with it.
    """

    def __init__(self, listener: socket.socket, pipe: str, directory: str, log: int) -> None:
        self._listener, self._pipe, self._directory, self._log_file = listener, pipe, directory, log
        # the defaults: percent of threads, and device → MiB of memory
        self._threads = 100.0
        self._memory: dict[str, int] = {}
        # its process id, and the daemon's ends of two pipes: one that the server holds open while
        # it runs, one that the server reads
        self._server: tuple[int, int, int] | None = None
        self._server_limits: tuple[float, dict[str, int]] = (100.0, {})  # like the defaults
        self._clients: dict[socket.socket, int] = {}

    def serve(self) -> None:
        self._log(f"Starting control daemon using socket {self._pipe}/control")
        self._log(
            f"To connect CUDA applications to this daemon, set env {PIPE_VARIABLE}={self._pipe}"
        )
        while True:
            watched: list[Any] = [
                self._listener,
                *self._clients,
                *([self._server[1]] if self._server else []),
            ]
            ready, _, _ = select.select(watched, [], [], _CHECK_SECONDS)
            if not ready and not os.path.exists(os.path.join(self._pipe, "control")):
                # The simulated node was deleted. The real one would stay for ever, but this daemon
                # must not be left on the machine.
                self._lose_server()
                return
            for source in ready:
                if source is self._listener:
                    if self._accept():
                        return
                elif isinstance(source, _socket.socket):
                    if source in self._clients and not source.recv(4096):
                        del self._clients[source]
                        source.close()
                else:
                    self._lose_server()

    def _accept(self) -> bool:
        """Serve one connection; return True when it sent ``quit``."""
        connection, _ = self._listener.accept()
        self._log("Accepting connection...")
        line = connection.makefile().readline().strip()
        if line == CLIENT:
            self._add_client(connection)
            return False
        with connection:
            self._log("NEW UI")
            self._log(f"Cmd:{line}")
            words = line.split()
            if fault(self._directory, words[0] if words else "") != "forget":
                try:  # noqa: SIM105 - `contextlib` is slow to import
                    connection.sendall(self._answer(words).encode())
                except OSError:
                    pass  # the client has gone
            self._log("UI closed")
        if words[:1] == ["quit"]:
            self._lose_server()
            for name in (PID_FILE, "control"):
                os.unlink(os.path.join(self._pipe, name))
            self._log("Exit")
            return True
        return False

    def _answer(self, words: list[str]) -> str:
        match words:
            case ["set_default_active_thread_percentage", percentage]:
                self._threads = float(percentage)
                answer = f"{self._threads}\n"
            case ["get_default_active_thread_percentage"]:
                answer = f"{self._threads}\n"
            case ["set_default_device_pinned_mem_limit", device, value]:
                self._memory[device] = _mib(value)
                answer = ""
            case ["get_default_device_pinned_mem_limit", device]:
                answer = self._shown(self._memory.get(device, 0))
            case ["get_server_list"]:
                answer = f"{self._server[0]}\n" if self._server else ""
            case [command, server, *values] if self._is_server(server):
                answer = self._of_server(command, values)
            case ["quit"]:
                answer = ""
            case _:
                answer = f"Unknown or invalid command: {' '.join(words)}\n"
        return answer

    def _of_server(self, command: str, values: list[str]) -> str:
        """Answer a command to a running server, whose limits apply to later clients."""
        threads, memory = self._server_limits
        match command, values:
            case "get_client_list", []:
                return "".join(f"{pid}\n" for pid in self._clients.values())
            case "set_active_thread_percentage", [percentage]:
                self._server_limits = (float(percentage), memory)
                return f"{float(percentage)}\n"
            case "get_active_thread_percentage", []:
                return f"{threads}\n"
            case "set_device_pinned_mem_limit", [device, value]:
                memory[device] = _mib(value)
                return ""
            case "get_device_pinned_mem_limit", [device]:
                return self._shown(memory.get(device, 0))
        return f"Unknown or invalid command: {command}\n"

    def _shown(self, mib: int) -> str:
        gib = mib >= _GIB_MIB and _faults(self._directory).get("shown") == "gib"
        return f"{mib // _GIB_MIB}G\n" if gib else f"{mib}M\n"

    def _is_server(self, pid: str) -> bool:
        return self._server is not None and pid == str(self._server[0])

    def _add_client(self, connection: socket.socket) -> None:
        pid, uid, _ = _PEER.unpack(
            connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER.size)
        )
        self._log(f"User {uid} starting a new client {pid}")
        if self._server is None:
            self._start_server(uid)
        self._clients[connection] = pid
        threads, memory = self._server_limits
        limits = ",".join(f"{device}={mib}M" for device, mib in sorted(memory.items()))
        connection.sendall(f"threads={threads} memory={limits}\n".encode())

    def _start_server(self, uid: int) -> None:
        alive_read, alive_write = os.pipe()
        stop_read, stop_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            # The server holds `alive_write` open while it runs, and ends when the daemon closes
            # `stop_write`.
            os.close(stop_write)
            self._listener.close()
            for client in self._clients:
                client.close()
            os.read(stop_read, 1)
            while _faults(self._directory).get("server") == "orphan":
                time.sleep(0.05)
            os._exit(0)
        os.close(alive_write)
        os.close(stop_read)
        self._server, self._server_limits = (
            (pid, alive_read, stop_write),
            (self._threads, dict(self._memory)),
        )
        self._log(f"Starting new server {pid} for user {uid}")

    def _lose_server(self) -> None:
        if self._server is None:
            return
        pid, alive_read, stop_write = self._server
        for descriptor in (stop_write, alive_read):
            os.close(descriptor)
        os.waitpid(pid, 0)
        self._log(f"Server {pid} exited with status 0")
        for client in self._clients:
            client.close()
        self._server = None
        self._clients.clear()

    def _log(self, text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        os.write(
            self._log_file,
            f"[{stamp}.{int(now % 1 * 1000):03d} Control {os.getpid():5d}] {text}\n".encode(),
        )


def _mib(value: str) -> int:
    return int(value[:-1]) * (_GIB_MIB if value.endswith("G") else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], sys.argv[1]))
