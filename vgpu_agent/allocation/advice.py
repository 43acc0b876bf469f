"""The second half of a refusal: the holders of the GPU, what frees it, what the pod's owner can do,
and the GPUs with room now.

`late_start` and `by_ids` add it to the ledger's refusals. The text goes into a pod's status and
its events, which every user of its namespace can read, so it names no pods of others;
``vgpu-agent status`` does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vgpu_agent.errors import listed
from vgpu_agent.ledger import availability
from vgpu_agent.placement.rooms import DeviceDemand, lack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.config.binding import Binding
    from vgpu_agent.errors import LedgerError
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.ledger.uses import GpuUse
    from vgpu_agent.model import Inventory, Resource, Share

_MAX_GPUS = 8  # in one sentence


def for_scheduled(
    err: LedgerError,
    ledger: Ledger,
    resource: Resource,
    shares: Iterable[Share],
    inventory: Inventory,
    binding: Binding,
) -> str:
    """Return the advice for a pod whose scheduler has named the GPU;
    ``shares`` are what it asks for, ``err`` says on which device they were refused, and
    ``binding`` has the settings ``binding.*``.
    """
    share = next(
        (share for share in shares if share.device == err.device and inventory.gpu(share.device)),
        None,
    )
    sentences = [
        *_use(err, ledger, inventory),
        "The pod's scheduler has named this GPU, so the pod waits for it.",
    ]
    sentences.append(for_waiting(binding))
    if share is not None:
        demand = DeviceDemand(
            count=1,
            memory_mib=lambda _: share.memory_mib,
            cores_percent=share.cores_percent,
            text="",  # the demand in words, which only errors show
        )
        # `lack` names what a room lacks for the demand
        fitting = [
            room.device
            for room in ledger.rooms(resource.name)
            if room.device != err.device and not lack(room, demand)
        ]
        sentences.append(_alternatives(fitting, inventory))
    return " ".join(sentences)


def for_waiting(binding: Binding) -> str:
    """Return the remedies for a pod that the kubelet tries to start again and again,
    and that stays bound to this node meanwhile; ``binding`` has the settings ``binding.*``.
    """
    if seconds := binding.refused_evict_seconds:
        anew = (
            "To have the pod scheduled anew at once, delete it; binding.refusedEvictSeconds does "
            f"so after {seconds:g} s."
        )
    else:
        anew = (
            "To have the pod scheduled anew, delete it, or set binding.refusedEvictSeconds (now 0: "
            "never)."
        )
    return f"The kubelet tries again by itself. {anew}"


def for_ids(err: LedgerError, ledger: Ledger, resource: Resource, inventory: Inventory) -> str:
    """Return the advice for a pod whose ids the kubelet has chosen,
    and which the kubelet fails for good after a refusal.
    """
    rooms = ledger.rooms(resource.name)
    free = [
        room.device
        for room in rooms
        if not room.trouble  # why no container may get anything of it
        and not room.exclusive
        and room.holders_free  # how many more containers may share it
        and room.device != err.device
    ]
    final = (
        "The kubelet chose these ids from an older list and fails the pod for good. Its "
        "controller creates a new pod; a pod without a controller must be created again."
    )
    return " ".join([*_use(err, ledger, inventory), final, _alternatives(free, inventory)])


def _use(err: LedgerError, ledger: Ledger, inventory: Inventory) -> list[str]:
    """Say how many pods of another family use the GPU, if that is the reason of the error."""
    found = inventory.device(err.device)  # (GPU, its MIG instance or None)
    gpu = found[0].uuid if found else err.device
    # `uses`: of each GPU, the family that it serves, and the pods that have shares of it
    use = next((use for use in ledger.uses if use.gpu == gpu), None)
    # `serves` returns the ledger's reason for a GPU that another family has
    if use is None or not use.family or availability.serves(use.family) not in err.text:
        return []
    return [
        (
            f"{_pods(use)} of {use.family} {'has' if use.holders == 1 else 'have'} shares of it, "
            f"since {_moment(use)}."
        )
    ]


def _pods(use: GpuUse) -> str:
    return "1 pod" if use.holders == 1 else f"{use.holders} pods"


def _moment(use: GpuUse) -> str:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(use.since))
    # earlier: the agent has found the shares when it started
    return f"{since} or earlier" if use.or_earlier else since


def _alternatives(devices: Iterable[str], inventory: Inventory) -> str:
    gpus: dict[str, None] = {}
    for device in devices:
        found = inventory.device(device)
        gpus[str(found[0].index) if found else device] = None
    if not gpus:
        return "No other GPU of this node has room for it now."
    return f"Room for it now: GPU {listed(gpus, _MAX_GPUS)}."
