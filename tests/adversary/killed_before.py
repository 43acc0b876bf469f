"""Becomes ``python <arguments>``, and kills itself with SIGKILL
before the file operation number N below a folder.

usage: killed_before.py FOLDER NUMBER COUNT-FILE PYTHON -m vgpu_agent run …

A file operation is one that changes something: making, renaming, removing, truncating, changing a
mode, opening for writing. Python tells an audit hook of each before it is made. Each adds a line to
COUNT-FILE, so that a life without a kill says how many there are.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

_CHANGES = frozenset(
    {
        "os.rename",
        "os.mkdir",
        "os.remove",
        "os.rmdir",
        "os.truncate",
        "os.chmod",
        "os.link",
        "os.symlink",
        "os.utime",
    }
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def main() -> None:
    """Install the hook and run the module."""
    folder, number, count_file, _python, _dash_m, module, *arguments = sys.argv[1:]
    counted = os.open(count_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    limit, seen = int(number), 0

    def hook(event: str, facts: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in _CHANGES and not (
            event == "open" and isinstance(facts[2], int) and facts[2] & _WRITING
        ):
            return
        path = os.fsdecode(facts[0]) if isinstance(facts[0], str | bytes) else str(facts[0])
        # A number is a descriptor, and a name without a slash lies in a directory that was opened
        # before.
        if not path.startswith(folder) and "/" in path:
            return
        seen += 1
        if seen == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(counted, f"{seen} {event} {path}\n".encode())

    sys.addaudithook(hook)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
