"""The keeper of one rig: a process on the host that starts it, and whose end is the rig's end.

Why: a rig must not survive its test run, not even one killed with SIGKILL, and cgroups and folders
do not vanish with processes. The owner holds one end of a pipe whose other end is the keeper's
standard input; the kernel closes it however the owner dies. Should the keeper itself be killed, the
namespaces die with it, and what remains on disk is for leftovers.py.

Called by lifecycle.Rig.start as ``python -m tests.real_node.rig.keeper NAME owned|free``; ``free``
ones (scripts/cluster up) end by SIGTERM.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from tests.real_node.rig import cgroups
from tests.real_node.rig.layout import Layout, Plan
from tests.real_node.rig.processes import ProcessId, children, namespace
from tests.real_node.rig.record import KeeperRecord
from tests.real_node.rig.supervisor import say

if TYPE_CHECKING:
    from collections.abc import Iterable

_CGROUP_PATIENCE_SECONDS = 10.0
_FORK_PATIENCE_SECONDS = 5.0


def main(name: str, *, owned: bool) -> None:
    """Run rig ``name`` until the owner is gone or SIGTERM arrives, then leave nothing of it."""
    layout = Layout(name)
    myself = ProcessId.of(os.getpid())
    KeeperRecord(myself).save(layout)
    end_read, end_write = os.pipe()
    os.set_blocking(end_write, False)
    signal.set_wakeup_fd(end_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # a wake-up on the pipe is all that is wanted
        signal.signal(number, lambda _number, _frame: None)
    ends = [end_read, sys.stdin.fileno()] if owned else [end_read]

    nodes = range(1, Plan.load(layout).options.nodes + 1)
    cgroups.create([layout.cgroup, *(layout.node(index).cgroup for index in nodes)])
    with layout.log("inside").open("ab") as log:
        # setpriv: should the keeper be killed, unshare dies too; --kill-child: should unshare be
        # killed, everything inside dies too.
        command = [
            *(
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                "--fork",
                "--kill-child=KILL",
                "--pid",
                "--mount",
                "--net",
            ),
            *(
                "--mount-proc",
                "--propagation",
                "private",
                "--",
                sys.executable,
                "-m",
                "tests.real_node.rig.inside",
                name,
            ),
        ]
        outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    first = _first_process(outer)
    if first is not None:
        record = KeeperRecord(
            myself, first, tuple(namespace(first.pid, kind) for kind in ("pid", "net", "mnt"))
        )
        record.save(layout)
        alive = os.pidfd_open(first.pid)
        if alive in _wait_for([*ends, alive]):
            say("the rig ended by itself")
            layout.failed.touch()
            _wait_for(ends)  # the owner wants to read the logs first
    else:
        layout.failed.touch()
        _wait_for(ends)
    say("ending")
    if first is not None and first.is_alive():
        os.kill(first.pid, signal.SIGKILL)
    outer.wait()  # unshare ends after its child, and that after every process of its pid namespace
    cgroups.remove(layout.cgroup, patience_seconds=_CGROUP_PATIENCE_SECONDS)
    shutil.rmtree(layout.run)


def _first_process(outer: subprocess.Popen[bytes]) -> ProcessId | None:
    """The child that unshare forks into the new namespaces; None when unshare fails."""
    deadline = time.monotonic() + _FORK_PATIENCE_SECONDS
    while outer.poll() is None and time.monotonic() < deadline:
        found = children(outer.pid)
        if found and namespace(found[0], "pid") != namespace(os.getpid(), "pid"):
            return ProcessId.of(found[0])
        time.sleep(0.01)
    return None


def _wait_for(descriptors: Iterable[int]) -> set[int]:
    """Wait until one of ``descriptors`` is readable, which for a pipe without writers and a dead
    process's pidfd means the end.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}


if __name__ == "__main__":
    main(sys.argv[1], owned=sys.argv[2] == "owned")
