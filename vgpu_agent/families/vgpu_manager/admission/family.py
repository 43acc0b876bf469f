"""The rules of vgpu-manager for new pods, behind the interface of `families.admission`.

*State* means the annotations and labels that only schedulers and agents write (vgpu-manager §4.2).
In addition to the rules of vgpu-manager's webhook (vgpu-manager §6), state is removed from every
new pod, and requests that no Node can ever serve are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.config.problems import shown
from vgpu_agent.errors import ConfigError, RequestRefusedError, quoted
from vgpu_agent.families.admission import AdmissionOptions, Judgement, LargestNode, PodChanges
from vgpu_agent.families.vgpu_manager.admission import policies
from vgpu_agent.families.vgpu_manager.keys import DEFAULT_DOMAIN, IGNORE_WEBHOOK_LABEL, Keys
from vgpu_agent.families.vgpu_manager.requests import asks
from vgpu_agent.families.vgpu_manager.scheduling.demand import read_demand
from vgpu_agent.families.vgpu_manager.scheduling.node_cards import read_cards
from vgpu_agent.families.vgpu_manager.settings import is_domain
from vgpu_agent.placement.nodes.cards import Unfit
from vgpu_agent.pods import MIRROR_POD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu_agent.placement.nodes.demand import Demand
    from vgpu_agent.pods import Pod, PodContainer

_WHOLE = 100  # percent of a card's compute
_SHOWN = 40  # characters of a container's name in a message
# 4 TiB in MiB. A larger amount comes from a suffix that does not belong there: 5Mi is read as
# 5242880.
_MOST_MEMORY_UNITS = 1 << 22


def build(options: AdmissionOptions) -> VgpuManagerAdmission:
    """Return the rules under these options.

    Raises:
        ConfigError: a default is not a value that schedulers know, or the domain is invalid.
    """
    domain = options.domain or DEFAULT_DOMAIN
    keys, problems = Keys(domain), []
    if not is_domain(domain):
        problems.append(f"--domain: expected a DNS name in small letters, got {shown(domain)}")
    given = (
        ("--default-node-policy", keys.node_policy, options.node_policy),
        ("--default-device-policy", keys.device_policy, options.device_policy),
        ("--default-topology-mode", keys.topology_mode, options.topology_mode),
    )
    for flag, key, word in given:
        rule = policies.rules(keys)[key]
        if word and not rule.allows(word):
            problems.append(f"{flag}: {rule.complaint(word)}")
    if problems:
        raise ConfigError(problems)
    return VgpuManagerAdmission(keys, options)


class VgpuManagerAdmission:
    """The changes to new pods by vgpu-manager's rules, and the refusals; no state of its own."""

    def __init__(self, keys: Keys, options: AdmissionOptions) -> None:
        self._keys, self._options = keys, options

    # -- changes -----------------------------------------------------------------------------------

    def changes(self, pod: Pod) -> PodChanges:
        """Return the defaults that a pod gets, and the removal of all state in it (vgpu-manager
        §4.2).

        A pod that opts out gets no defaults. Neither does the mirror of a static pod, which the
        kubelet has started already. Any user may have written either of them, so their state is
        removed, too.
        """
        annotations: dict[str, str | None] = dict.fromkeys(self._state_in(pod.annotations))
        labels = dict.fromkeys(self._state_in(pod.labels))
        if self._is_exempt(pod):
            return PodChanges(annotations, labels)
        limits = tuple(self._completed(container) for container in pod.containers)
        numbers = [
            filled.get(self._keys.number, container.limits.get(self._keys.number, 0))
            for container, filled in zip(pod.containers, limits, strict=True)
        ]
        if not any(numbers) and not any(asks(one, self._keys) for one in pod.containers):
            # The pod asks for no GPUs, so its policies have no effect (vgpu-manager §6).
            annotations |= {
                key: None for key in self._defaulted_policies() if key in pod.annotations
            }
            return PodChanges(annotations, labels)
        annotations |= {
            key: word
            for key, word in self._defaults(max(numbers)).items()
            if word and not pod.annotations.get(key, "").strip()
        }
        return PodChanges(
            annotations,
            labels,
            limits,
            scheduler=self._options.scheduler_name,
            runtime_class=self._options.runtime_class,
            needs_scheduler=True,  # also with spec.nodeName: only a scheduler gives it GPUs
        )

    def _completed(self, container: PodContainer) -> dict[str, int]:
        """Return the amounts that are added to the container's limits (vgpu-manager §6)."""
        keys, limits = self._keys, container.limits
        if not self._options.completes_limits or keys.number in container.unreadable_limits:
            return {}
        others = (keys.cores, keys.memory)
        # the container asks neither for compute nor for memory
        open_ = not any(limits.get(key) or key in container.unreadable_limits for key in others)
        if limits.get(keys.number):
            return {keys.cores: _WHOLE} if open_ else {}
        return {} if open_ else {keys.number: 1}

    def _defaulted_policies(self) -> tuple[str, ...]:
        return (self._keys.node_policy, self._keys.device_policy, self._keys.topology_mode)

    def _defaults(self, number: int) -> dict[str, str]:
        """Return the annotations for a pod without them, empty for no default; ``number`` is the
        most cards of one of its containers.
        """
        options = self._options
        words = (
            options.node_policy,
            options.device_policy,
            options.topology_mode if number > 1 else "",
        )
        return dict(zip(self._defaulted_policies(), words, strict=True))

    def _state_in(self, texts: Mapping[str, str]) -> Iterator[str]:
        """Yield those keys that only schedulers and agents write, whether as annotations or as
        labels.
        """
        keys = self._keys
        yield from (key for key in (*keys.state_annotations, *keys.state_labels) if key in texts)

    def _is_exempt(self, pod: Pod) -> bool:
        opts_out = pod.labels.get(IGNORE_WEBHOOK_LABEL) == "true"
        return opts_out or MIRROR_POD in pod.annotations

    # -- judgement ---------------------------------------------------------------------------------

    def judge(self, pod: Pod, largest: LargestNode) -> Judgement:
        """Refuse requests that no Node can ever serve, and state, which `changes` would have
        removed.

        A pod that opts out, and the mirror of a static pod, are refused for state only. The kubelet
        runs a static pod whether there is a mirror or not, and without the mirror schedulers would
        not see the cards that the pod has. ``largest`` has the amounts of the largest Node, as far
        as they are known.
        """
        where = f"pod {pod.full_name}"
        forged = [*self._state_in(pod.annotations), *self._state_in(pod.labels)]
        refusals = [
            f"{where}: {key} is written by schedulers and by agents only; remove it from the pod"
            for key in forged
        ]
        if self._is_exempt(pod):
            return Judgement(tuple(refusals))
        if not any(asks(container, self._keys) for container in pod.containers):
            return Judgement(tuple(refusals), tuple(self._without_effect(pod)))
        refusals += [
            f"{where}: annotation {key}: {rule.complaint(pod.annotations[key])}"
            for key, rule in policies.rules(self._keys).items()
            if not rule.allows(pod.annotations.get(key, ""))
        ]
        warnings = list(self._without_effect(pod))
        try:
            wanted = read_demand(pod, self._keys)
        except RequestRefusedError as err:
            return Judgement((*refusals, str(err)), tuple(warnings))
        if wanted is not None:
            contradictions = policies.contradictions(wanted.demand, self._keys)
            refusals += [f"{where}: {problem}" for problem in contradictions]
            refusals += self._too_large(pod, wanted.demand, wanted.names, largest)
            warnings += self._larger_than_seen(wanted.demand, wanted.names, largest)
        return Judgement(tuple(refusals), tuple(warnings))

    def _too_large(
        self, pod: Pod, demand: Demand, names: tuple[str, ...], largest: LargestNode
    ) -> Iterator[str]:
        keys = self._keys
        for container, name in zip(demand.containers, names, strict=True):
            place = f"pod {pod.full_name}, container {name}"
            # `is_limit`: the operator has stated that no Node ever has more GPUs. Otherwise the
            # numbers are those of the Nodes seen so far, which refuse nothing.
            if largest.is_limit and largest.gpus < container.card_count:
                yield (
                    f"{place}: {keys.number} is {container.card_count}, and the largest Node has "
                    f"{largest.gpus} GPUs; ask for at most {largest.gpus}"
                )
            if (container.memory_units or 0) > _MOST_MEMORY_UNITS:
                yield (
                    f"{place}: {keys.memory} is {container.memory_units}, more than any GPU has; "
                    "expected a plain number such as 3000, without Mi or Gi"
                )

    def _larger_than_seen(
        self, demand: Demand, names: tuple[str, ...], largest: LargestNode
    ) -> Iterator[str]:
        keys = self._keys
        waits = "the pod waits until there is a larger one"
        for container, name in zip(demand.containers, names, strict=True):
            place = f"container {quoted(name, _SHOWN)}"
            if not largest.is_limit and 0 < largest.gpus < container.card_count:
                yield (
                    f"{place}: {keys.number} is {container.card_count}, and the largest Node that "
                    f"was seen has {largest.gpus} GPUs; {waits}"
                )
            if 0 < largest.memory_units < (container.memory_units or 0):
                yield (
                    f"{place}: {keys.memory} is {container.memory_units}, and the largest GPU that "
                    f"was seen has {largest.memory_units}; {waits}"
                )

    def _without_effect(self, pod: Pod) -> Iterator[str]:
        keys = self._keys
        for container in pod.containers:
            if not asks(container, keys) and (
                container.limits.get(keys.cores) or container.limits.get(keys.memory)
            ):
                yield (
                    f"container {quoted(container.name, _SHOWN)} gets no GPU: it has "
                    f"{keys.cores} or {keys.memory} and no {keys.number}"
                )
        mode = pod.annotations.get(keys.topology_mode, "").strip().lower()
        # links to the cards of the pod's peers are to count when its own cards are chosen
        crosses = policies.is_true(pod.annotations.get(keys.cross_pod, ""))
        if crosses and not mode.startswith("link"):
            yield f"{keys.cross_pod} has no effect without {keys.topology_mode}: link"

    def size_of(self, node_annotations: Mapping[str, str]) -> LargestNode:
        """Return the number of cards of a Node, whether healthy or not, and the largest memory of
        one of them, in units of a request (the Node's ``deviceMemoryFactor`` MiB).
        """
        # the allocatable slots do not matter here, so any number above 0 will do
        found = read_cards(node_annotations, slots=1, keys=self._keys)
        if isinstance(found, Unfit):  # why the Node can take no pod, e.g. no annotation of cards
            return LargestNode()
        hardware = found.hardware
        return LargestNode(
            gpus=len(hardware.cards),
            memory_units=max(card.memory_mib for card in hardware.cards) // hardware.memory_factor,
        )
