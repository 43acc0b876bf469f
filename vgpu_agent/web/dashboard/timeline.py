"""The events of the last hour in plain sentences.

The journal is complete and for developers (``/debug/events``). The dashboard's page shows what an
operator wants to know of it: GPUs and the driver, resources, pods, the kubelet, the API server and
the configuration.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vgpu_agent.journal import Entry

    Facts = Mapping[str, object]  # of an entry of the journal, by name

SHOWN_SECONDS = 3600.0
SHOWN_EVENTS = 50
# characters of a fact, such as a reason; a pod may have written it
_LONGEST_FACT = 200


class Mood(enum.StrEnum):
    """The kind of an event, or of a state. The value is the CSS class of its mark."""

    BAD = "bad"
    WARNING = "warn"
    GOOD = "good"
    PLAIN = "plain"


class Event(msgspec.Struct, frozen=True):
    """One event: its id on the page, when it was (Unix seconds), its kind and its sentence."""

    part: str
    at: float
    mood: Mood
    sentence: str


def latest(entries: Sequence[Entry], now: float, gpus: Mapping[str, int]) -> list[Event]:
    """Return the events of the last hour that the page shows, the newest first.

    Args:
        entries: of the journal, the oldest first.
        now: Unix seconds.
        gpus: UUID → index, to call GPUs by their index.
    """
    found: list[Event] = []
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.at < now - SHOWN_SECONDS or len(found) == SHOWN_EVENTS:
            break
        if event := told(entry, gpus):
            # The id is the moment, and the position among the entries of the same moment. Neither
            # changes when others come.
            place = index
            while place and entries[place - 1].at == entry.at:
                place -= 1
            part = f"e{int(entry.at * 1e6):x}-{index - place}"
            found.append(msgspec.structs.replace(event, part=part))
    return found


def told(entry: Entry, gpus: Mapping[str, int]) -> Event | None:
    """Return the event of one entry, without an id; None if the page does not show it."""
    if not (known := _SENTENCES.get(entry.event)):
        return None
    if entry.event == "ledger.named" and not entry.facts.get("devices", True):
        return None  # the pod has no share yet, and may not get one
    mood, sentence = known
    if entry.event == "gpu.xid" and entry.facts.get("ignored"):
        mood = Mood.PLAIN  # by the settings, this XID makes no GPU unhealthy
    return Event("", entry.at, mood, sentence(entry.facts, gpus))


def _gpu(facts: Facts, gpus: Mapping[str, int]) -> str:
    index = facts.get("index", gpus.get(str(facts.get("gpu"))))
    return f"GPU {facts.get('gpu', '?') if index is None else index}"


def _fact(facts: Facts, name: str) -> str:
    fact = facts.get(name) or "unknown"
    if isinstance(fact, list | tuple):
        fact = "; ".join(map(str, fact))
    text = " ".join(str(fact).split())
    return text if len(text) <= _LONGEST_FACT else f"{text[:_LONGEST_FACT]}…"


def _pod(facts: Facts) -> str:
    container = facts.get("container")
    return f"{_fact(facts, 'pod')}{f', container {container}' if container else ''}"


def _devices(facts: Facts, gpus: Mapping[str, int]) -> str:
    """The devices of a grant, whose fact is ``UUID`` or ``UUID 4096 MiB 30 %`` for each."""
    devices = facts.get("devices")
    if not isinstance(devices, list | tuple) or not devices:
        return "its share"
    names = []
    for device in map(str, devices[:4]):
        uuid, _, amount = device.partition(" ")
        name = f"GPU {gpus[uuid]}" if uuid in gpus else uuid
        names.append(f"{amount} of {name}" if amount and amount != "0 MiB 0 %" else name)
    more = f" and {len(devices) - 4} more" if len(devices) > 4 else ""
    return f"{', '.join(names)}{more}"


# event of the journal → its kind, and its sentence from the facts and from UUID → index of GPUs
_SENTENCES: dict[str, tuple[Mood, Callable[[Facts, Mapping[str, int]], str]]] = {
    # GPUs and the driver
    "gpu.lost": (Mood.BAD, lambda f, g: f"{_gpu(f, g)} is lost: {_fact(f, 'reason')}"),
    "gpu.unhealthy": (Mood.BAD, lambda f, g: f"{_gpu(f, g)} is unhealthy: {_fact(f, 'reason')}"),
    "gpu.cause_changed": (
        Mood.WARNING,
        lambda f, g: f"{_gpu(f, g)} is still unhealthy, now because: {_fact(f, 'reason')}",
    ),
    "gpu.recovered": (Mood.GOOD, lambda f, g: f"{_gpu(f, g)} is healthy again"),
    "gpu.appeared": (Mood.GOOD, lambda f, g: f"{_gpu(f, g)} was found: {_fact(f, 'name')}"),
    "gpu.xid": (Mood.WARNING, lambda f, g: f"{_gpu(f, g)} reports {_fact(f, 'meaning')}"),
    "gpu.not_answering": (
        Mood.BAD,
        lambda f, _: f"a GPU does not answer: {_fact(f, 'failures')}",
    ),
    "gpu.mig_changed": (Mood.PLAIN, lambda f, g: f"{_gpu(f, g)} is divided differently"),
    "gpu.mig_instance_unhealthy": (
        Mood.BAD,
        lambda f, g: (
            f"MIG instance {_fact(f, 'profile')} of {_gpu(f, g)} is unhealthy: {_fact(f, 'reason')}"
        ),
    ),
    "gpu.mig_instance_recovered": (
        Mood.GOOD,
        lambda f, g: f"MIG instance {_fact(f, 'profile')} of {_gpu(f, g)} is healthy again",
    ),
    "gpu.mig_instance_withheld": (
        Mood.BAD,
        lambda f, g: (
            f"MIG instance {_fact(f, 'profile')} of {_gpu(f, g)} is not offered: "
            f"{_fact(f, 'reason')}"
        ),
    ),
    "mig.dividing": (Mood.PLAIN, lambda f, g: f"{_gpu(f, g)} is being divided for {_pod(f)}"),
    "mig.divided": (Mood.GOOD, lambda f, g: f"{_gpu(f, g)} was divided for {_pod(f)}"),
    "mig.not_divided": (
        Mood.BAD,
        lambda f, g: f"{_gpu(f, g)} could not be divided: {_fact(f, 'reason')}",
    ),
    "nvml.hung": (Mood.BAD, lambda f, _: f"the driver does not answer: {_fact(f, 'call')}"),
    "nvml.answering": (
        Mood.GOOD,
        lambda f, _: f"the driver answers again after {_fact(f, 'after_seconds')} s",
    ),
    "nvml.missing": (Mood.BAD, lambda *_: "the driver cannot be found"),
    "nvml.failed": (Mood.BAD, lambda *_: "the driver cannot be used"),
    "mps.daemon_lost": (
        Mood.BAD,
        lambda f, _: f"the MPS daemon of {_fact(f, 'resource')} has ended",
    ),
    "mps.daemon_failed": (
        Mood.BAD,
        lambda f, _: f"the MPS daemon of {_fact(f, 'resource')} cannot be used",
    ),
    "mps.daemon_started": (
        Mood.GOOD,
        lambda f, _: f"the MPS daemon of {_fact(f, 'resource')} runs",
    ),
    # resources and the kubelet
    "plugin.registered": (
        Mood.GOOD,
        lambda f, _: f"{_fact(f, 'resource')} is offered to the kubelet",
    ),
    "plugin.withheld": (
        Mood.WARNING,
        lambda f, _: f"{_fact(f, 'resource')} is not offered: {_fact(f, 'reason')}",
    ),
    "plugin.refused": (Mood.BAD, lambda f, _: f"the kubelet refuses {_fact(f, 'resource')}"),
    "plugin.registering_again": (
        Mood.WARNING,
        lambda f, _: f"{_fact(f, 'resource')} is being registered with the kubelet again",
    ),
    "plugin.retired": (Mood.PLAIN, lambda f, _: f"{_fact(f, 'resource')} is no longer offered"),
    "plugin.rival": (
        Mood.BAD,
        lambda f, _: f"another plugin offers {_fact(f, 'resource')}: {_fact(f, 'reason')}",
    ),
    "kubelet.socket_missing": (Mood.WARNING, lambda *_: "the kubelet is away"),
    "kubelet.records_incomplete": (
        Mood.WARNING,
        lambda f, _: f"the kubelet's records cannot be read: {_fact(f, 'reason')}",
    ),
    # pods
    "ledger.named": (Mood.PLAIN, lambda f, g: f"{_pod(f)} has {_devices(f, g)}"),
    "ledger.adopted": (Mood.PLAIN, lambda f, g: f"{_pod(f)} was found with {_devices(f, g)}"),
    "ledger.renamed": (
        Mood.WARNING,
        lambda f, g: f"{_pod(f)} was found with {_devices(f, g)} of another pod",
    ),
    "ledger.released": (Mood.PLAIN, lambda f, _: f"{_pod(f)} has given its share back"),
    "start.bound": (Mood.GOOD, lambda f, g: f"{_pod(f)} starts with {_devices(f, g)}"),
    "start.as_before": (Mood.PLAIN, lambda f, _: f"{_pod(f)} starts again with the same share"),
    "start.refused": (Mood.BAD, lambda f, _: f"{_pod(f)} cannot start: {_fact(f, 'reason')}"),
    "start.overcommitted": (
        Mood.WARNING,
        lambda f, _: f"{_pod(f)} was given more of a GPU than there is",
    ),
    "allocate.refused": (
        Mood.BAD,
        lambda f, _: f"a pod did not get {_fact(f, 'resource')}: {_fact(f, 'reason')}",
    ),
    "grant.device_missing": (
        Mood.BAD,
        lambda f, _: f"{_pod(f)} uses a GPU or MIG instance that is gone",
    ),
    "limit.not_in_force": (
        Mood.WARNING,
        lambda f, _: f"the limit of {_pod(f)} is not in force: {_fact(f, 'reason')}",
    ),
    "reschedule.evicted": (Mood.WARNING, lambda f, _: f"{_pod(f)} was evicted"),
    "rescue.evicted": (Mood.WARNING, lambda f, _: f"{_pod(f)} was evicted after it had failed"),
    "rescue.deleted": (Mood.WARNING, lambda f, _: f"{_pod(f)} was deleted after it had failed"),
    "rescue.recreated": (Mood.GOOD, lambda f, _: f"{_pod(f)} was created again"),
    # the API server and the configuration
    "cluster.watch_failed": (
        Mood.WARNING,
        lambda f, _: f"the API server does not answer: {_fact(f, 'error')}",
    ),
    "cluster.watch_recovered": (Mood.GOOD, lambda *_: "the API server answers again"),
    "config.applied": (Mood.PLAIN, lambda *_: "a new configuration is in force"),
    "config.refused": (Mood.BAD, lambda *_: "the newest configuration has an error"),
    "config.named": (
        Mood.PLAIN,
        lambda f, _: f"the configuration named {_fact(f, 'name')} was chosen",
    ),
}
