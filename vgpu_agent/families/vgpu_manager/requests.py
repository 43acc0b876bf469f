"""The request of a container in vgpu-manager's words: its limits, read once and checked
(vgpu-manager §5.3).

Called by `decisions` to compare a scheduler's claim with what the pod really asks for, and by
`family` to place a container that no scheduler has placed. Two defaults may surprise: a request for
cores alone gets all of the card's memory, and a request for memory alone has no limit of compute.
Schedulers rely on both, so they stay.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import RequestRefusedError, listed, quoted
from vgpu_agent.families.vgpu_manager.claims import MAX_CARDS
from vgpu_agent.isolation.vgpu_control import DISABLED_BY, ComputePolicy, is_switched_on
from vgpu_agent.placement.topology import NONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.pods import Pod, PodContainer

# Variables that a container sets itself, as literal values (vgpu-manager §4.1). With the first one
# it asks for more memory than the card has, some of it in the host's; with the second one, to run
# without the library that limits it.
OVERSOLD, DISABLED = "CUDA_MEM_OVERSOLD", DISABLED_BY

_MAX_MIB = 2**40  # more than any card has
_LONGEST_LIST = 4096  # characters


class Request(msgspec.Struct, frozen=True):
    """The request of a container on each of its cards.

    Attributes:
        number: of cards.
        cores_percent: of each card's compute; 0 for no limit.
        memory_mib: of each card's memory; None for all that the card is offered with, which may be
            more or less than it has.
    """

    number: int
    cores_percent: int
    memory_mib: int | None

    def memory_on(self, card_mib: int) -> int:
        """Return the memory on a card that is offered with ``card_mib``."""
        return card_mib if self.memory_mib is None else self.memory_mib

    def text(self) -> str:
        """Return the demand on each card, for messages."""
        memory = "all of the memory" if self.memory_mib is None else f"{self.memory_mib} MiB"
        compute = f"{self.cores_percent} %" if self.cores_percent else "no limit"
        return f"{memory} and {compute} of the compute"


def asks(container: PodContainer, keys: Keys) -> bool:
    """Tell whether schedulers give the container a claim: it names a number of cards."""
    return container.limits.get(keys.number, 0) > 0 or keys.number in container.unreadable_limits


def sets(container: PodContainer | None, variable: str) -> bool:
    """Tell whether the container's specification switches ``variable`` on: with a literal value
    that means yes. A container that the pod does not have (None) switches nothing on.
    """
    return container is not None and is_switched_on(container.values.get(variable, ""))


def compute_policy(pod: Pod, node_annotations: Mapping[str, str], keys: Keys) -> ComputePolicy:
    """Return how the compute of the pod's containers is limited: the pod's annotation overrides
    the Node's, and an unknown word counts as no annotation (vgpu-manager §4.1).
    """
    for texts in (pod.annotations, node_annotations):
        with contextlib.suppress(ValueError):
            return ComputePolicy(texts.get(keys.compute_policy, "").strip().lower())
    return ComputePolicy.FIXED  # never more than the container's share


def policy_word(pod: Pod, key: str, words: Sequence[str]) -> str:
    """Return the word of the annotation ``key``, which names a policy for the choice of Nodes or
    cards; one that is none of ``words`` counts as `NONE`, no policy (vgpu-manager §4.1).
    """
    word = pod.annotations.get(key, "").strip().lower()
    return word if word in words else NONE


def misspelt_word(pod: Pod, key: str, words: Sequence[str]) -> str:
    """Return a sentence for the owner of a pod if the word of an annotation means nothing; empty
    otherwise.
    """
    word = pod.annotations.get(key, "").strip().lower()
    if not word or word in {*words, NONE}:
        return ""
    return (
        f"annotation {key}={quoted(word, 40)} means nothing and counts as {NONE}; expected "
        f"{listed([*words, NONE])}"
    )


def listed_texts(pod: Pod, key: str) -> tuple[str, ...]:
    """Return the entries of the annotation ``key``, product names or UUIDs of cards, in lower case
    (vgpu-manager §4.1).

    Raises:
        RequestRefusedError: the list is too long; each entry would be compared with each card.
    """
    text = pod.annotations.get(key, "")
    if len(text) > _LONGEST_LIST:
        raise RequestRefusedError(
            f"pod {pod.full_name}: annotation {key} has {len(text)} characters; expected a "
            f"list of at most {_LONGEST_LIST}"
        )
    return tuple(entry for each in text.lower().split(",") if (entry := each.strip()))


def read_request(pod: Pod, container: PodContainer, keys: Keys, factor: int) -> Request:
    """Return the request in the container's limits.

    Args:
        pod: of the container, for messages.
        container: the one that asks.
        keys: the names of the resources.
        factor: MiB in one unit of memory.

    Raises:
        RequestRefusedError: a limit is no whole number, or out of range; the text names pod,
            container, key and value.
    """

    def limit(name: str, *, most: int, expected: str) -> int:
        text = container.unreadable_limits.get(name)
        value = container.limits.get(name, 0)
        if text is None and 0 <= value <= most:
            return value
        raise RequestRefusedError(
            f"pod {pod.full_name}, container {container.name}: {name} is "
            f"{quoted(text or str(value), 40)}; expected {expected}"
        )

    number = limit(keys.number, most=MAX_CARDS, expected=f"a number of GPUs, at most {MAX_CARDS}")
    cores = limit(keys.cores, most=100, expected="percent of each GPU's compute, 0 to 100")
    memory = limit(
        keys.memory,
        most=_MAX_MIB // factor,
        expected=f"a plain number of {factor} MiB on each GPU, such as 3000, without Mi or Gi",
    )
    if not cores and not memory:
        cores = 100  # a request for a number of cards alone gets whole cards
    return Request(number, cores, memory * factor or None)
