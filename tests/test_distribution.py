"""The distribution of files to processes that start clusters (`tests.real_node.distribution`)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.real_node.distribution import next_file, write_clusters

_NONE, _ONE, _TWO, _BOTH = (frozenset(names) for names in ("", "1", "2", "12"))


def test_the_longest_files_come_first() -> None:
    """Otherwise one process would be left with one at the end, and nothing beside it."""
    clusters = {"longest": _NONE, "long": _ONE, "a": _TWO, "b": _TWO}
    assert next_file(list(clusters), clusters, mine=None, others=[]) == "longest"
    assert next_file(["long", "a", "b"], clusters, mine=None, others=[_NONE]) == "long"


def test_a_process_goes_on_with_files_that_use_its_clusters() -> None:
    """Each other one would cost the start of a cluster, even if more files use it."""
    clusters = {"a": _ONE, "b": _TWO, "c": _TWO, "d": _BOTH}
    assert next_file(list(clusters), clusters, mine=_ONE, others=[]) == "a"
    assert next_file(["a", "b", "c"], clusters, mine=_BOTH, others=[]) == "a"
    assert next_file(["c", "d"], clusters, mine=_ONE, others=[]) == "c"


def test_a_process_turns_to_the_clusters_with_the_most_files_that_no_other_one_has() -> None:
    """Two processes with the same clusters start them twice."""
    clusters = {"a": _ONE, "b": _TWO, "c": _TWO, "d": _ONE, "e": _ONE}
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_NONE]) == "a"
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_ONE]) == "b"
    assert next_file(list(clusters), clusters, mine=_NONE, others=[_ONE, _TWO]) == "a"


def test_files_without_clusters_fill_the_time_at_the_end() -> None:
    """They keep a process busy at no cost while others are not ready yet."""
    clusters = {"a": _NONE, "b": _ONE}
    assert next_file(["a", "b"], clusters, mine=_NONE, others=[_ONE]) == "b"
    assert next_file(["a"], clusters, mine=_ONE, others=[]) == "a"


def test_the_clusters_of_all_files_are_written_whole(tmp_path: Path) -> None:
    """Several processes write the same; whoever reads finds the whole of one, and nothing is left
    beside it.
    """
    path = tmp_path / "clusters.json"
    for _ in range(2):
        write_clusters(path, {"a": {"two", "one"}, "b": set()})
    assert json.loads(path.read_text()) == {"a": ["one", "two"], "b": []}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
