"""The check whether the process that a container's region mentions still exists.

A process that is killed leaves its entry in the region behind, with all the memory it had
(hami-core §2.4). So entries are checked before they are counted. Called by `container_usage`, in a
thread.
"""

from __future__ import annotations

# The second process of a Linux system, and of no container: where it is seen, numbers are those of
# the host.
_KERNEL_PROCESS, _KERNEL_NAME = 2, "kthreadd"
_ENDED = ("Z", "X")  # zombie, dead (proc_pid_status(5))


class HostProcesses:
    """The processes of the host as ``proc_root`` shows them, or no knowledge at all. Nothing is
    kept: every question is asked anew.
    """

    def __init__(self, proc_root: str) -> None:
        self._proc_root = proc_root

    @property
    def visible(self) -> bool:
        """Tell whether these are the host's processes;
        an agent without ``hostPID`` sees only its own.
        """
        return self._status(_KERNEL_PROCESS).get("Name") == _KERNEL_NAME

    def is_alive(self, hostpid: int, pid: int) -> bool:
        """Tell whether the process ``hostpid`` on the host, ``pid`` in its container, runs;
        only where they are `visible`.

        Without a number on the host this is unknown and it counts as alive: memory that is in use
        must not be overlooked.
        """
        if hostpid <= 0:
            return True
        status = self._status(hostpid)
        if not status or status.get("State", "").startswith(_ENDED):
            return False
        # One number for each PID namespace, the innermost last; another one there means that the
        # number went to another process.
        return status.get("NSpid", str(pid)).split()[-1:] == [str(pid)]

    def _status(self, hostpid: int) -> dict[str, str]:
        """The process's status by keyword; empty when there is none."""
        try:
            with open(
                f"{self._proc_root}/{hostpid}/status", encoding="utf-8", errors="replace"
            ) as file:
                lines = file.read().splitlines()
        except OSError:  # also ESRCH, when it ends between open and read
            return {}
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
