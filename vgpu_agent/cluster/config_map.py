"""The ConfigMap in which clusters with volcano-vgpu-device-plugin keep its settings,
read where that plugin reads them.

Built by `agent`, which runs it as a supervised loop and passes the text to
`families.volcano_vgpu.files`. Nothing here interprets the text.

The namespaces are looked at in order, and the first that has the ConfigMap wins, even if it appears
there late: what a node offers must not depend on which of two ConfigMaps was there when its agent
started. So the first namespace is watched always, and a later one only while none before it has the
ConfigMap. Each watch is of one object by its name, which is all that the agent's role allows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.cluster import decode
from vgpu_agent.cluster.reflector import Reflector, Scope
from vgpu_agent.concurrency import Latest, Versions
from vgpu_agent.log import ChangeFilter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.cluster.reflector import Source
    from vgpu_agent.journal import Journal
    from vgpu_agent.status import WatchStatus

_FORBIDDEN = 403


class ConfigMapWatch:
    """The value of one key of a ConfigMap, from the first of some namespaces that has it.

    Attributes:
        text: the value of the key; empty where the ConfigMap has no such key, which is a mistake;
            None while there is no such ConfigMap, and before the first answer.
        namespace: where ``text`` is from; empty for nowhere.
        synced: it is known where ``text`` is from, or that there is none.
        name: the ConfigMap's name.
        expected_in: the namespace in which the operator says that it is; empty if none was named.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        key: str,
        *,
        namespaces: Sequence[str],
        journal: Journal,
        expected_in: str = "",
    ) -> None:
        """Build it.

        Args:
            source: gives the lists and watches of the API server.
            name: the ConfigMap's name.
            key: the key in it.
            namespaces: where it is searched, in order; at least one.
            journal: records the ConfigMap's place, its faults and failing watches.
            expected_in: see the class; one of ``namespaces``, or empty.
        """
        self.text: Latest[str | None] = Latest(None)
        self.namespace = ""
        self.synced = asyncio.Event()
        self.name, self._key = name, key
        self.expected_in = expected_in
        self._journal = journal
        self._changes = ChangeFilter()  # lets a report pass if it differs from the last one
        # Each has a `Reflector`, the loop of its watch. Its `trouble` is the error of the last list
        # or watch, None when all is well.
        self._places = [_Place(source, namespace, name, journal) for namespace in namespaces]
        for place in self._places:
            # In one of the usual namespaces the role may be missing; in the one that was asked for
            # that is a mistake, which the readiness check shows: it looks at the watches that are
            # `essential`.
            place.reflector.status.essential = place.namespace == expected_in

    @property
    def statuses(self) -> dict[str, WatchStatus]:
        """The state of each watch, by namespace;
        a later namespace is not watched while an earlier one has the ConfigMap.
        """
        return {place.namespace: place.reflector.status for place in self._places}

    @property
    def longest_silence_seconds(self) -> float:
        """The longest time between two heartbeats of a healthy `run`, for
        ``Supervisor.start(stuck_after_seconds=…)``.
        """
        return self._places[0].reflector.longest_silence_seconds

    async def run(self, beat: Callable[[], None]) -> None:
        """Keep ``text`` up to date, until cancelled; ``beat`` sends a heartbeat."""
        async with asyncio.TaskGroup() as group:
            tasks: dict[str, asyncio.Task[None]] = {}
            while True:
                # taken first, so that no change is missed
                versions = Versions(
                    *(
                        latest
                        for place in self._places
                        for latest in (place.found, place.reflector.trouble)
                    )
                )
                for place in self._wanted():
                    if place.namespace not in tasks:
                        tasks[place.namespace] = group.create_task(
                            place.reflector.run(beat), name=f"config map in {place.namespace}"
                        )
                for place in self._places[len(self._wanted()) :]:
                    if place.namespace in tasks:
                        tasks.pop(place.namespace).cancel()
                        place.forget()
                if self._settled():
                    self._publish()
                # until one of them has a newer version
                await versions.passed(timeout_seconds=self.longest_silence_seconds)

    def _wanted(self) -> list[_Place]:
        """The places to watch: all up to the first that has the ConfigMap."""
        for number, place in enumerate(self._places):
            if place.found.value:
                return self._places[: number + 1]
        return self._places

    def _settled(self) -> bool:
        """Tell whether it is known which namespace has the ConfigMap, if any does: each watched
        place has answered, or may not be read.
        """
        return all(place.found.value is not None or place.forbidden for place in self._wanted())

    def _publish(self) -> None:
        place = self._wanted()[-1]
        found = place.found.value or {}
        text = found.get(self._key)
        self.namespace = place.namespace if found else ""
        self._report_place()
        if found and text is None:
            where = f"{self.namespace}/{self.name}"
            error = (
                f"the ConfigMap {where} has no key {self._key!r}; add it, or delete the ConfigMap"
            )
            self._journal.record(
                "cluster.config_map_without_key", level="warning", config_map=where, error=error
            )
            text = ""
        if text != self.text.value:
            self.text.publish(text)
        self.synced.set()

    def _report_place(self) -> None:
        """Report where the ConfigMap is, once and whenever it changes.
        Without one, report the places that may not be read.
        """
        hidden = (
            ()
            if self.namespace
            else tuple(place.namespace for place in self._places if place.forbidden)
        )
        if not self._changes.is_new("place", (self.namespace, hidden)):
            return
        if self.namespace:
            self._journal.record("cluster.config_map", config_map=f"{self.namespace}/{self.name}")
        else:
            self._journal.record(
                "cluster.no_config_map",
                level="warning" if hidden else "info",
                namespaces=[place.namespace for place in self._places if not place.forbidden],
                forbidden_namespaces=list(hidden),
                in_force="the agent's own settings",
                remedy=(
                    (
                        f"if there is a {self.name} in {' or '.join(hidden)}, allow to read it "
                        "(components/volcano)"
                    )
                    if hidden
                    else ""
                ),
            )


