"""The XID errors that make a GPU Unhealthy, and their meaning in a few words.

An XID is a number the driver reports with an error event. Some are the fault of the program that
ran and no sign of a bad card, so a policy decides. The list of those, and the two environment
variables that change it, are those of NVIDIA's device plugin, so that an operator's settings keep
their meaning (nvidia §10, §17.4). The plugin's defect of ignoring the enable list is not copied.

Called by `watch`: once for each event and again when the configuration is reloaded.
"""

from __future__ import annotations

from typing import Self

import msgspec

# The program's fault, not the card's: NVIDIA's own list (nvidia §10.2).
IGNORED_BY_DEFAULT = frozenset({13, 31, 43, 45, 68, 109})

_ALL_WORDS = ("all", "xids")

# The meaning of common XIDs, for the reason why a GPU is Unhealthy; the numbers are those of
# NVIDIA's XID catalogue.
_MEANINGS = {
    13: "a program made an illegal access in a graphics or compute engine",
    31: "a program touched GPU memory that is not mapped",
    32: "the GPU read a broken command stream",
    38: "the driver's firmware failed",
    43: "a program's GPU channel stopped",
    45: "a program was removed from the GPU early",
    46: "the GPU stopped answering",
    48: "GPU memory lost bits beyond what ECC corrects",
    61: "the GPU's own microcontroller stopped",
    62: "the GPU's own microcontroller halted",
    63: "a row of GPU memory is to be replaced",
    64: "a row of GPU memory could not be replaced",
    68: "the video decoder failed",
    69: "a graphics engine failed",
    74: "an NVLink connection failed",
    79: "the GPU has fallen off the bus",
    92: "corrected memory errors come too often",
    94: "a memory error hit one program only",
    95: "a memory error may have hit any program",
    109: "a program did not leave the GPU in time",
    110: "a security fault",
    119: "the GPU's system processor timed out",
    120: "the GPU's system processor failed",
    140: "GPU memory lost bits that nobody could attribute",
    154: "the driver asks for a recovery action",
}


def describe(code: int) -> str:
    """``XID 79: the GPU has fallen off the bus``; unknown numbers stay numbers."""
    meaning = _MEANINGS.get(code)
    return f"XID {code}: {meaning}" if meaning else f"XID {code}"


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
    def watches(self) -> bool:
        """At least one XID can make a GPU Unhealthy."""
        return not self.disable_all or self.enable_all or bool(self.enabled)

    def counts(self, code: int) -> bool:
        """The XID ``code`` makes its GPU Unhealthy."""
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
