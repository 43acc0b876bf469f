"""Lists that are read object by object while they arrive."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.patience import quickest_call
from vgpu_agent.cluster.lists import ListReader
from vgpu_agent.errors import ClusterError

_TEXTS = ("", 'a"b', "\\", '\\\\"{', "}{", "]", "[", "x" * 40, '"items":[', "é")


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8)
    if depth > 7 or kind < 3:
        return chance.choice((*_TEXTS, 1, None, True))
    if kind < 5:
        return [_value(chance, depth + 1) for _ in range(chance.randrange(5))]
    return {
        chance.choice('abc{}"\\') * 3 + str(place): _value(chance, depth + 1)
        for place in range(chance.randrange(5))
    }


def _read(body: bytes, piece: int) -> tuple[list[Any], tuple[str, str]]:
    page = ListReader("/api/v1/pods")
    items = [
        json.loads(raw)
        for start in range(0, len(body), piece)
        for raw in page.feed(body[start : start + piece])
    ]
    return items, page.end()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 1_000_000])
def test_every_object_is_whole_wherever_the_body_is_cut(piece: int) -> None:
    """Braces and brackets in texts, and ends of pieces in the middle of an escape,
    must not end an object.
    """
    for seed in range(200):
        chance = random.Random(seed)
        items = [
            {"metadata": _value(chance), "number": place} for place in range(chance.randrange(6))
        ]
        around = {"kind": "PodList", "metadata": {"resourceVersion": "7", "continue": "t{"}}
        body = {**around, "items": items} if seed % 2 else {"items": items, **around}
        assert _read(json.dumps(body, separators=(",", ":")).encode(), piece) == (
            items,
            ("7", "t{"),
        ), seed


_LARGE = {
    "long texts": ["x" * 32_000] * 44,
    "escaped quotes": ['\\"' * 16_000] * 22,
    "backslashes": ["\\" * 32_000] * 22,
    "empty objects": [{}] * 500_000,
    "nested objects": [{"b": {"c": {"d": {"e": {}}}}}] * 60_000,
    "empty texts": [""] * 500_000,
}


@pytest.mark.parametrize("what", _LARGE)
def test_no_object_takes_long_to_find_the_end_of(what: str) -> None:
    """A pattern that tries its characters in several ways would need hours
    for what a tenant may write into one pod.
    """
    item = json.dumps({"metadata": _LARGE[what]}, separators=(",", ":")).encode()
    page, broken = ListReader("/api/v1/pods"), ListReader("/api/v1/pods")

    def read() -> None:
        assert len(list(page.feed(b'{"metadata":{"resourceVersion":"7"},"items":[' + item))) == 1
        assert not list(broken.feed(b'{"items":[' + item[:-1]))

    assert quickest_call(read, within_seconds=2.0, attempts=1) < 2.0
    with pytest.raises(ClusterError, match="ended early"):
        broken.end()
