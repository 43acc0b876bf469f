"""The XID errors that make a GPU Unhealthy: their meaning in a few words, and what helps.

An XID is a number the driver reports with an error event. Some are the fault of the program that
ran and no sign of a bad card, so a policy decides. The list of those, and the two environment
variables that change it, are those of NVIDIA's device plugin, so that an operator's settings keep
their meaning (nvidia §10, §17.4). The plugin's defect of ignoring the enable list is not copied.

Called by `watch`: once for each event and again when the configuration is reloaded.
"""

from __future__ import annotations

from typing import Self

import msgspec

from vgpu_agent.gpu.health import Trouble
from vgpu_agent.model import Remedy
from vgpu_agent.status import XidSeen

# The program's fault, not the card's: NVIDIA's own list (nvidia §10.2).
IGNORED_BY_DEFAULT = frozenset({13, 31, 43, 45, 68, 109})

_ALL_WORDS = ("all", "xids")

_MAX_SEEN = 32  # entries that are kept of each GPU
_SAME_SECONDS = 60.0  # the same XID again within this time is counted in its entry

# The meaning and the remedy of common XIDs. The numbers and their classes (an error of the program,
# reset, reboot, replacement) are those of NVIDIA's XID catalogue. `APPLICATION` means: look at
# the program; `FOLLOW_DRIVER`: do what the driver names; `RESTART`: restart the pod that was hit;
# `RESET_LATER`: reset when the GPU's pods have ended; `RESET_LINKED`: reset the GPU with those that
# NVLink joins to it; `LOOK_UP`: read dmesg and the catalogue.
KNOWN = {
    13: ("a program made an illegal access in a graphics or compute engine", Remedy.APPLICATION),
    31: ("a program touched GPU memory that is not mapped", Remedy.APPLICATION),
    32: ("the GPU read a broken command stream", Remedy.LOOK_UP),
    38: ("the driver's firmware failed", Remedy.RESET),
    43: ("a program's GPU channel stopped", Remedy.APPLICATION),
    45: ("a program was removed from the GPU early", Remedy.APPLICATION),
    46: ("the GPU stopped answering", Remedy.RESET),
    48: ("GPU memory lost bits beyond what ECC corrects", Remedy.RESET),
    61: ("the GPU's own microcontroller stopped", Remedy.RESET),
    62: ("the GPU's own microcontroller halted", Remedy.RESET),
    63: ("a row of GPU memory is to be replaced", Remedy.RESET_LATER),
    64: ("a row of GPU memory could not be replaced", Remedy.RESET_OR_REPLACE),
    68: ("the video decoder failed", Remedy.APPLICATION),
    69: ("a graphics engine failed", Remedy.APPLICATION),
    74: ("an NVLink connection failed", Remedy.RESET_LINKED),
    79: ("the GPU has fallen off the bus", Remedy.REBOOT_OR_REPLACE),
    92: ("corrected memory errors come too often", Remedy.REPLACE_LATER),
    94: ("a memory error hit one program only", Remedy.RESTART),
    95: ("a memory error may have hit any program", Remedy.RESET),
    109: ("a program did not leave the GPU in time", Remedy.APPLICATION),
    110: ("a security fault", Remedy.RESET),
    119: ("the GPU's system processor timed out", Remedy.RESET),
    120: ("the GPU's system processor failed", Remedy.RESET),
    140: ("GPU memory lost bits, and the driver could not mark the bad page", Remedy.RESET),
    154: ("the driver asks for a recovery action", Remedy.FOLLOW_DRIVER),
}


def describe(code: int) -> str:
    """Return the XID with its meaning, e.g. ``XID 79: the GPU has fallen off the bus``, or the
    number alone when it is unknown.
    """
    return f"XID {code}: {KNOWN[code][0]}" if code in KNOWN else f"XID {code}"


def trouble_of(code: int, *, gpu_named: bool = True) -> Trouble:
    """Return the trouble of a GPU with this XID.

    Args:
        code: the XID.
        gpu_named: the driver has named the GPU.
    """
    note = "" if gpu_named else " (the driver does not say on which GPU)"
    remedy = KNOWN[code][1] if code in KNOWN else Remedy.LOOK_UP
    return Trouble(f"XID {code}", f"{describe(code)}{note}", remedy)


