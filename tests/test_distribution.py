"""The distribution of files to processes that start clusters (`tests.real_node.distribution`)."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from tests.real_node.distribution import ByClusters, next_file, write_clusters

_NONE, _ONE, _TWO, _BOTH = (frozenset(names) for names in ("", "1", "2", "12"))


def test_the_longest_files_come_first() -> None:
    """Otherwise one process would be left with one at the end, and nothing beside it."""
    clusters = {"longest": _NONE, "long": _ONE, "a": _TWO, "b": _TWO}
    assert next_file(list(clusters), clusters, mine=None, others=[]) == "longest"
    assert next_file(["long", "a", "b"], clusters, mine=None, others=[_NONE]) == "long"


def test_a_process_goes_on_with_files_that_use_its_clusters() -> None:
    """Any other would cost the start of a cluster, even if more files use it."""
    clusters = {"a": _ONE, "b": _TWO, "c": _TWO, "d": _BOTH}
    assert next_file(list(clusters), clusters, mine=_ONE, others=[]) == "a"
    assert next_file(["a", "b", "c"], clusters, mine=_BOTH, others=[]) == "a"
    assert next_file(["c", "d"], clusters, mine=_ONE, others=[]) == "c"


def test_a_process_turns_to_the_clusters_with_the_most_files_that_no_other_one_has() -> None:
    """Two processes with the same clusters start them twice."""
    clusters = {"a": _ONE, "b": _TWO, "c": _TWO}
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_NONE]) == "b"
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_TWO]) == "a"
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_ONE, _TWO]) == "b"
    clusters = {"a": _ONE, "b": _TWO, "c": frozenset("3")}
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_BOTH]) == "c"


def test_files_without_clusters_come_before_other_clusters() -> None:
    """They leave processors to the longest files, which run beside them and measure."""
    clusters = {"a": _TWO, "b": _NONE, "c": _ONE}
    assert next_file(list(clusters), clusters, mine=_NONE, others=[]) == "b"
    assert next_file(["a", "b"], clusters, mine=_ONE, others=[]) == "b"
    assert next_file(list(clusters), clusters, mine=_ONE, others=[]) == "c"


def test_the_clusters_of_all_files_are_written_whole(tmp_path: Path) -> None:
    """Several processes write the same, and whoever reads meanwhile finds the whole of one."""
    path = tmp_path / "clusters.json"
    write_clusters(path, {"a": set()})
    with path.open() as before:
        write_clusters(path, {"a": {"two", "one"}, "b": set()})
        assert json.load(before) == {"a": []}
    assert json.loads(path.read_text()) == {"a": ["one", "two"], "b": []}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class _Process(WorkerController):
    """A process that runs tests, as the scheduler sees it; it notes what it is to run."""

    def __init__(self, name: str) -> None:
        gateway: Any = types.SimpleNamespace(id=name)
        self.gateway = gateway
        self._down = self._shutdown_sent = False
        self.tests: list[int] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        """Note the places of tests in the collection. Without any, it would wait for ever."""
        assert indices
        self.tests += indices

    def shutdown(self) -> None:
        """End once all tests have run."""
        self._shutdown_sent = True


class _Run:
    """A run, of two processes at first: its files, three tests in each, and their clusters.

    Attributes:
        scheduler: distributes the files.
        processes: those that run them.
    """

    def __init__(
        self, pytestconfig: pytest.Config, folder: Path, clusters: Mapping[str, Collection[str]]
    ) -> None:
        path = folder / "clusters.json"
        write_clusters(path, clusters)
        config = copy.copy(pytestconfig)
        config.option = copy.copy(pytestconfig.option)
        config.option.tx, config.option.loadscopereorder = ["2*popen"], False
        self.scheduler = ByClusters(config, Producer("distribution"), path)
        self.processes: list[_Process] = []
        self._tests = [f"{file}::test_{place}" for file in clusters for place in range(3)]
        self.add(_Process("first"))
        self.add(_Process("second"))
        self.scheduler.schedule()

    def add(self, process: _Process) -> None:
        """Let a process take part; it has collected the tests."""
        self.processes.append(process)
        self.scheduler.add_node(process)
        self.scheduler.add_node_collection(process, self._tests)

    def files(self, process: int) -> list[str]:
        """The files that a process was given, in order."""
        tests = self.processes[process].tests
        return list(dict.fromkeys(self._tests[place].partition("::")[0] for place in tests))

    def finish(self, process: int, tests: int) -> None:
        """Let a process finish so many of its tests, of all files, in order."""
        one = self.processes[process]
        for number in range(tests):
            self.scheduler.mark_test_complete(one, one.tests[number])


def test_each_process_is_given_the_files_of_its_clusters(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Files with one cluster go to one process, although the other asks in between."""
    clusters = {"a": "1", "b": "2", "c": "1", "d": "2", "e": "1", "f": "2", "g": "1"}
    run = _Run(pytestconfig, tmp_path, clusters)
    for tests in (1, 3, 4, 6):
        run.finish(0, tests)
        run.finish(1, tests)
    assert (run.files(0), run.files(1)) == (["a", "c", "e"], ["b", "d", "f"])


def test_no_process_is_given_a_file_that_one_had_finished_before_it_crashed(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """It would be given no test, and wait for ever."""
    run = _Run(pytestconfig, tmp_path, {"a": "1", "b": "2", "c": "1", "d": "2"})
    run.finish(0, 4)
    assert run.files(0) == ["a", "c", "d"]
    assert run.scheduler.remove_node(run.processes[0]) == "c::test_1"
    run.finish(1, 6)
    assert run.files(1) == ["b", "d", "c"]
    assert run.scheduler.workqueue == {}
    with pytest.raises(KeyError):
        run.scheduler.remove_node(run.processes[0])


def test_a_process_in_place_of_a_crashed_one_knows_more_than_one_test(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """It runs a test only once it knows the next one, and the others may have ended."""
    run = _Run(pytestconfig, tmp_path, {"a": "1", "b": "2", "c": "1", "d": "2"})
    run.finish(0, 5)
    run.finish(1, 3)
    assert run.processes[1].shutting_down
    assert run.scheduler.remove_node(run.processes[0]) == "c::test_2"
    run.add(_Process("third"))
    run.scheduler.schedule()
    assert run.files(2) == ["c", "d"]
