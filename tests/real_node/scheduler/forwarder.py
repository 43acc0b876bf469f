"""An address that passes HTTP requests on to a port that a file names, holds some of them up, and
measures them.

usage: python -m tests.real_node.scheduler.forwarder PORT TARGET_FILE TIMES_FILE HELD_FILE

The target is read for each new connection. When the other side closes, so does this one. A request
waits as long as HELD_FILE has its path, and each one that waits is written to stdout. At SIGTERM
the seconds of all answered requests are written, by path; those of waiting are not among them.
"""

from __future__ import annotations

import collections
import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path

_END_OF_HEAD = b"\r\n\r\n"
_LOOK_SECONDS = 0.01


def main(port: str, target_file: str, times_file: str, held_file: str) -> None:
    """Serve until SIGTERM."""
    times: dict[str, list[float]] = collections.defaultdict(list)

    def end(*_: object) -> None:
        Path(times_file).write_text(json.dumps(times))
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    with socket.create_server(("127.0.0.1", int(port)), backlog=256) as listener:
        print("listening", flush=True)  # noqa: T201 - for the process that has started this one
        while True:
            client, _ = listener.accept()
            target = int(Path(target_file).read_text())
            work = (client, target, times, Path(held_file))
            threading.Thread(target=_serve, args=work, daemon=True).start()


def _serve(client: socket.socket, target: int, times: dict[str, list[float]], held: Path) -> None:
    with client:
        try:
            with socket.create_connection(("127.0.0.1", target)) as server:
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (request := _message(client)) is not None:
                    path = request.split(b" ", 2)[1].decode()
                    _wait(path, held)
                    began = time.perf_counter()
                    server.sendall(request)
                    if (answer := _message(server)) is None:
                        return
                    client.sendall(answer)
                    times[path].append(time.perf_counter() - began)
        except OSError:
            return  # one of both is gone, and kube-scheduler sees its connection end


def _wait(path: str, held: Path) -> None:
    """Wait while requests with this path are held up."""
    if held.read_text() == path:
        print("held up", path, flush=True)  # noqa: T201 - for the process that has started this one
        while held.read_text() == path:
            time.sleep(_LOOK_SECONDS)


def _message(peer: socket.socket) -> bytes | None:
    """Return the next request or answer; None where the connection has ended."""
    head = b""
    while _END_OF_HEAD not in head:
        if not (part := peer.recv(65536)):
            return None
        head += part
    at = head.index(_END_OF_HEAD)
    length = next(
        (
            int(line.partition(b":")[2])
            for line in head[:at].lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ),
        0,
    )
    parts, missing = [head], at + len(_END_OF_HEAD) + length - len(head)
    while missing > 0:
        if not (part := peer.recv(min(missing, 1 << 20))):
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
