"""The plugin servers: one for each resource that the ledger offers,
started and stopped as resources come and go.

Called by `composition` at start, on every new inventory and at the end; by `reload` after a change
of settings. A resource whose list would not fit into the kubelet's message is withheld with a
reason instead of being registered and dropped again and again (kubelet §10).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Revision, first_of
from vgpu_agent.errors import OfferError
from vgpu_agent.kubelet.codec import check_budget
from vgpu_agent.kubelet.server import DevicePlugin
from vgpu_agent.nodes import SentCounts
from vgpu_agent.status import Withheld

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vgpu_agent.allocation.allocator import Allocator
    from vgpu_agent.concurrency import Supervisor
    from vgpu_agent.journal import Journal
    from vgpu_agent.kubelet.directory import DirectoryWatch
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Resource
    from vgpu_agent.status import PluginStatus

# When the stream of a resource ends, the kubelet disconnects its client of the plugin server and
# marks the ids Unhealthy. This is how long after the end a busy kubelet may do so; it has no client
# to disconnect where `Offering.unlink` works. Only the hand-over to the next agent waits for this.
UNLINK_SECONDS = 1.0
# The longest time for the registrations of `unlink`, which are to fail: each makes the kubelet
# forget its client, so that the end of the stream has no consequence. A kubelet needs milliseconds;
# one that needs longer than this must not delay the hand-over.
_UNLINK_LIMIT_SECONDS = 5.0
# The longest time until an agent whose successor is gone has registered again.
_AGAIN_SECONDS = 3.0


def check_offer(resources: Iterable[Resource]) -> None:
    """Make sure that every resource's list fits into one message.

    Raises:
        OfferError: some do not; one sentence each, with the number of replicas that would fit
            (kubelet V13).
    """
    reasons: dict[str, str] = {}
    for resource in resources:
        try:
            check_budget(resource)
        except OfferError as err:
            reasons |= err.reasons
    if reasons:
        raise OfferError(reasons)


class Offering:
    """The running plugin servers.

    State: one `DevicePlugin` and one supervised task for each offered resource that fits, and a
    timer for each one that is withheld temporarily: only after ``error_after_seconds`` is that
    logged as an error. Changes come one at a time, because a server takes seconds to drain, and a
    second change in between would start what the first has yet to stop.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        allocator: Allocator,
        directory: DirectoryWatch,
        supervisor: Supervisor,
        journal: Journal,
        error_after_seconds: float,
    ) -> None:
        """Build it without a server.

        Args:
            ledger: has the offered resources.
            allocator: answers the kubelet's calls.
            directory: the kubelet's directory with the sockets.
            supervisor: runs the servers.
            journal: receives what is withheld, and why.
            error_after_seconds: the time after which a temporary withholding is logged as an error.
        """
        self._ledger = ledger
        self._allocator = allocator
        self._directory = directory
        self._supervisor = supervisor
        self._journal = journal
        self._error_after_seconds = error_after_seconds
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._plugins: dict[str, DevicePlugin] = {}
        self._changing = asyncio.Lock()
        self._closed = False  # true while no server is to be started
        # advances with each list that the kubelet is sent, and each stream that ends
        self.lists_sent = Revision()
        # while it is not set, plugin servers get ready, but do not register
        self.may_register = asyncio.Event()
        self.may_register.set()
        self.withheld: dict[str, str] = {}  # resource → why it is not offered
        self.blocked: dict[str, str] = {}  # family → why its resources must not be served now
        # each returns why a resource must not be served now; `sync` asks again
        self.gates: list[Callable[[Resource], Withheld | None]] = []
        self._refused: dict[str, str] = {}  # resource → why its family cannot offer it
        # resource → what is odd about it, although it is served
        self.cautions: dict[str, str] = {}

    @property
    def statuses(self) -> tuple[PluginStatus, ...]:
        """Return one status for each plugin server, by resource."""
        return tuple(self._plugins[name].status for name in sorted(self._plugins))

    @property
    def counts_sent_while_shared(self) -> dict[str, SentCounts]:
        """Resource → the counts of ids that the kubelet was last sent over a stream that is open;
        nothing where one family has all GPUs for itself.
        """
        if len({plugin.resource.family for plugin in self._plugins.values()}) < 2:
            return {}
        return {
            name: SentCounts(
                listed=plugin.status.ids_sent,
                healthy=plugin.status.healthy_sent,
                # the kubelet keeps some ids a moment longer, for pods that schedulers have bound
                # by an earlier count
                offered=min(plugin.status.healthy_sent, self._ledger.offered_ids(name)),
            )
            for name, plugin in self._plugins.items()
            # with a fault, the kubelet may have another list
            if plugin.last_sent is not None and not plugin.status.list_fault
        }

    @property
    def registered_once(self) -> bool:
        """Tell whether every plugin server has registered, and there is at least one."""
        return bool(self._plugins) and all(
            plugin.status.registrations for plugin in self._plugins.values()
        )

    @property
    def plugins(self) -> tuple[DevicePlugin, ...]:
        """The plugin servers, whose lists `advertised` compares with those that the kubelet has."""
        return tuple(self._plugins.values())

    def has_task(self, name: str) -> bool:
        """Tell whether ``name`` is the supervised task of a plugin server."""
        return name in map(_task, self._plugins)

    async def sync(self) -> None:
        """Run exactly the plugin servers that the ledger's offers call for."""
        async with self._changing:
            if not self._closed:
                await self._sync()

    async def until_listed(self, seconds: float) -> None:
        """Wait until every plugin server has sent its list to the kubelet, at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(plugin.last_sent is None for plugin in self._plugins.values()):
                    await self.lists_sent.newer_than(self.lists_sent.version)

    def withhold(self, resource: str, why: Withheld) -> None:
        """Log once, and show in the readiness, why ``resource`` is not offered,
        until a `sync` finds that it can be.
        """
        if not why.temporary:
            self._end_wait(resource)
        elif resource not in self._waiting:
            self._waiting[resource] = asyncio.get_running_loop().call_later(
                self._error_after_seconds, self._complain, resource
            )
        if self.withheld.get(resource) != why.reason:
            self.withheld[resource] = why.reason
            self._journal.record(
                "plugin.withheld",
                level="info" if why.temporary else "error",
                resource=resource,
                reason=why.reason,
            )

    def _complain(self, resource: str) -> None:
        """Log that a resource is still withheld although what it waits for should have come."""
        reason = f"{self.withheld[resource]}, for {self._error_after_seconds:g} s now"
        self._journal.record("plugin.withheld", level="error", resource=resource, reason=reason)

    def _end_wait(self, resource: str) -> None:
        if timer := self._waiting.pop(resource, None):
            timer.cancel()

    def caution(self, resource: str, text: str) -> None:
        """Log once, and show among the cautions, what is odd about a resource that is offered all
        the same; an empty text clears it.
        """
        if not text:
            self.cautions.pop(resource, None)
        elif self.cautions.get(resource) != text:
            self.cautions[resource] = text
            self._journal.record("config.caution", level="warning", problem=text)

    def refuse(self, resource: str, reason: str) -> None:
        """Withhold a resource that the families cannot offer, until `accept` is called for it."""
        self._refused[resource] = reason
        self.withhold(resource, Withheld(reason))

    def accept(self, resources: Iterable[str]) -> None:
        """Note that ``resources`` can be offered (again)."""
        for resource in resources:
            self._refused.pop(resource, None)

    async def stop(self) -> None:
        """Drain every plugin server for good; containers go on, and their ids stay theirs."""
        self._close()
        async with self._changing:
            await self._stop(list(self._plugins))

    async def unlink(self, resources: Collection[str]) -> bool:
        """End the streams of ``resources`` so that the kubelet keeps the healthy ids, and tell
        whether it does: a registration that fails makes it forget its client before. The agent goes
        on answering calls. Nothing new is offered before `serve_again`.

        The streams of resources for which it does not work stay open until `hand_over`.
        """
        self._close()
        async with self._changing:
            plugins = [
                each
                for name, each in self._plugins.items()
                if name in resources and each.is_registered
            ]
            try:
                async with asyncio.timeout(_UNLINK_LIMIT_SECONDS):
                    done = await asyncio.gather(*(plugin.unlink() for plugin in plugins))
            except TimeoutError:
                return False
            unlinked = [plugin for plugin, is_done in zip(plugins, done, strict=True) if is_done]
            if not unlinked:
                return False
            await asyncio.gather(*(plugin.end_streams() for plugin in unlinked))
            # The kubelet closes the connection when it marks the ids Unhealthy.
            return not await first_of(
                # longer than `first_of` waits, so that only a closed connection ends one
                *(plugin.until_disconnected(2 * UNLINK_SECONDS) for plugin in unlinked),
                timeout_seconds=UNLINK_SECONDS,
            )

    async def serve_again(self) -> None:
        """Undo `unlink`, because the successor is gone: register again, and wait a moment for it,
        so that the kubelet notices the end of this agent.
        """
        self._closed = False
        for plugin in self._plugins.values():
            plugin.register_after_unlink("the agent that was about to take over is gone")
        await self.sync()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_SECONDS):
                while not all(plugin.status.stream_open for plugin in self._plugins.values()):
                    await self.lists_sent.newer_than(self.lists_sent.version)

    async def hand_over(self) -> None:
        """Let go of every resource for good; return when another agent can register them. The
        servers end by themselves afterwards.
        """
        self._close()
        async with self._changing:
            await asyncio.gather(*(plugin.hand_over() for plugin in self._plugins.values()))

    async def _sync(self) -> None:
        wanted = {
            resource.name: resource
            for resource in self._ledger.resources
            if self._may_be_served(resource)
        }
        stale = [
            name
            for name, plugin in self._plugins.items()
            if name not in wanted or _options(wanted[name]) != _options(plugin.resource)
        ]
        await self._stop(stale)
        self.withheld = {
            name: reason
            for name, reason in self.withheld.items()
            if any(item.name == name for item in self._ledger.resources)
        } | self._refused
        for name in self._waiting.keys() - self.withheld.keys():
            self._end_wait(name)
        if self._closed:
            return
        for name in wanted.keys() - self._plugins.keys():
            plugin = self._plugins[name] = DevicePlugin(
                wanted[name],
                backend=self._allocator,
                directory=self._directory,
                journal=self._journal,
                lists_revision=self.lists_sent,
                may_register=self.may_register,
            )
            self._supervisor.start(_task(name), plugin.run)
        served = {plugin.resource.family for plugin in self._plugins.values()}
        # Families without a server get no turns: no returned GPU is offered to one of them alone.
        self._ledger.withhold({resource.family for resource in self._ledger.resources} - served)

    def _close(self) -> None:
        self._closed = True
        for resource in list(self._waiting):
            self._end_wait(resource)

    async def _stop(self, names: list[str]) -> None:
        stopping = [self._plugins.pop(name) for name in names]
        await asyncio.gather(*(plugin.stop() for plugin in stopping))
        for name in names:
            await self._supervisor.stop(_task(name))

    def _may_be_served(self, resource: Resource) -> bool:
        """Tell whether the resource may be served now; if not, withhold it with the reason."""
        if reason := self.blocked.get(resource.family):
            self.withhold(resource.name, Withheld(reason))
            return False
        if why := next((why for gate in self.gates if (why := gate(resource))), None):
            self.withhold(resource.name, why)
            return False
        try:
            check_budget(resource)
        except OfferError as err:
            self.withhold(resource.name, Withheld(err.reasons[resource.name]))
            return False
        self.withheld.pop(resource.name, None)
        self._end_wait(resource.name)
        return True


def _options(resource: Resource) -> tuple[bool, bool]:
    """Return the options that the kubelet receives once, when the resource is registered: whether
    it calls PreStartContainer, and whether GetPreferredAllocation.
    """
    return resource.pre_start_required, resource.offers_preference


def _task(resource: str) -> str:
    return f"plugin {resource}"
