"""The agent's connection to the driver:
opened, asked, closed and opened again, always in the one thread that owns NVML (`thread`).

NVML fixes the set of cards when it is initialised, so a card that was pulled or plugged in shows
only after a shutdown and a new initialisation, which also voids every handle and the event queue.
This class owns all three, so that no other code holds a void one.

`watch` sends its methods to `thread.NvmlThread` as jobs; `wait` runs there between jobs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import inventory, mig, topology
from vgpu_agent.gpu.capabilities import Capabilities
from vgpu_agent.model import GpuUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vgpu_agent.gpu.nvml import DeviceEvent, EventSet, Handle, Nvml
    from vgpu_agent.model import Link


# events read in a row: a card that reports faster must not keep the agent from the other cards
_MAX_EVENTS_IN_A_ROW = 1000


class Snapshot(msgspec.Struct, frozen=True):
    """The result of one reading of the driver.

    Attributes:
        reading: the GPUs.
        links: the UUIDs of two GPUs that answer → the link between them; None when the GPUs are
            those of the last snapshot.
        driven_cards: PCI addresses of the cards that the kernel module drives, from sysfs; empty
            where that cannot be read. If they change, a card came or went, and the driver is
            reopened.
        warnings: what had to be left out, one sentence each, reported once.
        driver_version: e.g. ``580.65.06``.
        cuda_version: e.g. ``13.0``.
        simulated: the NVML library is the simulator's.
        nvml_version: e.g. ``13.580.65.06``; empty where the driver does not say.
    """

    reading: inventory.Reading
    links: dict[tuple[str, str], Link] | None
    driven_cards: frozenset[str]
    warnings: tuple[str, ...]
    driver_version: str
    cuda_version: str
    simulated: bool
    nvml_version: str = ""


class Session:
    """The driver, open or closed.

    State: NVML's initialisation, the handles of the last reading and one event set; all of it ends
    with the process, and nothing of it is worth keeping.
    """

    def __init__(
        self,
        nvml: Nvml,
        *,
        driver_root: Path,
        sysfs_root: Path,
        proc_root: Path,
        report: Callable[[DeviceEvent], None],
    ) -> None:
        """Begin closed.

        Args:
            nvml: the driver.
            driver_root: where it is installed.
            sysfs_root: where sysfs is mounted.
            proc_root: where procfs is mounted.
            report: takes the events that come while GPUs are read; called in the
                NVML thread.
        """
        self._nvml = nvml
        self._report = report
        self._driver_root = driver_root
        self._numa = inventory.NumaNodes(sysfs_root)
        # the numbers of the device nodes that give access to MIG instances
        self._capabilities = Capabilities(proc_root)
        self._driver_directory = sysfs_root / "bus" / "pci" / "drivers" / "nvidia"
        self._open = False
        self._events: EventSet | None = None
        # UUIDs of the GPUs that are registered for events, or that report no XIDs
        self._registered: set[str] = set()
        # UUID → why the last registration failed; it is tried again with the next reading
        self._unregistered: dict[str, str] = {}
        self._handles: dict[str, Handle] = {}
        # Of the last reading, by UUID. None for a GPU that was not settled: it was being divided
        # again. Each MIG device that a GPU has is a slot of its layout.
        self._layouts: dict[str, mig.Layout | None] = {}
        # UUID → the sentences about its MIG instances that were true at the last reading
        self._mig_troubles: dict[str, tuple[str, ...]] = {}
        # UUID and PCI address of the GPUs whose links were read last
        self._links_of: frozenset[tuple[str, str]] | None = None

    def read(self, *, reopen: bool = False) -> Snapshot:
        """Open the driver if it is not open, and read everything.

        Args:
            reopen: report the queued events and close the driver first, to see cards that came or
                went.

        Raises:
            DriverMissingError: the driver is not there (any more); the next call tries again.
            NvmlError: the driver is there but cannot even count its GPUs.
        """
        if reopen:
            self._pass_on_events()
            self.close()
        self._ensure_open()
        reading = inventory.read(  # `between` is called before each GPU
            self._nvml, self._numa, self._capabilities, between=self._pass_on_events
        )
        warnings = [*reading.warnings, *self._listen(reading), *self._news_of_instances(reading)]
        self._handles = {card.gpu.uuid: card.handle for card in reading.cards}
        self._layouts = {
            card.gpu.uuid: card.mig.layout if card.mig.settled else None for card in reading.cards
        }
        links = self._read_links(reading, warnings)
        return Snapshot(
            reading=reading,
            links=links,
            driven_cards=self._driven_cards(),
            warnings=tuple(warnings),
            driver_version=self._nvml.driver_version(),
            nvml_version=self._nvml.nvml_version(),
            cuda_version=self._nvml.cuda_version(),
            simulated=self._nvml.simulated,
        )

    def names(self) -> tuple[str, ...]:
        """Return the product names of all GPUs, in NVML's order.

        Raises:
            AgentError: as `read`, also when a single GPU does not answer.
        """
        self._ensure_open()
        return tuple(
            self._nvml.name(self._nvml.handle(index)) for index in range(self._nvml.count())
        )

    def read_if_divided_anew(self) -> Snapshot | None:
        """Read everything if a GPU has other MIG instances than in the last reading,
        or another MIG mode; otherwise return None.

        Makes a few of the calls of a reading: one for a GPU that could be divided, about thirty for
        one with seven instances.

        Raises:
            AgentError: as `read`.
        """
        return self.read() if any(map(self._is_divided_anew, self._handles)) else None

    def usage(self) -> tuple[GpuUsage, ...]:
        """Return the load of each GPU that answered last time; a GPU that fails now is left out."""
        usages: list[GpuUsage] = []
        for uuid, handle in self._handles.items():
            with contextlib.suppress(NvmlError):  # the next poll finds the error
                usages.append(self._usage(uuid, handle))
        return tuple(usages)

    def handle(self, uuid: str) -> Handle | None:
        """Return the handle of a GPU that answered last time; None for any other."""
        return self._handles.get(uuid)

    def wait(self, timeout_seconds: float) -> DeviceEvent | None:
        """Return the next event of any GPU; None when none came in time.

        Raises:
            NvmlError: the queue is broken.
        """
        if self._events is None:
            return None
        return self._nvml.wait(self._events, timeout_seconds)

    @property
    def listening(self) -> bool:
        """Tell whether there is an event queue; without one `wait` returns at once."""
        return self._events is not None

    def close(self) -> None:
        """Release the driver, whatever it answers."""
        if self._events is not None:
            with contextlib.suppress(NvmlError):
                self._nvml.free_event_set(self._events)
        if self._open:
            with contextlib.suppress(NvmlError):
                self._nvml.shutdown()
        self._events, self._open = None, False
        self._registered.clear()
        self._unregistered.clear()
        self._handles.clear()
        self._layouts.clear()
        self._links_of = None

    def _ensure_open(self) -> None:
        if not self._open:
            self._nvml.load(self._driver_root)
            self._open = True

    def _is_divided_anew(self, uuid: str) -> bool:
        before = self._layouts[uuid]
        if before is not None and not before.capable:  # the card does not support MIG at all
            return False
        self._pass_on_events()  # as between the GPUs of a reading
        try:
            return mig.look(self._nvml, self._handles[uuid]) != before or before is None
        except NvmlError:  # the next poll finds the error
            return False

    def _news_of_instances(self, reading: inventory.Reading) -> list[str]:
        """List the facts that instances failed to report, where that has changed."""
        troubles: dict[str, tuple[str, ...]] = {}
        for card in reading.cards:
            uuid = card.gpu.uuid
            # problem → the slots that have it; "?" where the driver does not list the slots
            slots: dict[str, list[str]] = (
                {card.mig.layout.unread_reason: ["?"]} if card.mig.layout.unread_reason else {}
            )
            for slot, problem in card.mig.failures:
                slots.setdefault(problem, []).append(slot.uuid or str(slot.index))
            troubles[uuid] = tuple(
                f"MIG instance {', '.join(names)} of {uuid}: {problem}"
                for problem, names in slots.items()
            )
        news = [
            text
            for uuid, texts in troubles.items()
            for text in texts
            if text not in self._mig_troubles.get(uuid, ())
        ]
        self._mig_troubles = troubles
        return news

    def _pass_on_events(self) -> None:
        """Report queued events: a slow driver takes minutes for a reading,
        and an XID must not wait for its end.
        """
        with contextlib.suppress(NvmlError):  # the next wait finds the error
            for _ in range(_MAX_EVENTS_IN_A_ROW):
                event = self.wait(0)
                if event is None:
                    return
                self._report(event)

    def _listen(self, reading: inventory.Reading) -> list[str]:
        """Register the cards for events that are not registered yet. A card without events is only
        polled (nvidia §10.5). After an error it is tried again with the next reading.
        """
        new = [card for card in reading.cards if card.gpu.uuid not in self._registered]
        if not new:
            return []
        warnings: list[str] = []
        failed: dict[str, str] = {}
        for card in new:
            uuid = card.gpu.uuid
            try:
                if self._events is None:
                    self._events = self._nvml.create_event_set()
                reports_xids = self._nvml.register(card.handle, self._events)
            except NvmlError as err:
                failed[uuid] = str(err)
                if self._unregistered.get(uuid) != str(err):
                    warnings.append(
                        f"the XIDs of {uuid} are not seen until the driver accepts its "
                        f"registration for events, which is tried again: {err}"
                    )
                continue
            self._registered.add(uuid)
            if not reports_xids:
                warnings.append(f"{uuid} is polled only, because it does not report XIDs")
        self._unregistered = failed
        return warnings

    def _read_links(
        self, reading: inventory.Reading, warnings: list[str]
    ) -> dict[tuple[str, str], Link] | None:
        cards = frozenset((card.gpu.uuid, card.gpu.pci_bus_id) for card in reading.cards)
        if cards == self._links_of:
            return None
        links, troubles = topology.read_links(
            self._nvml, [(card.gpu, card.handle) for card in reading.cards]
        )
        warnings.extend(troubles)
        self._links_of = cards
        return links

    def _driven_cards(self) -> frozenset[str]:
        # `watched`: counts as a call in flight, since sysfs may hang like a driver call
        with self._nvml.watched("list PCI devices"):
            try:
                return frozenset(
                    entry.name
                    for entry in self._driver_directory.iterdir()
                    if entry.name.count(":") == 2
                )
            except OSError:  # no sysfs, or not the host's: then only NVML reports cards
                return frozenset()

    def _usage(self, uuid: str, handle: Handle) -> GpuUsage:
        total_mib, used_mib = self._nvml.memory_mib(handle)
        return GpuUsage(
            uuid=uuid,
            memory_used_mib=used_mib,
            memory_total_mib=total_mib,
            utilisation_percent=self._nvml.utilisation_percent(handle),
            temperature_celsius=self._nvml.temperature_celsius(handle),
            power_watts=self._nvml.power_watts(handle),
            ecc_uncorrected_total=self._nvml.ecc_uncorrected_total(handle),
            processes=self._nvml.processes(handle),
            instances_used_mib=tuple(self._instances_used_mib(uuid, handle)),
        )

    def _instances_used_mib(self, uuid: str, handle: Handle) -> Iterator[tuple[str, int]]:
        """Yield the instances of the GPU as they were read last, each with its memory in use; one
        that is gone, or does not report it, is left out.
        """
        layout = self._layouts.get(uuid)
        for slot in layout.slots if layout is not None else ():
            with contextlib.suppress(NvmlError):
                instance = self._nvml.mig_handle(handle, slot.index)
                if instance is not None and self._nvml.uuid(instance) == slot.uuid:
                    yield slot.uuid, self._nvml.memory_mib(instance)[1]
