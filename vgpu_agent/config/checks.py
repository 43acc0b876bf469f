"""Rules that tie several settings together, or that need more than a type: pairs, addresses, resource names, XID lists.

`load` calls them after every value has been accepted by itself; they use dotted paths and do not depend on files and
flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vgpu_agent.config import iktos, schema
from vgpu_agent.config.problems import shown
from vgpu_agent.config.settings import split_address
from vgpu_agent.config.sharing import NVIDIA_GPU

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vgpu_agent.config.settings import Settings

# The first of a pair must not be above the second.
_ORDERED = (
    ("kubelet.retryMinSeconds", "kubelet.retryMaxSeconds"),
    ("kubelet.drainSeconds", "shutdownSeconds"),
    ("gpu.callTimeoutSeconds", "gpu.hungUnhealthySeconds"),
    ("gpu.recovery.quietSeconds", "gpu.recovery.maxQuietSeconds"),
    ("mps.backoffMinSeconds", "mps.backoffMaxSeconds"),
    ("tasks.backoffMinSeconds", "tasks.backoffMaxSeconds"),
)
_MIG_PREFIX = "nvidia.com/mig-"
_XID_PATHS = ("gpu.disableHealthChecks", "gpu.enableHealthChecks")


class Conflict(NamedTuple):
    """Values that do not go together: the paths that could be changed, the likeliest first, each with its sentence."""

    blame: tuple[tuple[str, str], ...]


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Every rule that ``settings`` breaks as a whole."""
    values = dict(schema.values(settings))
    for low, high in _ORDERED:
        if values[low] > values[high]:
            yield Conflict(
                (
                    (low, f"expected at most {high} ({shown(values[high])}), got {shown(values[low])}"),
                    (high, f"expected at least {low} ({shown(values[low])}), got {shown(values[high])}"),
                )
            )
    yield from _mps_conflicts(settings)
    for problem in iktos.problems(settings.iktos.resource_config):
        yield Conflict((("iktos.resourceConfig", problem),))
    if _collide(settings.listen, settings.debug_listen):
        text = "expected another port than {} ({}), got {}"
        yield Conflict(
            (
                ("debugListen", text.format("listen", settings.listen, shown(settings.debug_listen))),
                ("listen", text.format("debugListen", settings.debug_listen, shown(settings.listen))),
            )
        )


def _mps_conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield the settings that conflict with MPS sharing (nvidia §1)."""
    if not settings.sharing.mps.resources:
        return
    if settings.plugin.mig_strategy == "mixed":
        text = "MPS cannot share MIG slices"
        yield Conflict(
            (
                ("plugin.migStrategy", f'{text}; expected none or single with sharing.mps, got "mixed"'),
                ("sharing.mps.resources", f"{text}; leave sharing.mps out with plugin.migStrategy: mixed"),
            )
        )
    if not settings.mps.root:
        text = "sharing.mps needs a directory on the node"
        yield Conflict((("mps.root", f'{text}; expected an absolute path such as /run/nvidia/mps, got ""'),))


class SharedTwice(NamedTuple):
    """The earlier entry that shares the same devices: its position, the key to blame, and a sentence with a place for its line."""

    position: int
    key: str
    text: str


def shared_twice(entry: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> SharedTwice | None:
    """The entry before ``entry`` that takes devices of the same resource; two may share a resource when both list their devices."""
    for index, other in enumerate(earlier):
        if "name" not in entry or other.get("name") != entry["name"]:
            continue
        devices, others = entry.get("devices", "all"), other.get("devices", "all")
        if not isinstance(devices, tuple) or not isinstance(others, tuple):
            return SharedTwice(index, "name", f"{shown(entry['name'])} stands twice, first on line {{line}}; keep one of them")
        if both := [word for word in devices if word in others]:
            return SharedTwice(index, "devices", f"{shown(both[0])} is shared twice, first on line {{line}}; keep it in one of them")
    return None


def without_effect(settings: Settings) -> Iterator[str]:
    """A sentence for each setting that another one takes the effect from."""
    if settings.sharing.mps.resources and settings.sharing.time_slicing.resources:
        yield "sharing.timeSlicing: has no effect beside sharing.mps, which wins as in NVIDIA's plugin; leave one of them out"
    if settings.iktos.resource_config and (settings.sharing.mps.resources or settings.sharing.time_slicing.resources):
        yield "sharing: has no effect beside iktos.resourceConfig; leave one of them out"
    known = {NVIDIA_GPU} | {pattern.name for pattern in (*settings.resources.gpus, *settings.resources.mig)}
    for kind, block in (("timeSlicing", settings.sharing.time_slicing), ("mps", settings.sharing.mps)):
        for index, entry in enumerate(block.resources):
            if entry.name not in known and not entry.name.startswith(_MIG_PREFIX):
                yield (
                    f"sharing.{kind}.resources[{index}].name: {shown(entry.name)} is no resource of any node; expected {NVIDIA_GPU}, "
                    f"{_MIG_PREFIX}<profile>, or a name from resources:"
                )


def doubtful_xids(settings: Settings) -> Iterator[tuple[str, str]]:
    """Path and entry of each health-check entry that means nothing; NVIDIA's plugin ignores them in silence (nvidia §10.1)."""
    values = dict(schema.values(settings))
    for path in _XID_PATHS:
        for entry in values[path].split(","):
            word = entry.strip()
            if word and word.lower() not in {"all", "xids"} and not (word.isascii() and word.isdigit()):
                yield path, word


def _collide(one: str, other: str) -> bool:
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    if port != other_port or port == 0:
        return False
    return host == other_host or _covers(host, other_host) or _covers(other_host, host)


def _covers(host: str, other: str) -> bool:
    """Tell whether listening on ``host`` takes the port of ``other`` too."""
    return host == "" or (host == "0.0.0.0" and ":" not in other) or (host == "::" and ":" in other)  # noqa: S104 - compared, not bound
