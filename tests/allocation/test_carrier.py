"""The token that stands for a grant's ids, in CDI and in the log."""

from __future__ import annotations

import msgspec

from vgpu_agent.allocation.carrier import cdi_name, grant_token, tokens_of
from vgpu_agent.model import Grant

NUMBER = "volcano.sh/vgpu-number"
GRANT = Grant(1, "volcano-vgpu", NUMBER, ("a-1", "a-0"), (), decided_for=("uid-1", "main"))


def test_a_token_stands_for_ids_in_any_order() -> None:
    """The kubelet's checkpoint has them in another order than Allocate.
    Another resource's ids are something else.
    """
    assert grant_token(NUMBER, ("a-0", "a-1")) == grant_token(NUMBER, ("a-1", "a-0"))
    assert grant_token(NUMBER, ("a-0", "a-1")) != grant_token(
        "volcano.sh/gpu-memory", ("a-0", "a-1")
    )
    assert grant_token(NUMBER, ("a-0", "a-1")) != grant_token(NUMBER, ("a-0a-1",))
    assert cdi_name("t") == "vgpu-agent.internal/grant=t"


def test_the_tokens_of_a_pod_are_those_of_grants_that_were_decided_for_it() -> None:
    """Once each, although a grant can be known twice.
    A reservation that waits for its pod has none yet.
    """
    sidecar = msgspec.structs.replace(
        GRANT, number=2, ids=("a-2",), decided_for=("uid-1", "sidecar")
    )
    others = (
        msgspec.structs.replace(GRANT, decided_for=None),
        msgspec.structs.replace(GRANT, ids=("a-3",), decided_for=("uid-2", "main")),
    )
    assert tokens_of("uid-1", (GRANT, sidecar, *others, GRANT)) == (
        grant_token(NUMBER, ("a-0", "a-1")),
        grant_token(NUMBER, ("a-2",)),
    )
