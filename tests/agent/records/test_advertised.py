"""The agent's reaction to a kubelet that does not list the ids it received; on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from tests.agent.offers.fake_server import GPU, FakeServer
from vgpu_agent.agent.records.advertised import ListedIds
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import KubeletError
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet.plugin import SentList
from vgpu_agent.kubelet.pod_resources import AllocatableUnsupportedError, PodResources
from vgpu_agent.status import KubeletStatus

OURS = {GPU: frozenset({"a", "b"})}
FOREIGN = {GPU: frozenset({"x", "y"})}


class Compared:
    """A comparison with what the test lets kubelet list."""

    def __init__(self, *servers: FakeServer) -> None:
        self.servers = servers or (FakeServer(),)
        self.listed: dict[str, frozenset[str]] = dict(OURS)
        self.error: KubeletError | None = None
        self.calls = 0
        self.journal, self.kubelet = Journal(), KubeletStatus()
        self.ids = ListedIds(
            servers=lambda: self.servers,
            pod_resources=cast("PodResources", self),
            kubelet_status=self.kubelet,
            journal=self.journal,
        )

    async def allocatable(
        self, offered: Mapping[str, Sequence[DeviceId]]
    ) -> dict[str, frozenset[str]]:
        """A stand-in for the kubelet."""
        self.calls += 1
        assert offered
        if self.error is not None:
            raise self.error
        return self.listed

    async def look(self, times: int = 1, *, pause_seconds: float = 2.0) -> list[bool]:
        """Compare so many times; the answers."""
        answers = []
        for _ in range(times):
            answers.append(await self.ids.compare())
            await asyncio.sleep(pause_seconds)
        return answers

    def events(self) -> list[tuple[str, Any]]:
        """Event and number of missing ids."""
        return [(entry.event, entry.facts.get("missing")) for entry in self.journal.entries]

    def again(self, number: int = 0) -> int:
        """Return the number of times that the server was asked to register again."""
        return len(self.servers[number].again)


@pytest.mark.looptime
async def test_a_list_that_kubelet_has_is_no_matter() -> None:
    """Ids of ours that are unhealthy need not be there, and other resources do not matter."""
    compared = Compared(FakeServer(("a", "b"), unhealthy=("c",)))
    compared.listed["vendor.example/other"] = frozenset({"z"})
    assert await compared.look(3) == [False, False, False]
    assert (compared.again(), compared.events()) == (0, [])


@pytest.mark.looptime
@pytest.mark.parametrize("listed", [frozenset[str](), frozenset({"b"})], ids=["none", "some"])
async def test_missing_ids_are_registered_again_at_the_second_look(listed: frozenset[str]) -> None:
    """The first look only asks for a second;
    then one line, and the status says it until the ids are there.
    """
    compared = Compared()
    compared.listed[GPU] = listed
    status = compared.servers[0].status
    assert (await compared.look(), compared.again(), status.last_error) == ([True], 0, "")
    assert (await compared.look(), compared.again()) == ([False], 1)
    assert compared.events() == [("plugin.not_listed", 2 - len(listed))]
    assert status.last_error == compared.servers[0].again[0] == status.not_listed
    assert status.last_error.startswith(
        "the kubelet does not list the agent's ids: another plugin registered this resource"
    )
    compared.listed = dict(OURS)
    await compared.look()
    assert (status.last_error, status.not_listed) == ("", "")


@pytest.mark.looptime
async def test_a_difference_that_is_gone_at_the_second_look_was_none() -> None:
    """A list may have been on its way."""
    compared = Compared()
    for listed in (frozenset[str](), OURS[GPU], frozenset[str](), OURS[GPU]):
        compared.listed[GPU] = listed
        await compared.look()
    assert (compared.again(), compared.events()) == (0, [])


@pytest.mark.looptime
async def test_a_list_that_was_just_sent_is_not_compared() -> None:
    """Neither is one that cannot be: no stream is open."""
    compared = Compared(FakeServer())
    compared.listed = {}
    assert compared.servers[0].last_sent is not None
    compared.servers[0].last_sent = SentList(compared.servers[0].last_sent.devices, seconds_ago=2.9)
    assert await compared.look(3) == [False, False, False]
    compared.servers[0].last_sent = None
    calls = compared.calls
    assert await compared.look(3) == [False, False, False]
    assert (compared.again(), compared.calls) == (0, calls)


@pytest.mark.looptime
async def test_registrations_that_do_not_help_come_less_and_less_often() -> None:
    """Pauses from 2 s to ``RETRY_MAX_SECONDS``, and one line in the journal."""
    compared = Compared()
    compared.listed = {}
    await compared.look(150, pause_seconds=1.0)
    assert 5 <= compared.again() <= 8
    assert compared.events() == [("plugin.not_listed", 2)]


@pytest.mark.looptime
async def test_a_rival_is_named_once_and_fought_at_the_longest_pause_only() -> None:
    """One error with an example; a new registration each 30 s, however often it is looked."""
    compared = Compared()
    compared.listed = dict(FOREIGN)
    await compared.look(90, pause_seconds=1.0)
    assert [event for event, _ in compared.events()] == ["plugin.not_listed", "plugin.rival"]
    status = compared.servers[0].status
    assert status.rival == (
        "another plugin offers nvidia.com/gpu as well: 2 ids that are not the agent's, e.g. x; "
        "remove one of the two"
    )
    assert status.last_error.endswith(status.rival)
    assert compared.again() == 3


@pytest.mark.looptime
async def test_two_that_take_turns_are_one_line() -> None:
    """Our own turn does not end the complaint about the other; half a minute without it does."""
    compared = Compared()
    for listed in (FOREIGN, OURS) * 4:
        compared.listed = dict(listed)
        await compared.look(2)
    assert [event for event, _ in compared.events()].count("plugin.rival") == 1
    status = compared.servers[0].status
    assert status.last_error == status.rival != ""
    compared.listed = dict(OURS)
    await compared.look(20)
    assert (status.rival, status.last_error) == ("", "")


@pytest.mark.looptime
async def test_when_the_rival_has_gone_the_long_pause_is_not_waited_for() -> None:
    """It took us down by leaving (kubelet §3), and there is no rival to fight with."""
    compared = Compared()
    compared.listed = dict(FOREIGN)
    await compared.look(2)
    compared.listed = {}
    await compared.look(2)
    assert compared.again() == 2
    assert compared.servers[0].status.rival == ""


@pytest.mark.looptime
async def test_a_rival_beside_all_our_ids_is_told_and_not_fought() -> None:
    """Another configuration of the same GPUs: more ids than ours."""
    compared = Compared()
    compared.listed[GPU] = OURS[GPU] | {"a::1"}
    await compared.look(2)
    assert ([event for event, _ in compared.events()], compared.again()) == (["plugin.rival"], 0)


@pytest.mark.looptime
async def test_each_resource_is_compared_for_itself() -> None:
    """The second server is not passed over because the first has trouble."""
    compared = Compared(FakeServer(), FakeServer(resource="nvidia.com/mig-1g.5gb"))
    compared.listed = {}
    await compared.look(2)
    assert (compared.again(0), compared.again(1)) == (1, 1)


@pytest.mark.looptime
async def test_an_error_of_another_kind_stays() -> None:
    """A complete list is no evidence that a refused Allocate is over."""
    compared = Compared()
    compared.listed = {}
    await compared.look(2)
    compared.servers[0].status.last_error = "Allocate: no"
    compared.listed = dict(OURS)
    await compared.look(1)
    assert compared.servers[0].status.last_error == "Allocate: no"


@pytest.mark.looptime
@pytest.mark.parametrize(("restarted", "calls"), [(False, 1), (True, 2)])
async def test_a_kubelet_that_does_not_tell_is_asked_once(*, restarted: bool, calls: int) -> None:
    """The next kubelet may be a newer one, so that is asked again."""
    compared = Compared()
    compared.error = AllocatableUnsupportedError("too old")
    await compared.look(3)
    compared.kubelet.restarts_seen += restarted
    assert await compared.look(3) == [False, False, False]
    assert (compared.calls, compared.again(), compared.events()) == (calls, 0, [])


@pytest.mark.looptime
async def test_a_question_without_an_answer_proves_nothing() -> None:
    """A busy kubelet, a timeout: nothing is registered again,
    and it is asked again at the next pass.
    """
    compared = Compared()
    compared.error = KubeletError("busy")
    await compared.look(3)
    assert (compared.calls, compared.again(), compared.events()) == (3, 0, [])
