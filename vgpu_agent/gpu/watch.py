"""Watching the node's GPUs: the entry of this package.

`GpuWatch` keeps two snapshots that any component may read or wait for: the GPUs and their health
(`inventory`), and their load (`usage`). It detects trouble in three ways, because each alone misses
some: events from the driver, a regular poll of every card, since a card can vanish without an
event, and calls that do not return. Between the polls it looks, more often and with few calls,
whether the MIG instances of a GPU have changed (`_look`).

Built and started by `agent`, which runs `run` under its supervisor and passes `inventory` to the
ledger and the plugin servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent import log
from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import AgentError, DriverMissingError, NvmlError, NvmlHungError
from vgpu_agent.gpu import changes
from vgpu_agent.gpu import inventory as inventories
from vgpu_agent.gpu import thread as nvml_thread
from vgpu_agent.gpu.health import NOT_LISTED, Healths, Probe, RecoveryPolicy
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.gpu.reopening import Reopening
from vgpu_agent.gpu.session import Session
from vgpu_agent.gpu.thread import Listener, NvmlThread
from vgpu_agent.gpu.xid import XidHistory, XidPolicy, describe, trouble_of
from vgpu_agent.model import GpuUsage, Inventory, Remedy
from vgpu_agent.status import NvmlState, NvmlStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.config.settings import Gpu as GpuSettings
    from vgpu_agent.config.settings import Recovery
    from vgpu_agent.gpu.nvml import CallInFlight, DeviceEvent
    from vgpu_agent.gpu.sampling import Sink
    from vgpu_agent.gpu.session import Snapshot
    from vgpu_agent.journal import Journal
    from vgpu_agent.model import Gpu, Link

_logger = log.get(__name__)

# How often every GPU is asked for its state in addition to waiting for events; a card can vanish
# silently.
POLL_SECONDS = 5.0
# The pause between two tries to find a driver, where one that is missing does not end the agent.
INIT_RETRY_SECONDS = 30.0
# A GPU whose call hangs for longer than this is Unhealthy.
HUNG_UNHEALTHY_SECONDS = 15.0
# The shortest pause before an early poll or look, as a part of the regular interval: a card may
# send a thousand events a second.
_SHORTEST_INTERVAL = 0.1
# New MIG instances reach the kubelet within two seconds (docs/architecture.md); this is the part
# until they are seen.
_MIG_LOOK_SECONDS = 1.0
_LOOK_PAUSES = 4.0  # the least pause after a look for MIG instances, in durations of that look
# The same XID of a GPU or MIG instance gets one entry in this time: a storm of XIDs must not push
# everything else out of the journal.
_XID_PAUSE_SECONDS = 10.0


class GpuWatch:
    """The agent's knowledge of its GPUs.

    State: the health of each GPU seen since the start, in memory only; after a restart the first
    reading decides on it anew. All methods but `_pass_on` are called on the event loop. Only the
    NVML thread (`thread`) calls the driver.
    """

    def __init__(
        self,
        settings: GpuSettings,
        journal: Journal,
        *,
        sysfs_root: str,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.inventory: Latest[Inventory] = Latest(Inventory())
        self.usage: Latest[tuple[GpuUsage, ...]] = Latest(())
        # unix seconds of the last reading (of the GPUs and their health) and measuring (of their
        # load) that succeeded, changed or not
        self.read_at = self.measured_at = 0.0
        self._settings = settings
        self._journal = journal
        self._beat = beat  # tells the supervisor that `run` runs
        self._status = NvmlStatus()
        self._nvml = Nvml()
        self._session = Session(
            self._nvml,
            driver_root=Path(settings.driver_root),
            sysfs_root=Path(sysfs_root),
            proc_root=Path(settings.proc_root),
            report=self._pass_on,
        )
        self._thread = NvmlThread(
            self._nvml,
            self._session,
            Listener(
                event=self._on_event,
                wait_failed=self._on_wait_failed,
                hung=self._on_hung,
                answering=self._on_answering,
                waiting=beat,  # while `run` waits for a long job of the thread
                not_sampled=self._on_not_sampled,
            ),
        )
        # the health of each GPU and MIG instance, from probes, events and hangs
        self._healths = Healths(_recovery_policy(settings.recovery), wall=time.time)
        self._history = XidHistory()  # the latest XIDs; `NvmlStatus.history` has the counts
        # by pairs of UUIDs: how near two GPUs are, over PCI and NVLink
        self._links: dict[tuple[str, str], Link] = {}
        # when to close and open the driver, by which alone it shows cards that came or went
        self._reopening = Reopening(interval_seconds=POLL_SECONDS)
        # of each XID event: when it was last recorded (monotonic), and how many were left out since
        self._xids: dict[DeviceEvent, tuple[float, int]] = {}
        # tells whether a problem is new or has changed, so that it is journalled once; `forget`
        # makes it new again. Its subjects: the ``driver``, the waiting for ``events`` and the
        # ``samples`` of processes' usage.
        self._problems = log.ChangeFilter()
        self._wake = asyncio.Event()
        # monotonic seconds; a look is that for other MIG instances (`_look`)
        self._polled_at = self._next_poll = self._next_usage = self._looked_at = self._next_look = (
            0.0
        )
        self.apply(settings)

    # ---- what `agent` calls

    async def start(self) -> None:
        """Open the driver and read the GPUs; afterwards `inventory` is filled.

        If that fails and ``failOnInitError`` is false, it returns with an empty inventory, and
        `run` tries again.

        Raises:
            DriverMissingError: no usable driver, and ``failOnInitError`` is true.
            NvmlHungError: the driver hangs, and ``failOnInitError`` is true.
        """
        self._thread.start()
        try:
            await self._poll()
        except AgentError as err:
            if not self._settings.fail_on_init_error:
                return
            self._thread.stop()
            if isinstance(err, NvmlError):
                raise DriverMissingError(
                    f"the NVIDIA driver does not list its GPUs: {err}; see dmesg"
                ) from err
            raise

    async def run(self) -> None:
        """Poll, measure and watch for hangs, until cancelled;
        a loop for the supervisor, which may start it again.
        """
        while True:
            self._beat()
            # calls `_on_hung` if the thread's call hangs, and `_on_answering` once it has returned
            self._thread.look()
            self._judge_hang()
            now = time.monotonic()
            if now >= self._next_poll:
                with contextlib.suppress(AgentError):  # already logged; the next round tries again
                    await self._poll()
            elif now >= self._next_look:
                with contextlib.suppress(AgentError):  # the next poll finds the error
                    await self._look()
            elif now >= self._next_usage:
                await self._measure()
            else:
                await self._sleep(min(self._next_poll, self._next_look, self._next_usage) - now)

    def refresh(self) -> None:
        """Read and measure every GPU at once instead of when it is next due; `read_at` and
        `measured_at` show when it was done.
        """
        self._next_poll = self._next_usage = 0.0
        self._wake.set()

    def sample(self, gpus: Sequence[tuple[int, str]], sink: Sink) -> None:
        """Have the GPU usage of each process on these GPUs, given by index and UUID, written into
        ``sink`` many times a second, until this is called again (`sampling`).
        """
        self._thread.sampler.aim(gpus, sink)

    async def stop(self, timeout_seconds: float) -> bool:
        """Close the driver. Return False when a call still hangs after ``timeout_seconds``; the
        process can end all the same.
        """
        self._thread.stop()
        return await self._thread.stopped(timeout_seconds)

    def apply(self, settings: GpuSettings) -> None:
        """Use other settings from now on; the paths of driver,
        sysfs and procfs stay until a restart.
        """
        self._settings = settings
        self._policy = XidPolicy.from_lists(
            settings.disable_health_checks, settings.enable_health_checks
        )
        for warning in self._policy.warnings:
            _logger.warning("gpu.xid_list", problem=warning)
        if not self._policy.any_counts:
            _logger.warning(
                "gpu.xids_unwatched",
                meaning="gpu.disableHealthChecks: no XID makes a GPU Unhealthy",
            )
        self._healths.follow(_recovery_policy(settings.recovery))
        self.refresh()

    @property
    def status(self) -> NvmlStatus:
        """The state of the driver and its thread;
        the same object every time, brought up to date.
        """
        self._status.calls = self._nvml.calls
        self._status.errors = self._nvml.errors
        self._status.library = self._nvml.library
        self._status.xids = self._history.seen
        if self._status.state is not NvmlState.MISSING and self._nvml.last_error:
            self._status.last_error = self._nvml.last_error
        return self._status

    # ---- reading

    async def _poll(self) -> None:
        """Read every GPU; when cards came or went, once more with the driver reopened.

        Raises:
            AgentError: nothing could be read. The inventory shows that already, unless a call
                hangs: then `_judge_hang` makes its GPU Unhealthy.
        """
        now = self._polled_at = time.monotonic()
        self._next_poll = now + INIT_RETRY_SECONDS
        try:
            reopened = self._reopening.due(now)
            await self._read(reopen=reopened)
            if not reopened and self._reopening.due(time.monotonic()):
                await self._read(reopen=True)
        except DriverMissingError as err:
            self._driver_failed(str(err), NvmlState.MISSING)
            raise
        except NvmlError as err:
            self._reopening.driver_failed = True  # so a later reading closes and opens the driver
            self._driver_failed(str(err), NvmlState.ANSWERING)  # with an error
            self._schedule_poll()
            raise
        except NvmlHungError:
            self._schedule_poll()
            raise
        self._schedule_poll()

    async def _look(self) -> None:
        """Read the GPUs if the MIG instances of one have changed since the last reading.

        Raises:
            AgentError: nothing could be read.
        """
        self._looked_at = time.monotonic()
        self._next_look = self._looked_at + _MIG_LOOK_SECONDS
        snapshot = await self._thread.call(
            "look for other MIG instances", self._session.read_if_divided_anew
        )
        if snapshot is not None:
            self._learn(snapshot)
        # A driver that takes long for a look must have time for other calls.
        self._next_look = max(
            self._next_look, time.monotonic() + _LOOK_PAUSES * (time.monotonic() - self._looked_at)
        )

    async def _read(self, *, reopen: bool) -> None:
        snapshot = await self._thread.call(
            "read the GPUs", functools.partial(self._session.read, reopen=reopen)
        )
        if reopen:
            self._problems.forget("events")
        self._learn(snapshot, reopened=reopen)

    def _learn(self, snapshot: Snapshot, *, reopened: bool = False) -> None:
        """Publish a snapshot, and decide by it when to look next and whether to reopen the
        driver.
        """
        now = time.monotonic()
        self._reopening.note_reading(
            snapshot, [gpu.uuid for gpu in self.inventory.value.gpus], reopened=reopened, now=now
        )
        # a GPU whose MIG instances changed while it was read is not settled, and is read again soon
        settled = all(card.mig.settled for card in snapshot.reading.cards)
        self._next_look = now + _MIG_LOOK_SECONDS * (1.0 if settled else _SHORTEST_INTERVAL)
        self._take(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        """Publish the snapshot's GPUs, with the health that each has by its probe."""
        now = time.monotonic()
        self.read_at = time.time()
        self._problems.forget("driver")
        if self._status.state is not NvmlState.HUNG:
            self._status.state = NvmlState.ANSWERING
        for warning in snapshot.warnings:
            _logger.warning("gpu.fact_missing", problem=warning)
        answering = {card.gpu.uuid: card for card in snapshot.reading.cards}
        gpus = inventories.merge(self.inventory.value.gpus, snapshot.reading)
        for gpu in gpus:
            card = answering.get(gpu.uuid)
            if card is None:
                self._healths.probed(
                    gpu, Probe(trouble=_why_missing(gpu, snapshot.reading.failures)), now
                )
            else:
                # MIG instances that the GPU still has, and that could not be read
                silent = {
                    uuid: Probe(trouble=problem)
                    for uuid, problem in inventories.silent_instances(gpu, card).items()
                }
                self._healths.probed(gpu, card.probe, now, silent=silent)
        if snapshot.links is not None:  # read anew: other GPUs answer, or the driver was reopened
            kept = {  # the links of a GPU that does not answer, which could not be read
                pair: link
                for pair, link in self._links.items()
                if not answering.keys() >= set(pair)
            }
            self._links = kept | snapshot.links
        self._publish(
            msgspec.structs.replace(
                self.inventory.value,
                gpus=self._healths.applied(gpus),
                links=self._links,
                failures=snapshot.reading.failures,
                driver_version=snapshot.driver_version,
                nvml_version=snapshot.nvml_version,
                cuda_version=snapshot.cuda_version,
                simulated=snapshot.simulated,
            )
        )

    def _driver_failed(self, problem: str, state: NvmlState) -> None:
        """Mark all GPUs as absent: none can be read, so none may be granted."""
        if self._problems.is_new("driver", problem):
            if state is NvmlState.MISSING:
                self._journal.record("nvml.missing", level="error", problem=problem)
            else:
                # see dmesg, and reboot if the driver does not answer soon
                remedy = Remedy.CHECK_DRIVER.sentence("")
                self._journal.record("nvml.failed", level="error", problem=problem, remedy=remedy)
        self._status.last_error = problem
        self._status.state = state
        gpus = [msgspec.structs.replace(gpu, present=False) for gpu in self.inventory.value.gpus]
        for gpu in gpus:
            self._healths.probed(gpu, Probe(trouble=problem), time.monotonic())
        self._publish(
            msgspec.structs.replace(self.inventory.value, gpus=self._healths.applied(gpus))
        )

    async def _measure(self) -> None:
        self._next_usage = time.monotonic() + self._settings.usage_seconds
        # shown as a hang; the last figures stay until it ends
        with contextlib.suppress(NvmlHungError):
            usage = await self._thread.call("measure the GPUs", self._session.usage)
            self.measured_at = time.time()
            if usage != self.usage.value:
                self.usage.publish(usage)

    # ---- the thread's reports

    def _pass_on(self, event: DeviceEvent) -> None:
        """Pass on an event that came while the GPUs were read; called in the NVML thread."""
        self._thread.pass_on(event)

    def _on_event(self, event: DeviceEvent) -> None:
        self._problems.forget("events")
        self._want_poll()
        if event.xid is None:  # it may be about MIG instances
            self._next_look = min(
                self._next_look, self._looked_at + _MIG_LOOK_SECONDS * _SHORTEST_INTERVAL
            )
            return
        # by the lists of the settings, whether this XID makes its GPU Unhealthy
        counts = self._policy.counts(event.xid)
        self._status.history.count_xid(event.gpu, event.xid)
        self._record_xid(event, event.xid, counts=counts)
        hit = [
            gpu
            for gpu in self.inventory.value.gpus
            # An XID without a GPU may have hit any of them (nvidia §10.6).
            if event.gpu in {"", gpu.uuid, *(instance.uuid for instance in gpu.mig_instances)}
        ]
        for gpu in hit:
            instance = (event.gpu_instance, event.compute_instance)
            self._history.note(
                gpu.uuid, event.xid, time.time(), ignored=not counts, instance=instance
            )
        if counts:
            # what the XID means for a GPU, with its remedy
            found = trouble_of(event.xid, gpu_named=bool(event.gpu))
            for gpu in hit:
                self._healths.reported(
                    gpu, event.gpu_instance, event.compute_instance, found, time.monotonic()
                )
            self._publish_healths()

    def _record_xid(self, event: DeviceEvent, xid: int, *, counts: bool) -> None:
        """Journal an XID; one entry in `_XID_PAUSE_SECONDS` for the same XID in the same place,
        with the number of those left out before. ``counts``: it makes its GPU Unhealthy.
        """
        now, (last, left_out) = time.monotonic(), self._xids.get(event, (-_XID_PAUSE_SECONDS, 0))
        if now - last < _XID_PAUSE_SECONDS:
            self._xids[event] = last, left_out + 1
            return
        self._xids[event] = now, 0
        place: dict[str, Any] = {
            "gpu_instance": event.gpu_instance,
            "compute_instance": event.compute_instance,
        }
        self._journal.record(
            "gpu.xid",
            level="warning" if counts else "info",
            gpu=event.gpu,
            xid=xid,
            meaning=describe(xid),
            remedy=trouble_of(xid).remedy.sentence(event.gpu or "GPU"),
            ignored=not counts,
            **({"left_out": left_out} if left_out else {}),
            **{name: number for name, number in place.items() if number is not None},
        )

    def _on_wait_failed(self, problem: str) -> None:
        """Ask for an early poll with the driver reopened, which makes a new event set. No GPU is
        Unhealthy because of the failed wait.
        """
        if self._problems.is_new("events", problem):
            self._reopening.driver_failed = True
            self._journal.record("nvml.events_failed", level="warning", problem=problem)
            self._want_poll()

    def _on_not_sampled(self, problem: str) -> None:
        if self._problems.is_new("samples", problem):
            self._journal.record("gpu.not_sampled", level="warning", problem=problem)

    def _on_hung(self, call: CallInFlight) -> None:
        self._status.state, self._status.call, self._status.gpu = (
            NvmlState.HUNG,
            call.name,
            call.gpu,
        )
        self._status.since = time.time() - (time.monotonic() - call.started)
        self._status.hangs += 1
        self._journal.record(
            "nvml.hung",
            level="error",
            call=call.name,
            gpu=call.gpu,
            remedy=Remedy.CHECK_DRIVER.sentence(call.gpu),
        )
        self._wake.set()

    def _on_answering(self, call: CallInFlight, seconds: float) -> None:
        self._status.state, self._status.call, self._status.gpu, self._status.since = (
            NvmlState.ANSWERING,
            "",
            "",
            0.0,
        )
        self._journal.record(
            "nvml.answering", call=call.name, gpu=call.gpu, after_seconds=round(seconds, 3)
        )
        # the call that hung has returned: tells whether that changed the health of a GPU
        if self._healths.answering(seconds, time.monotonic()):
            self._publish_healths()
        self._want_poll()

    def _judge_hang(self) -> None:
        """Make the GPU of a hung call Unhealthy after `HUNG_UNHEALTHY_SECONDS`. The loop does it,
        because the thread is inside that call.
        """
        call = self._thread.hang
        if call is None or time.monotonic() - call.started < HUNG_UNHEALTHY_SECONDS:
            return
        gpu = self.inventory.value.gpu(call.gpu)
        if gpu is not None and self._healths.hung(gpu, call.name, time.monotonic()):
            self._publish_healths()

    # ---- publishing

    def _publish_healths(self) -> None:
        self._publish(
            msgspec.structs.replace(
                self.inventory.value, gpus=self._healths.applied(self.inventory.value.gpus)
            )
        )

    def _publish(self, new: Inventory) -> None:
        old = self.inventory.value
        if new != old:
            changes.record(self._journal, old, new)
            changes.count(self._status.history, old, new)
            self.inventory.publish(msgspec.structs.replace(new, version=old.version + 1))

    # ---- time

    def _want_poll(self) -> None:
        self._next_poll = min(self._next_poll, self._polled_at + POLL_SECONDS * _SHORTEST_INTERVAL)
        self._wake.set()

    def _schedule_poll(self) -> None:
        """Set the next poll: after the regular interval, or sooner if a GPU could recover then."""
        now = time.monotonic()
        soonest = now + POLL_SECONDS * _SHORTEST_INTERVAL
        self._next_poll = max(soonest, min([now + POLL_SECONDS, *self._healths.recoveries]))

    async def _sleep(self, seconds: float) -> None:
        """Sleep until something happens, and never so long that a hang goes unseen."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, nvml_thread.CALL_TIMEOUT_SECONDS / 4)):
                await self._wake.wait()


def _recovery_policy(settings: Recovery) -> RecoveryPolicy:
    return RecoveryPolicy(
        automatic=settings.mode == "auto",
        # how long an Unhealthy GPU must be without errors to come back
        quiet_seconds=settings.quiet_seconds,
    )


def _why_missing(gpu: Gpu, failures: tuple[str, ...]) -> str:
    """Return the driver's error for the card's index; `NOT_LISTED`, which says that the driver no
    longer lists the card, if there is none.
    """
    for failure in failures:  # ``index: text``
        index, _, problem = failure.partition(": ")
        if index == str(gpu.index):
            return problem
    return NOT_LISTED
