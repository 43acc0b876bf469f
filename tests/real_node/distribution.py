"""Which of the processes that run tests side by side gets which files.

To start a cluster takes as much processor time as several tests, and each process starts its own.
So a process goes on with files that use the clusters it has. By default it would get the first file
that is left, and each process would start all kinds of clusters.

Only the processes that run tests collect them, and so know which clusters a file uses. They write
it into a file, whose path they get from the process that distributes (`tests.real_node.conftest`
passes it on). That is so where pytest's arguments name this folder, as ``scripts/test all`` does
unless it is given other files. Otherwise the process that distributes does not load the
conftest.py, and xdist's own way stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

Clusters = frozenset[str]

# A process runs a test only once it knows the next one, or that there is none. xdist sees to that
# at the beginning, but not for a process that comes later, in place of one that has crashed.
_LEAST_PENDING = 2


def write_clusters(path: Path, clusters: Mapping[str, Collection[str]]) -> None:
    """Write the clusters that each file uses. Several processes may write the same at once."""
    writing = path.with_name(f"{path.name}.{os.getpid()}")
    writing.write_text(json.dumps({file: sorted(used) for file, used in clusters.items()}))
    writing.replace(path)


def next_file(
    left: Sequence[str],
    clusters: Mapping[str, Clusters],
    *,
    mine: Clusters | None,
    others: Collection[Clusters],
) -> str:
    """Choose the file that a process runs next.

    The first one is the first that is left, since the longest come first. Then come files that use
    no other clusters than the process has, and then those without clusters: they leave processors
    to the longest, which measure. At last a process turns to the clusters with the most files left,
    if possible to those that no other process has.

    Args:
        left: the files that no process has got, the longest first; at least one.
        clusters: those that each file uses.
        mine: the clusters of the process; None before its first file.
        others: those of the other processes; its own among them do no harm.
    """
    if mine is None:
        return left[0]
    of_mine = [file for file in left if clusters[file] and clusters[file] <= mine]
    without = [file for file in left if not clusters[file]]
    if first := of_mine or without:
        return first[0]
    of_nobody = [file for file in left if not any(clusters[file] <= each for each in others)]
    kinds = [clusters[file] for file in of_nobody or left]
    most = max(kinds, key=kinds.count)
    return next(file for file in left if clusters[file] == most)


class ByClusters(LoadFileScheduling):
    """Distribution of whole files, as ``--dist loadfile`` makes it, in the order of `next_file`.

    State: the clusters of the last file that each process was given.
    """

    def __init__(self, config: pytest.Config, log: Producer, clusters_file: Path) -> None:
        super().__init__(config, log)
        self._clusters_file = clusters_file
        self._clusters: dict[str, Clusters] = {}
        self._of_processes: dict[WorkerController, Clusters] = {}

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._clusters:
            written: dict[str, list[str]] = json.loads(self._clusters_file.read_text())
            self._clusters = {file: frozenset(used) for file, used in written.items()}
        file = next_file(
            list(self.workqueue),
            self._clusters,
            mine=self._of_processes.get(node),
            others=self._of_processes.values(),
        )
        self._of_processes[node] = self._clusters[file]
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
        if self.workqueue and self._pending_of(self.assigned_work[node]) < _LEAST_PENDING:
            self._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a process that has ended. Return the test in which it crashed, if it has.

        xdist would put all files of a crashed process back into the queue, those that it had
        finished as well. A process that is given one of these waits for ever.

        Raises:
            KeyError: the process is not known.
        """
        self._of_processes.pop(node, None)
        files = self.assigned_work[node]
        self.assigned_work[node] = {
            file: tests for file, tests in files.items() if not all(tests.values())
        }
        return super().remove_node(node)
