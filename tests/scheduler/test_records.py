"""Records of single pods for ``/explain``."""

from __future__ import annotations

import pytest

from vgpu_agent.pods import Pod
from vgpu_agent.scheduler import records
from vgpu_agent.scheduler.records import FilterCalls, PodRecords


def test_questions_about_a_pod_are_counted() -> None:
    """With the last answer."""
    kept = PodRecords(iter([1.0, 2.0, 3.0]).__next__)
    pod = Pod("u", "ml", "train", scheduler="vgpu-scheduler")
    kept.note_filter_call(pod, 500, "")
    kept.note_filter_call(pod, 420, "n0")
    assert kept.filter_calls("u") == FilterCalls(2, 3.0, 420, "n0")
    assert (kept.started_at, list(kept.schedulers)) == (1.0, ["vgpu-scheduler"])
    kept.forget("u")
    assert kept.filter_calls("u") is None


def test_anybody_can_ask_about_pods_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded."""
    monkeypatch.setattr(records, "_MAX_CALLED_PODS", 3)
    kept = PodRecords(lambda: 1.0)
    for number in range(100):
        kept.note_filter_call(Pod(f"u{number}", "ml", "x", scheduler=f"s{number}"), 1, "")
    assert [number for number in range(100) if kept.filter_calls(f"u{number}")] == [97, 98, 99]
    assert len(kept.schedulers) == records._MAX_SCHEDULERS


def test_names_of_pods_that_hold_cards() -> None:
    """Until they have gone."""
    kept = PodRecords(lambda: 1.0)
    kept.note_holder(Pod("u", "ml", "train"))
    assert kept.name_of("u") == "ml/train"
    kept.forget("u")
    assert kept.name_of("u") == ""