class _Place:
    """One namespace: the receiver (`reflector.Sink`) of what its watch sees, which keeps the texts
    of the ConfigMap there.

    ``found`` is the data of the ConfigMap (key → text); None before the first answer, and an empty
    mapping when there is no such ConfigMap.
    """

    def __init__(self, source: Source, namespace: str, name: str, journal: Journal) -> None:
        self.namespace = namespace
        self.found: Latest[Mapping[str, str] | None] = Latest(None)
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        scope = Scope.single(f"ConfigMap {namespace}/{name}", path, name)
        # In a namespace that is not used for this, the role is missing, and `ConfigMapWatch`
        # reports it when it matters.
        self.reflector = Reflector(
            source,
            scope,
            decode.config_map,
            self,
            journal=journal,
            expected=(_FORBIDDEN,),  # the HTTP statuses that it does not log
            from_cache=False,
        )

    @property
    def forbidden(self) -> bool:
        """Tell whether the agent's role may not read there.
        In a namespace without this ConfigMap that is expected.
        """
        trouble = self.reflector.trouble.value
        return trouble is not None and trouble.status == _FORBIDDEN

    def forget(self) -> None:
        """Forget what was seen: without a watch it may be outdated."""
        self.found.publish(None)
        self.reflector.forget()

    def replace(self, items: Iterable[Mapping[str, str]]) -> None:
        self._take(next(iter(items), None))

    def put(self, item: Mapping[str, str]) -> None:
        self._take(item)

    def remove(self, _: Mapping[str, str]) -> None:
        self._take(None)

    def _take(self, texts: Mapping[str, str] | None) -> None:
        # The extra entry tells a ConfigMap without any key from no ConfigMap.
        found = {} if texts is None else {"": "", **texts}
        if self.found.value != found:
            self.found.publish(found)
