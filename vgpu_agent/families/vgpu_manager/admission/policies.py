"""The values of users' annotations on pods (vgpu-manager §4.1): the valid ones, and contradictions
between them.

Schedulers treat an unknown value as ``none``, so the pod would not run as its owner expects.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.config.suggestions import nearest
from vgpu_agent.errors import listed, quoted
from vgpu_agent.families.vgpu_manager.grace import LEAST_GRACE_SECONDS, seconds_of
from vgpu_agent.isolation.vgpu_control import ComputePolicy
from vgpu_agent.placement.nodes.demand import PHYSICAL, VIRTUAL
from vgpu_agent.placement.topology import MODES, NONE, POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.placement.nodes.demand import Demand

_SHOWN = 40  # characters of a wrong word
_SWITCH = ("true", "false")
_UUID = re.compile(r"gpu-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class Rule(msgspec.Struct, frozen=True):
    """The values that an annotation may have.

    Attributes:
        words: all values, or examples of them, for a suggestion where a text is similar to one.
        accepts: tells whether a text is such a value.
        expected: a description of the values, for messages.
        any_case: case does not matter: `accepts` gets the text in lower case.
    """

    words: tuple[str, ...]
    accepts: Callable[[str], bool]
    expected: str
    any_case: bool = True

    def allows(self, text: str) -> bool:
        """Tell whether schedulers know the value; a blank one counts as no annotation."""
        word = text.strip()
        return not word or self.accepts(word.lower() if self.any_case else word)

    def complaint(self, text: str) -> str:
        """Return what is wrong with a text that is not allowed, and the remedy."""
        guess = nearest(text.strip().lower(), self.words)
        meant = f"; did you mean {guess}?" if guess else ""
        return f"{quoted(text, _SHOWN)} is unknown, expected {self.expected}{meant}"


def rules(keys: Keys) -> Mapping[str, Rule]:
    """Return the rules by annotation."""
    policy = _one_of(*POLICIES, NONE)  # binpack, spread or none
    return {
        keys.node_policy: policy,
        keys.device_policy: policy,
        # virtual: only Nodes that offer more memory than their cards have; physical: only others
        keys.memory_policy: Rule(
            (VIRTUAL, PHYSICAL),
            lambda low: low.startswith(("virt", "phy")),
            f"{VIRTUAL} or {PHYSICAL}",
        ),
        # the cards of a container should be on one NUMA node, or linked; or must be (strict)
        keys.topology_mode: _one_of(*MODES, NONE),
        # true: the links to the cards of the pod's peers count, too
        keys.cross_pod: _one_of(*_SWITCH),
        # how strictly a container is held to its share of the compute
        keys.compute_policy: _one_of(*(policy.value for policy in ComputePolicy)),
        # the time for which cards are kept for the pod before it is bound
        keys.stuck_grace: Rule(
            (),
            lambda text: seconds_of(text) >= LEAST_GRACE_SECONDS,
            "a time of at least 1s, such as 30s or 2m",
            any_case=False,
        ),
    }


def is_true(text: str) -> bool:
    """Tell whether a switch is on."""
    return text.strip().lower() == _SWITCH[0]


def contradictions(demand: Demand, keys: Keys) -> Iterator[str]:
    """Yield the reasons why no card can ever match a pod's annotations, one sentence each.

    The name or UUID of a card must contain a text of the include list, and none of the exclude
    list. So no card matches if each included text contains an excluded one.
    """
    for include, exclude, included, excluded, has in (
        (keys.include_type, keys.exclude_type, demand.include_types, demand.exclude_types, _has),
        (
            keys.include_uuid,
            keys.exclude_uuid,
            demand.include_uuids,
            demand.exclude_uuids,
            _has_text,
        ),
    ):
        if included and all(any(has(text, other) for other in excluded) for text in included):
            yield (
                f"{exclude} excludes every GPU that {include} includes "
                f"({quoted(listed(included), _SHOWN * 2)}); remove one of the two"
            )
    named = demand.include_uuids  # in lower case
    # the most cards that a container asks for
    number = max(container.card_count for container in demand.containers)
    if named and all(map(_UUID.fullmatch, named)) and len(named) < number:
        yield (
            f"{keys.include_uuid} names {len(named)} GPUs, and a container asks for {number} "
            f"({keys.number}); name as many, or ask for {len(named)}"
        )


def _one_of(*words: str) -> Rule:
    return Rule(words, words.__contains__, f"{', '.join(words[:-1])} or {words[-1]}")


def _has_text(text: str, part: str) -> bool:
    return part in text


def _has(text: str, part: str) -> bool:
    """Tell whether each product name that contains ``text`` also contains ``part``. Numbers match
    as a whole: our extender does not find ``a10`` in ``a100``, vgpu-manager's does.
    """
    before = r"(?<![0-9])" if part[:1].isdecimal() else ""
    after = r"(?![0-9])" if part[-1:].isdecimal() else ""
    return re.search(before + re.escape(part) + after, text) is not None
