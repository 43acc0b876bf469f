"""The families that a GPU is offered to, on a node where several have it.

A GPU serves one family at a time, and the families' schedulers know nothing of each other. Claims
keep a GPU for a pod that is on its way, and turns offer a returned GPU to one family after the
other. Drains make a GPU return that one family would never give back: the family's pods get nothing
new of it until it is free. A withdrawal is the moment in which schedulers already see fewer ids of
a family, while the kubelet still has them for pods that are on their way. This module brings the
four in line with each change of the ledger. On a node with one family there is nothing to decide.

`book` has one `Arbitration`, asks it about each device, and tells it of every change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.ledger import availability
from vgpu_agent.ledger.claims import in_order, oldest_by_gpu, why_kept
from vgpu_agent.ledger.drains import Drains
from vgpu_agent.ledger.turns import Turns
from vgpu_agent.ledger.withdrawals import Withdrawals
from vgpu_agent.model import Decider

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from vgpu_agent.ledger.accounting import Device
    from vgpu_agent.ledger.claims import Claim
    from vgpu_agent.ledger.cordons import Cordons
    from vgpu_agent.ledger.grants import Grants
    from vgpu_agent.ledger.offers import Offers
    from vgpu_agent.model import Share


class Arbitration:
    """The decision about which families are offered which GPUs.

    State: claims, turns, drains and withdrawals, and the devices of the newest change. The offers,
    grants and cordons are the ledger's.

    Attributes:
        claims: the GPUs that are kept for pods, the oldest claim first.
        oldest_claims: GPU → the claim that decides.
    """

    def __init__(
        self, offers: Offers, grants: Grants, cordons: Cordons, clock: Callable[[], float]
    ) -> None:
        """Begin without devices; `follow` brings them."""
        self._offers, self._grants, self._cordons, self._clock = offers, grants, cordons, clock
        self._devices: Mapping[str, Device] = {}
        self.claims: tuple[Claim, ...] = ()
        self.oldest_claims: Mapping[str, Claim] = {}
        # families that offer something and start containers
        self._active_families: frozenset[str] = frozenset()
        # families whose resources are not offered to the kubelet at the moment, so they get no turn
        self._withheld_families: frozenset[str] = frozenset()
        self._reset()
        # a cache: version of the offers and devices that it is for, GPUs by family
        self._offered_gpus: tuple[int, Mapping[str, Device], dict[str, frozenset[str]]] | None = (
            None
        )
        # a cache: number of a grant → its shares, and the family and GPUs that follow from them
        self._gpus_of_grants: dict[int, tuple[Sequence[Share], tuple[str, frozenset[str]]]] = {}

    def _reset(self) -> None:
        self._withdrawals = Withdrawals(self._clock)
        # a turn begins once the kubelet can no longer give the GPU to another family
        self._turns = Turns(self._clock, withdrawn_for_seconds=self._withdrawals.seconds_at_kubelet)
        self._drains = Drains(self._clock)
        self._is_new = True  # nothing has used the three since

    # -- changes -----------------------------------------------------------------------------------

    def serve(self, paused: Collection[str]) -> None:
        """Arbitrate between the families that offer something now, without those in ``paused``,
        which start no container for the time being.
        """
        able = {
            resource.family
            for resource in self._offers.in_order
            # `NOBODY`: it is only there for schedulers to count
            if resource.decided_by is not Decider.NOBODY
        }
        self._active_families = frozenset(able.difference(paused))

    def withhold(self, families: Iterable[str]) -> bool:
        """Give no turns to ``families``, whose resources are not offered to the kubelet at the
        moment; return whether these have changed.
        """
        withheld, before = frozenset(families), self._withheld_families
        self._withheld_families = withheld
        return withheld != before

    def claim(self, claims: Iterable[Claim]) -> bool:
        """Keep GPUs for exactly ``claims``; return whether these have changed."""
        if (ordered := in_order(claims)) == self.claims:
            return False
        self.claims, self.oldest_claims = ordered, oldest_by_gpu(ordered)
        return True

    def follow(
        self, devices: Mapping[str, Device], number: int, *, holders_unknown: bool, listed: bool
    ) -> bool:
        """Bring turns, drains and withdrawals in line with what is held and claimed.

        Args:
            devices: of the ledger, from now on.
            number: the number of the round (all withdrawals that begin with this change of the
                ledger), if there are any.
            holders_unknown: it is not known which family has which GPU.
            listed: the kubelet has been sent a list of ids; before, no withdrawal is needed.

        Returns:
            Whether a family is offered less than before because of another one.
        """
        self._devices = devices
        # On a node with one family there is no race, and each change would cost a look at all
        # grants.
        if not self.serves_several_families:
            if not self._is_new:
                self._reset()
            return False
        self._is_new = False
        holding = self.families_by_gpu()
        in_use = {gpu: claim.family for gpu, claim in self.oldest_claims.items()} | holding
        self._turns.follow(in_use, self._candidates)
        # a GPU is drained for a family that had something recently, has nothing now, and is offered
        # no free GPU
        self._drains.follow(
            self._held_gpus(), holding, self._able_families, lambda: self._offered_free(in_use)
        )
        offered = [] if holders_unknown else self._offered_to(holding)
        return self._withdrawals.follow(offered, number, listed=listed)

    def move_on(self) -> bool:
        """Take note of the time; return whether an offer has changed because of it."""
        moved = self._turns.move_on()
        return self._withdrawals.end() or moved

    def note_written_counts(self, number: int | None) -> bool:
        """Take note that the Node has the counts of all rounds of withdrawals up to ``number``, or,
        with None, that the agent cannot write them. Return whether a withdrawal ends earlier
        because of that. The counts are the numbers of ids in the Node's status; the withdrawals
        that begin with one change of the ledger are a round.
        """
        return self._withdrawals.note_written_counts(number)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def serves_several_families(self) -> bool:
        """Tell whether families may race for a GPU."""
        return len(self._active_families) > 1

    @property
    def seconds_left(self) -> float | None:
        """Seconds until an offer changes because of the time alone; None when none does."""
        return min(
            (
                left
                for left in (self._turns.seconds_left, self._withdrawals.seconds_left)
                if left is not None
            ),
            default=None,
        )

    @property
    def turns_over_in_seconds(self) -> float | None:
        """Seconds until all GPUs that were returned by now are offered to all;
        None when they are.
        """
        return self._turns.over_in_seconds

    def why_kept(self, gpu: str, family: str) -> str:
        """Explain why ``family`` gets no new share of ``gpu`` because of a claim;
        empty when none keeps it away.
        """
        return why_kept(gpu, family, self.oldest_claims)

    def why_waits(self, gpu: str, family: str) -> str:
        """Explain why ``family`` is not offered ``gpu`` although no other family has or claims it:
        because of turns, or because the GPU is drained; empty when it is offered.
        """
        return self._turns.why_waits(gpu, family) or self._drains.why_drained(gpu, family)

    def still_at_kubelet(self, gpu: str, family: str) -> bool:
        """Tell whether the kubelet may still give the GPU to pods of the family."""
        return self._withdrawals.still_at_kubelet(gpu, family)

    def is_first(self, gpu: str, family: str) -> bool:
        """Tell whether ``family`` alone is offered the GPU now, because it is its turn."""
        return self._turns.is_first(gpu, family)

    def families_by_gpu(self) -> dict[str, str]:
        """Map each GPU of which something is held to the family that has it."""
        return {
            self._gpu_of(share.device): grant.family
            for grant in self._grants.by_number.values()
            for share in grant.shares
        }

    def shared_gpus(self, family: str) -> frozenset[str]:
        """GPUs that families other than ``family`` are offered as well;
        empty where it is the only one.
        """
        if (
            self._offered_gpus is None
            or self._offered_gpus[0] != self._offers.version
            or self._offered_gpus[1] is not self._devices
        ):
            gpus: dict[str, set[str]] = {}
            for resource in self._offers.in_order:
                known = (
                    device
                    for uuid in self._offers.devices(resource)
                    if uuid not in resource.never_granted
                    if (device := self._devices.get(uuid))
                )
                gpus.setdefault(resource.family, set()).update(
                    device.gpu
                    for device in known
                    if not (resource.requires_mig_off and device.divided)
                )
            self._offered_gpus = (
                self._offers.version,
                self._devices,
                {name: frozenset(uuids) for name, uuids in gpus.items()},
            )
        return frozenset().union(
            *(gpus for name, gpus in self._offered_gpus[2].items() if name != family)
        )

    # -- how it is done ----------------------------------------------------------------------------

    @property
    def _able_families(self) -> frozenset[str]:
        """Return the families whose pods can start now: the active ones whose resources are offered
        to the kubelet.
        """
        return self._active_families - self._withheld_families

    def _gpu_of(self, device: str) -> str:
        return known.gpu if (known := self._devices.get(device)) else device

    def _candidates(self, gpu: str) -> list[str]:
        """Return the families that could grant something of a free GPU."""
        able = (
            resource.family
            for resource in self._offers.in_order
            if resource.decided_by is not Decider.NOBODY and resource.family in self._able_families
            for device in self._offers.devices(resource)
            if (known := self._devices.get(device)) is not None and known.gpu == gpu
            # `own_trouble`: why nothing of the device is granted even if it is free
            if not availability.own_trouble(device, resource, self._devices, self._cordons)
        )
        return list(dict.fromkeys(able))

    def _held_gpus(self) -> dict[int, tuple[str, frozenset[str]]]:
        """Return the family and the GPUs of each grant with shares, by number;
        computed again for changed grants only.
        """
        known = self._gpus_of_grants
        self._gpus_of_grants = {
            number: known[number]
            if number in known and known[number][0] is grant.shares
            else (
                grant.shares,
                (grant.family, frozenset(self._gpu_of(share.device) for share in grant.shares)),
            )
            for number, grant in self._grants.by_number.items()
            if grant.shares
        }
        return {number: held for number, (_, held) in self._gpus_of_grants.items()}

    def _offered_free(self, in_use: Collection[str]) -> set[str]:
        """Return the families that are offered a GPU of which nothing is held or claimed."""
        free = {device.gpu for device in self._devices.values()}.difference(in_use)
        return {
            family
            for gpu in free
            for family in self._candidates(gpu)
            if not self._turns.why_waits(gpu, family)
        }

    def _offered_to(self, holding: Mapping[str, str]) -> list[tuple[str, str]]:
        """List each GPU with each family that no other family keeps from it."""
        return [
            (gpu, family)
            for gpu in {device.gpu for device in self._devices.values()}
            for family in self._active_families
            if holding.get(gpu, family) == family
            and not self.why_kept(gpu, family)
            and not self.why_waits(gpu, family)
        ]
