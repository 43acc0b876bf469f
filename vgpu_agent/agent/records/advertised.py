"""Check that the kubelet lists as allocatable the ids that it received:
the only way to notice that another plugin has taken a resource from us.

The kubelet keeps one list of ids for each resource name: the last that arrived. When any plugin's
stream of that name ends, it removes whichever plugin is registered (kubelet §3). So a second plugin
that comes and goes leaves us with an open stream, no error, and an allocatable of 0. Called by
`verification` in each pass, which asks pod-resources what can be allocated.

Nothing is done at the first difference, because a list may be on its way. If the second comparison
finds one as well, it is reported, and where ids of ours are missing, the plugin server registers
again. The pauses between such registrations double while they do not help. While another plugin is
there the longest pause applies at once: for pods, two plugins that keep taking the resource from
each other are worse than one that backs off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from vgpu_agent import log
from vgpu_agent.concurrency import Backoff
from vgpu_agent.errors import KubeletError
from vgpu_agent.kubelet import server
from vgpu_agent.kubelet.pod_resources import AllocatableUnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vgpu_agent.journal import Journal
    from vgpu_agent.kubelet.held_ids import SeenNumbers
    from vgpu_agent.kubelet.plugin import SentList
    from vgpu_agent.kubelet.pod_resources import PodResources
    from vgpu_agent.status import KubeletStatus, PluginStatus

_logger = log.get(__name__)

# A list that was sent more recently may still be on its way into the kubelet's records.
_SETTLING_SECONDS = 3.0
_SHORTEST_PAUSE_SECONDS = 2.0  # between two new registrations of one resource
_NOT_LISTED = (
    "the kubelet does not list the agent's ids: another plugin registered this resource, or the "
    "connection was lost"
)


class Server(Protocol):
    """The plugin server that is compared; `kubelet.server.DevicePlugin` implements it."""

    status: PluginStatus

    @property
    def last_sent(self) -> SentList | None:
        """The list last sent to the kubelet over a stream that is still open."""

    def register_again(self, reason: str) -> None:
        """End the current registration and make a new one; ``reason`` is for people."""


class _History(msgspec.Struct):
    """The history of one resource; times are the loop's, in seconds.

    Attributes:
        doubted: a difference was found, and nothing has been done about it yet.
        backoff: gives the next ``pause_seconds``.
        fine_since: since when there has been no difference; None while there is one, or before the
            first comparison.
        registered_again_at: when a new registration was last made; minus infinity for never.
        pause_seconds: the shortest time between the last new registration and the next.
    """

    backoff: Backoff
    doubted: bool = False
    fine_since: float | None = None
    registered_again_at: float = float("-inf")
    pause_seconds: float = 0.0


class ListedIds:
    """The comparison of the kubelet's list with ours; acts on a difference.

    State: the history of each resource, and whether this kubelet reports its list at all. A restart
    of the agent begins with new registrations, so nothing is lost with it.
    """

    def __init__(
        self,
        *,
        servers: Callable[[], Iterable[Server]],
        pod_resources: PodResources,
        kubelet_status: KubeletStatus,
        journal: Journal,
    ) -> None:
        self._servers = servers
        self._pod_resources = pod_resources
        # `RETRY_MAX_SECONDS`: the server's own longest pause between attempts to register
        self._longest_pause_seconds = max(server.RETRY_MAX_SECONDS, _SHORTEST_PAUSE_SECONDS)
        self._kubelet_status = kubelet_status
        self._journal = journal
        self._histories: dict[str, _History] = {}
        # the number of kubelet restarts seen (`restarts_seen`) when a kubelet was met that cannot
        # report its list: none is asked again before the next restart; None without such a kubelet
        self._silent_kubelet: int | None = None

    async def compare(self) -> bool:
        """Compare once, with at most one call to pod-resources;
        tell whether a second comparison should follow soon.
        """
        servers = [server for server in self._servers() if server.last_sent is not None]
        # resource → our ids in that list, for the compact form of the kubelet's (`SeenNumbers`)
        offered = {
            server.status.resource: sent.offered for server in servers if (sent := server.last_sent)
        }
        if not servers or self._silent_kubelet == self._kubelet_status.restarts_seen:
            return False
        try:
            listed = await self._pod_resources.allocatable(offered)
        except AllocatableUnsupportedError as err:
            self._silent_kubelet = self._kubelet_status.restarts_seen
            _logger.debug("kubelet.allocatable_unsupported", reason=str(err))
            return False
        except KubeletError as err:
            # the reading of the records uses the same socket, and reports its failure
            _logger.debug("kubelet.allocatable_unknown", reason=str(err))
            return False
        names = {server.status.resource for server in servers}
        self._histories = {
            name: history for name, history in self._histories.items() if name in names
        }
        # Each is looked at, so no short cut with any().
        return True in [
            self._look(server, listed.get(server.status.resource, frozenset()))
            for server in servers
        ]

    def _look(self, server: Server, listed: frozenset[str] | SeenNumbers) -> bool:
        """Compare the kubelet's list with the one sent; tell whether to look again soon.
        Where the ids of the resource differ in a number only, ``listed`` has just the numbers
        (`SeenNumbers`).
        """
        status, sent = server.status, server.last_sent
        history = self._histories.setdefault(
            status.resource, _History(Backoff(_SHORTEST_PAUSE_SECONDS, self._longest_pause_seconds))
        )
        if sent is None or sent.seconds_ago < _SETTLING_SECONDS:
            history.doubted = False
            return False
        # the number of our ids that are not listed, and the listed ids that are not ours
        missing, strangers = sent.differences(listed)
        if not missing and not strangers:
            self._note_fine(status, history)
            return False
        history.fine_since = None
        if not history.doubted:
            history.doubted = True
            return True
        self._note_difference(status, missing, strangers)
        if missing:
            self._register_again(server, history)
        return False

    def _register_again(self, server: Server, history: _History) -> None:
        now = asyncio.get_running_loop().time()
        pause_seconds = (
            self._longest_pause_seconds if server.status.rival else history.pause_seconds
        )
        if now - history.registered_again_at < pause_seconds:
            return
        history.registered_again_at, history.pause_seconds, history.doubted = (
            now,
            history.backoff.pause(),
            False,
        )
        # the fault in words: our ids are missing (`not_listed`), there are another plugin's
        # (`rival`), or both
        server.register_again(server.status.list_fault)

    def _note_difference(
        self, status: PluginStatus, missing: int, strangers: Collection[str]
    ) -> None:
        before, was_listed = status.list_fault, not status.not_listed
        status.not_listed = _NOT_LISTED if missing else ""
        if missing and was_listed:
            self._journal.record(
                "plugin.not_listed",
                level="warning",
                resource=status.resource,
                missing=missing,
                reason=_NOT_LISTED,
            )
        rival = ""
        if strangers:
            rival = (
                f"another plugin offers {status.resource} as well: {len(strangers)} ids that are "
                f"not the agent's, e.g. {min(strangers)}; remove one of the two"
            )
        if rival and rival != status.rival:
            self._journal.record(
                "plugin.rival", level="error", resource=status.resource, reason=rival
            )
        status.rival = rival
        _show(status, before)

    def _note_fine(self, status: PluginStatus, history: _History) -> None:
        """Note that the kubelet lists all our ids and no others. While that stays so, the text
        about another plugin (`rival`) is shown for the longest pause, because two plugins may take
        the resource from each other alternately.
        """
        now = asyncio.get_running_loop().time()
        history.doubted = False
        if history.fine_since is None:
            history.fine_since = now
        before, status.not_listed = status.list_fault, ""
        if now - history.fine_since >= self._longest_pause_seconds:
            status.rival = ""
            history.pause_seconds = 0.0
            history.backoff.reset()
        _show(status, before)


def _show(status: PluginStatus, before: str) -> None:
    """Make the fault in the kubelet's list the last error. When the fault is over, an error of
    another kind stays; ``before``, the fault so far, is removed.
    """
    if status.list_fault != before and (status.list_fault or status.last_error == before):
        status.last_error = status.list_fault
