"""Name and remove socket files in the kubelet's plugin directory.

Functions that access files are called through ``asyncio.to_thread``, because the file system may be
slow or gone. No path is used twice: when the stream of an old registration ends, the kubelet may
end the client of a new registration on the same path (kubelet §3). So each plugin server gets a
unique name, also when it is made anew for the same resource. It contains a random token and not the
process id, because that is 1 in every container. Used by `directory` and `server`, and by `agent`
for the age of the kubelet's socket.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING

from vgpu_agent.grpc.sockets import identity, remove

if TYPE_CHECKING:
    from pathlib import Path

KUBELET_SOCKET = "kubelet.sock"

_MAX_SLUG_LENGTH = 24

# identifies this process; the counter identifies its plugin servers
_PROCESS_TOKEN = secrets.token_hex(3)
_instances = itertools.count(1)
_OUR_NAMES = re.compile(r"\Avgpu-agent-.+-[0-9a-f]{6}-[0-9]+\.sock\Z")


def new_socket_name(resource: str) -> str:
    """Return a file name that no plugin server has had.

    An example for ``nvidia.com/gpu.shared`` is ``vgpu-agent-gpu.shared-4f1c2a-1.sock``.
    """
    slug = resource.rpartition("/")[2][:_MAX_SLUG_LENGTH].strip("-.") or "resource"
    return f"vgpu-agent-{slug}-{_PROCESS_TOKEN}-{next(_instances)}.sock"


def age_seconds(path: Path) -> float:
    """Return the seconds since the socket at ``path`` was created; 0 if there is no socket, or its
    time is in the future.

    The kubelet replaces its sockets when it starts. The age is too large if the clock was set
    forward since then, for example after a boot.
    """
    found = identity(path)
    return max(0.0, time.time() - found.created_ns / 1e9) if found is not None else 0.0


def remove_stale_sockets(directory: Path) -> list[str]:
    """Delete the sockets of earlier agents that have no listener, and return their names.

    A killed agent does not remove its sockets. The sockets of another agent that still runs, as in
    a rolling update, accept connections and are not deleted.
    """
    removed = []
    for path in _previous_sockets(directory):
        if _has_no_listener(path):
            remove(path)  # no other socket can have got this name meanwhile: all names are unique
            removed.append(path.name)
    return removed


def _previous_sockets(directory: Path) -> list[Path]:
    """List the sockets with names of the agent, except those of this process."""
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if _OUR_NAMES.match(path.name) and f"-{_PROCESS_TOKEN}-" not in path.name
        )
    except OSError:
        return []


def _has_no_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # e.g. the queue of its listener is full
            return False
        return False