class XidHistory:
    """The latest XIDs of each GPU, for explanations of pods that failed.

    State: in memory only, `_MAX_SEEN` entries for each GPU. The same XID in the same place again
    within a minute is counted in its entry, so that a storm pushes nothing out.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[XidSeen]] = {}

    def note(
        self,
        gpu: str,
        code: int,
        at: float,
        *,
        ignored: bool,
        instance: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Take note of an XID.

        Args:
            gpu: the UUID of a GPU of this node.
            code: the XID.
            at: unix seconds.
            ignored: it does not make the GPU Unhealthy.
            instance: the ids of the MIG GPU instance and compute instance that it names.
        """
        found = trouble_of(code)
        seen = self._seen.setdefault(gpu, [])
        for place, before in enumerate(seen):
            same = (before.xid, before.gpu_instance, before.compute_instance) == (code, *instance)
            if same and before.ignored == ignored and at - before.last_at <= _SAME_SECONDS:
                seen[place] = msgspec.structs.replace(before, last_at=at, count=before.count + 1)
                return
        # `at` is its first and its latest time, 1 the number so far
        seen.append(XidSeen(code, found.text, found.remedy, ignored, at, at, 1, *instance))
        del seen[:-_MAX_SEEN]

    @property
    def seen(self) -> dict[str, tuple[XidSeen, ...]]:
        """GPU → its entries, the oldest first."""
        return {gpu: tuple(entries) for gpu, entries in self._seen.items()}


class XidPolicy(msgspec.Struct, frozen=True):
    """The XIDs that count; enabling beats disabling.

    Attributes:
        disable_all: every XID is ignored that is not enabled.
        disabled: ignored in addition to `IGNORED_BY_DEFAULT`.
        enable_all: every XID counts, whatever the other lists contain.
        enabled: count although they are ignored by default or disabled.
        warnings: one sentence for each word of the lists that is neither a number nor ``all``.
    """

    disable_all: bool = False
    disabled: frozenset[int] = frozenset()
    enable_all: bool = False
    enabled: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_lists(cls, disable: str, enable: str) -> Self:
        """Read the two comma-separated lists; junk is skipped, and listed in ``warnings``.

        Args:
            disable: ``gpu.disableHealthChecks`` (``DP_DISABLE_HEALTHCHECKS``): numbers, ``all`` or
                ``xids``, in any case.
            enable: ``gpu.enableHealthChecks`` (``DP_ENABLE_HEALTHCHECKS``): the same.
        """
        disable_all, disabled, junk = _parse("disableHealthChecks", disable)
        enable_all, enabled, more_junk = _parse("enableHealthChecks", enable)
        return cls(disable_all, disabled, enable_all, enabled, junk + more_junk)

    @property
    def any_counts(self) -> bool:
        """Tell whether at least one XID can make a GPU Unhealthy."""
        return not self.disable_all or self.enable_all or bool(self.enabled)

    def counts(self, code: int) -> bool:
        """Tell whether the XID ``code`` makes its GPU Unhealthy."""
        if self.enable_all or code in self.enabled:
            return True
        return not (self.disable_all or code in self.disabled or code in IGNORED_BY_DEFAULT)


def _parse(key: str, words: str) -> tuple[bool, frozenset[int], tuple[str, ...]]:
    """Return whether the list contains all, its numbers, and its unreadable words."""
    everything, numbers, junk = False, set[int](), list[str]()
    for word in (part.strip() for part in words.split(",")):
        if word.lower() in _ALL_WORDS:
            everything = True
        elif word.isascii() and word.isdigit():
            # no XID has more digits; a megabyte of them must not become an integer
            numbers.add(int(word[:20]))
        elif word:
            junk.append(f"gpu.{key}: {word[:40]!r} is skipped; expected an XID number, all or xids")
    return everything, frozenset(numbers), tuple(junk)
