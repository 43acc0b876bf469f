"""Socket files in the kubelet's plugin directory:
ours, the kubelet's, and the ones that an earlier life of this agent left behind.

Called by `directory` and `server`, always through ``asyncio.to_thread``, because a directory may be
slow or gone. A path is never used twice: the kubelet may end the client of a new registration when
the stream of an old one on the same path ends (kubelet §3), so each server instance gets a name of
its own. Process ids do not help here, since in a container ours is 1 in every life.
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

_LONGEST_SLUG = 24

# This life of the process, and the server instances in it.
_LIFE = secrets.token_hex(3)
_instances = itertools.count(1)
_OURS = re.compile(r"\Avgpu-agent-.+-[0-9a-f]{6}-[0-9]+\.sock\Z")


def unused_name(resource: str) -> str:
    """A file name that no server instance had before, e.g. ``vgpu-agent-gpu.shared-4f1c2a-1.sock``
    for ``nvidia.com/gpu.shared``.
    """
    slug = resource.rpartition("/")[2][:_LONGEST_SLUG].strip("-.") or "resource"
    return f"vgpu-agent-{slug}-{_LIFE}-{next(_instances)}.sock"


def age_seconds(path: Path) -> float:
    """Return the seconds since the socket at ``path`` was created;
    0 without one, or where its time is in the future.

    The kubelet replaces its sockets when it starts. A clock that is set late, after a boot say, can
    make the age too large.
    """
    found = identity(path)
    return max(0.0, time.time() - found.created_ns / 1e9) if found is not None else 0.0


def remove_leftovers(directory: Path) -> list[str]:
    """Delete the sockets of our naming scheme that have no listener, and return their names.

    A killed agent leaves its sockets behind. Another agent that is alive (a rolling update) accepts
    the connection and keeps its socket.
    """
    removed = []
    for path in _ours(directory):
        if _deserted(path):
            remove(path)  # another's file of that name cannot exist, see `unused_name`
            removed.append(path.name)
    return removed


def _ours(directory: Path) -> list[Path]:
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if _OURS.match(path.name) and f"-{_LIFE}-" not in path.name
        )
    except OSError:
        return []


def _deserted(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
