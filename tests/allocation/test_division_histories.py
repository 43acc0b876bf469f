"""Any history of pods that want instances, of GPUs that are divided, or not, and of pods that end:
no two pods ever share an instance.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.allocation.test_division import GROUP3, MigPlace
from tests.families.volcano_vgpu.golden import NUMBER, U0, U1
from tests.families.volcano_vgpu.mig.parts import GROUP2
from vgpu_agent.errors import AgentError
from vgpu_agent.families.family import MigLayout

PLACES = [
    f"{gpu}[{place}]"
    for gpu in (U0, U1)
    for place in ("group2-0", "group2-1", "group2-2", "group3-0", "group3-1")
]
STEPS = st.one_of(
    st.tuples(st.just("pod"), st.sampled_from(PLACES)),
    st.tuples(st.just("again"), st.integers(0, 9)),
    st.tuples(st.just("cut off"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("divided"), st.sampled_from(["as asked", "otherwise", "failed"])),
)


class History(MigPlace):
    """A node on which things happen, and the rules that hold after each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.book.synced.set()
        self.pods: dict[str, tuple[str, ...]] = {}
        self.starts: list[asyncio.Task[None]] = []
        self.number = 0

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """No pod has any part of a GPU that is to be divided,
        and it is not being divided already.
        """
        assert layout.gpu not in self._waiting
        gpu = self.inventory.gpu(layout.gpu)
        assert gpu is not None
        held = {share.device for grant in self.ledger.grants for share in grant.shares}
        assert held.isdisjoint({gpu.uuid, *(instance.uuid for instance in gpu.mig_instances)})
        super().divide(layout, done)

    async def step(self, what: str, which: str | int) -> None:
        """Let one thing happen."""
        if what == "pod" and isinstance(which, str) and len(self.pods) < 10:
            self.number += 1
            name = f"p{self.number}"
            self.pods[name] = await self.admitted(
                name,
                which,
                number=next(n for n in range(10) if (f"{U0}-{n}",) not in self.pods.values()),
            )
            self.starts.append(await self.begin(self.pods[name]))
        elif what == "divided" and self.asked:
            layout = self.asked[-1]
            if layout.gpu in self._waiting:
                shown = (
                    layout.profiles
                    if which == "as asked"
                    else GROUP2
                    if layout.profiles == GROUP3
                    else GROUP3
                )
                self.finish(
                    layout.gpu,
                    *(() if which == "failed" else shown),
                    reason="broken" if which == "failed" else "",
                )
        elif isinstance(which, int) and self.pods:
            name = list(self.pods)[which % len(self.pods)]
            if what == "again":
                self.starts.append(await self.begin(self.pods[name]))
            elif what == "cut off":
                self.starts[which % len(self.starts)].cancel()
            elif what == "end":
                pod = self.book.get(f"uid-{name}")
                assert pod is not None
                self.book.put(msgspec.structs.replace(pod, phase="Succeeded"))
                self.forget(pod)
                del self.pods[name]
        for _ in range(30):
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Each instance has one holder, which receives it and nothing else,
        and a GPU is cordoned while it is divided.
        """
        assert self.ledger.audit() == []
        held = [share.device for grant in self.ledger.grants for share in grant.shares]
        assert len(held) == len(set(held))
        assert set(self.cordoned) == set(self._waiting)
        for grant in self.ledger.grants:
            if grant.shares and grant.proven:
                assert self.seen(grant.ids) == ",".join(share.device for share in grant.shares)

    async def play(self, steps: list[tuple[str, str | int]]) -> None:
        """All steps; no start fails but with a reason."""
        for what, which in steps:
            await self.step(what, which)
        for start in self.starts:
            start.cancel()
        for outcome in await asyncio.gather(*self.starts, return_exceptions=True):
            assert outcome is None or isinstance(outcome, (AgentError, asyncio.CancelledError)), (
                outcome
            )


@given(steps=st.lists(STEPS, min_size=3, max_size=25))
def test_no_instance_is_ever_given_twice(steps: list[tuple[str, str | int]]) -> None:
    """volcano-vgpu:D15, whatever the order in which pods, GPUs and kubelet's calls come and go."""
    asyncio.run(History().play(steps))


def test_a_history_is_played_to_its_end() -> None:
    """The rules above are about something: in this history four containers come to hold instances
    of two GPUs.
    """
    place = History()
    steps: list[tuple[str, str | int]] = [
        ("pod", PLACES[0]),
        ("pod", PLACES[0]),
        ("divided", "as asked"),
        ("pod", PLACES[8]),
    ]
    steps += [("divided", "failed"), ("again", 2), ("divided", "as asked"), ("pod", PLACES[8])]
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(place.play(steps))
    held = sorted(share.device for grant in place.ledger.grants for share in grant.shares)
    assert held == ["MIG-1-0", "MIG-1-1", "MIG-2-0", "MIG-2-1"]
    assert all(grant.resource == NUMBER for grant in place.ledger.grants)
