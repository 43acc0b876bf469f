"""The API server's word on a scraper: who a token is, and whether he may get the path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.fake_api import FakeApi
from vgpu_agent.cluster.reviews import (
    ACCESS_REVIEWS,
    OWN_ACCESS_REVIEWS,
    TOKEN_REVIEWS,
    Right,
    have,
    may_get,
)
from vgpu_agent.errors import ClusterError

USER = {"username": "prometheus", "uid": "u", "groups": ["g"], "extra": {"pod": ["p"]}}


class ReviewingApi(FakeApi):
    """Answers both reviews as a test says."""

    def __init__(self, token: Any, access: Any = None) -> None:
        super().__init__()
        self.answers = {TOKEN_REVIEWS: token, ACCESS_REVIEWS: access, OWN_ACCESS_REVIEWS: access}
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        self.asked.append((path, body["spec"]))
        return json.dumps(self.answers[path]).encode()


KNOWN = {"status": {"authenticated": True, "user": USER}}


async def test_whoever_has_the_token_is_asked_about_with_all_that_is_known_of_him() -> None:
    """A role may be bound to any of it."""
    api = ReviewingApi(KNOWN, {"status": {"allowed": True}})
    assert await may_get(api, "secret", "/metrics")
    assert api.asked == [
        (TOKEN_REVIEWS, {"token": "secret"}),
        (
            ACCESS_REVIEWS,
            {
                "user": "prometheus",
                "uid": "u",
                "groups": ["g"],
                "extra": {"pod": ["p"]},
                "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
            },
        ),
    ]


@pytest.mark.parametrize(
    ("token", "access"),
    [
        ({"status": {"authenticated": False}}, None),
        ({"status": {"authenticated": True}}, None),
        ({"status": {"authenticated": True, "user": {"username": ""}}}, None),
        (KNOWN, {"status": {"allowed": False}}),
        (KNOWN, {"status": {"allowed": True, "denied": True}}),
    ],
)
async def test_every_doubt_is_a_no(token: Any, access: Any) -> None:
    """A user without a name would be the anonymous one's roles' business."""
    assert not await may_get(ReviewingApi(token, access), "secret", "/metrics")


@pytest.mark.parametrize(("token", "access"), [([], None), ({}, None), (KNOWN, {"status": 1})])
async def test_an_answer_that_cannot_be_read_is_no_answer(token: Any, access: Any) -> None:
    """A proxy's page, say: an error, and neither yes nor no."""
    with pytest.raises(ClusterError, match="cannot be read"):
        await may_get(ReviewingApi(token, access), "secret", "/metrics")


@pytest.mark.parametrize(
    ("status", "allowed"),
    [({"allowed": True}, True), ({"allowed": False}, False), ({}, False)],
)
async def test_a_right_of_our_own_is_asked_with_its_subresource(
    status: dict[str, bool], *, allowed: bool
) -> None:
    """The API server counts ``nodes`` and ``nodes/status`` as two."""
    api = ReviewingApi(None, {"status": status})
    assert await have(api, Right("patch", "nodes/status", name="node-a")) is allowed
    attributes = api.asked[0][1]["resourceAttributes"]
    assert (attributes["resource"], attributes["subresource"], attributes["name"]) == (
        "nodes",
        "status",
        "node-a",
    )
