"""Rules that tie several settings together, or that need more than a type: pairs, addresses, XID
lists, and those of each family.

The modules `reading` and `load` call them after every value has been accepted by itself. They use
dotted paths and do not depend on files and flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.config import families, schema
from vgpu_agent.config.problems import shown
from vgpu_agent.config.settings import split_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.config.settings import Settings

_XID_PATHS = ("gpu.disableHealthChecks", "gpu.enableHealthChecks")


class Conflict(NamedTuple):
    """Values that do not go together: the paths that could be changed, the likeliest first, each
    with its sentence.
    """

    to_change: tuple[tuple[str, str], ...]


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a conflict for every rule that ``settings`` break as a whole."""
    for family in families.DECLARED:
        yield from family.conflicts(settings)
    yield from same_port(("debugListen", settings.debug_listen), ("listen", settings.listen))


def same_port(one: tuple[str, str], other: tuple[str, str]) -> Iterator[Conflict]:
    """Yield the conflict of two addresses on which one process cannot listen at once. Each is given
    as the dotted path of its setting and its value.
    """
    if _collide(one[1], other[1]):
        yield Conflict(
            tuple(
                (
                    path,
                    (
                        f"expected a port other than that of {other_path} ({other_address}), got "
                        f"{shown(address)}"
                    ),
                )
                for (path, address), (other_path, other_address) in ((one, other), (other, one))
            )
        )


def without_effect(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each setting that has no effect because of another one."""
    for family in families.DECLARED:
        yield from family.without_effect(settings)


def doubtful_xids(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the text of each entry of the health-check settings that is neither
    the number of an XID nor a word for all of them; NVIDIA's plugin ignores such entries in silence
    (nvidia §10.1).
    """
    values = dict(schema.values(settings))
    for path in _XID_PATHS:
        for entry in values[path].split(","):
            word = entry.strip()
            if (
                word
                and word.lower() not in {"all", "xids"}
                and not (word.isascii() and word.isdigit())
            ):
                yield path, word


def _collide(one: str, other: str) -> bool:
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    if port != other_port or port == 0:
        return False
    return host == other_host or _covers(host, other_host) or _covers(other_host, host)


def _covers(host: str, other: str) -> bool:
    """Tell whether listening on ``host`` takes the port of ``other`` too."""
    # These addresses are only compared: no socket is bound to them.
    return host == "" or (host == "0.0.0.0" and ":" not in other) or (host == "::" and ":" in other)  # noqa: S104
