"""Nodes and pods by the thousand for the tests of the scheduler, in the texts of vgpu-manager.

Written from its contract (vgpu-manager §3, §4.1) and without anything of the agent, as is the
checker of what comes of them.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tests.real_node.rig import Rig
from tests.real_node.rig.images import BUSYBOX

CARDS = 8
MEMORY_MIB = 24576
SLOTS = 10
SCHEDULER = "vgpu-scheduler"
PODS = "/api/v1/namespaces/default/pods"
_NODES = "/api/v1/nodes"
_UNREACHABLE = "node.kubernetes.io/unreachable"
# Cards 0 to 3 and 4 to 7 are behind one switch each, with NVLinks between neighbours.
_SAME_SWITCH, _NEIGHBOURS, _OTHER_SOCKET = [5], [5, 10], [1]
# Between all cards of a Node that has them joined, whatever their sockets.
_NVSWITCH = [1, 18]

Json = dict[str, Any]
Policy = Literal["", "binpack", "spread"]


def node_name(number: int) -> str:
    """The name of a Node."""
    return f"n{number:05}"


def uuid(node: int, card: int) -> str:
    """The UUID of a card."""
    return f"GPU-{node:08x}-33f3-4000-8000-{card:012x}"


def register(node: int, *, cards: int = CARDS, ill: Iterable[int] = ()) -> str:
    """The annotation with a Node's cards."""
    return json.dumps(
        [
            {
                "id": card,
                "type": "NVIDIA A10",
                "uuid": uuid(node, card),
                "core": 100,
                "memory": MEMORY_MIB,
                "number": SLOTS,
                "numa": card * 2 // cards,
                "mig": False,
                "busId": f"0000:{card + 16:02x}:00.0",
                "capability": 8.6,
                "healthy": card not in set(ill),
            }
            for card in range(cards)
        ],
        separators=(",", ":"),
    )


def _topology(cards: int, *, joined: bool = False) -> str:
    def link(one: int, other: int) -> list[int]:
        if joined:
            return _NVSWITCH
        if one * 2 // cards != other * 2 // cards:
            return _OTHER_SOCKET
        return _NEIGHBOURS if abs(one - other) == 1 else _SAME_SWITCH

    return json.dumps(
        [
            {
                "index": one,
                "links": {str(other): link(one, other) for other in range(cards) if other != one},
            }
            for one in range(cards)
        ],
        separators=(",", ":"),
    )


def node(number: int, *, cards: int = CARDS, joined: bool = False) -> Json:
    """A Node as a kubelet and vgpu-manager's plugin leave it. With ``joined``, NVLinks join all of
    its cards.
    """
    resources = {
        "cpu": "128",
        "memory": "1Ti",
        "pods": "250",
        "nvidia.com/vgpu-number": str(cards * SLOTS),
        # of the optional plugins, so that a kube-scheduler without an extender places the same pods
        "nvidia.com/vgpu-cores": str(cards * 100),
        "nvidia.com/vgpu-memory": str(cards * MEMORY_MIB),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node_name(number),
            "labels": {
                "kubernetes.io/hostname": node_name(number),
                "nvidia.com/node-driver-version": "570.86.10",
            },
            "annotations": {
                "nvidia.com/node-config-info": (
                    f'{{"deviceSplit":{SLOTS},"coresScaling":1,"memoryFactor":1,"memoryScaling":1}}'
                ),
                "nvidia.com/node-device-register": register(number, cards=cards),
                "nvidia.com/node-device-topology": _topology(cards, joined=joined),
            },
        },
        # A kubelet, too, creates its Node with the status.
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def add_nodes(
    rig: Rig, numbers: Iterable[int], *, cards: int = CARDS, joined: bool = False
) -> None:
    """Create Nodes with these numbers; see `node`."""
    made = [node(number, cards=cards, joined=joined) for number in numbers]
    rig.api.send_all([("POST", _NODES, each) for each in made])


def delete_node(rig: Rig, number: int) -> None:
    """Delete a Node. Its pods stay, as they do until the controller of lost pods acts."""
    rig.api.delete(f"{_NODES}/{node_name(number)}")


def set_ready(rig: Rig, number: int, *, ready: bool) -> None:
    """Write the condition and the taint of a Node whose kubelet has gone silent, as the controller
    of Nodes does, or take both away.
    """
    path = f"{_NODES}/{node_name(number)}"
    condition = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    if not ready:
        condition |= {"status": "Unknown", "reason": "NodeStatusUnknown"}
    taints = [] if ready else [{"key": _UNREACHABLE, "effect": "NoSchedule"}]
    rig.api.patch(f"{path}/status", {"status": {"conditions": [condition]}})
    rig.api.patch(path, {"spec": {"taints": taints}})


def mark_ill(rig: Rig, number: int, cards: Iterable[int]) -> None:
    """Write these cards of a Node as unhealthy, and all others as healthy."""
    annotations = {"nvidia.com/node-device-register": register(number, ill=cards)}
    rig.api.patch(f"{_NODES}/{node_name(number)}", {"metadata": {"annotations": annotations}})


def beat(rig: Rig, number: int) -> None:
    """Change an annotation of a Node that means nothing. kube-scheduler then filters the pods again
    that an extender has refused.
    """
    annotations = {"vgpu-agent.test/beat": str(time.monotonic_ns())}
    rig.api.patch(f"{_NODES}/{node_name(number)}", {"metadata": {"annotations": annotations}})


def remove_all(rig: Rig) -> None:
    """Delete all pods and Nodes. No kubelet ends these pods, so they go at once."""
    remove_pods(rig)
    rig.api.delete(_NODES)


def remove_pod(rig: Rig, name: str) -> None:
    """Delete a pod at once."""
    rig.api.delete(f"{PODS}/{name}", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})


def remove_pods(rig: Rig) -> None:
    """Delete all pods of the namespace ``default``."""
    rig.api.delete(PODS, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})


# -- pods ------------------------------------------------------------------------------------------


def container(name: str, number: int, cores: int = 0, memory: int = 0, **more: Any) -> Json:
    """A container that asks for shares; an amount of 0 is not mentioned."""
    asked = {"vgpu-number": number, "vgpu-cores": cores, "vgpu-memory": memory}
    limits = {f"nvidia.com/{key}": str(value) for key, value in asked.items() if value}
    return {"name": name, "image": BUSYBOX, "resources": {"limits": limits}, **more}


def pod(
    name: str,
    containers: Sequence[Json],
    *,
    init: Sequence[Json] = (),
    policy: Policy = "",
    scheduler: str = SCHEDULER,
    annotations: Mapping[str, str] | None = None,
) -> Json:
    """A pod for the scheduler; ``policy`` is over Nodes and over cards."""
    found = dict(annotations or {})
    if policy:
        found |= {
            "nvidia.com/node-scheduler-policy": policy,
            "nvidia.com/device-scheduler-policy": policy,
        }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": found},
        "spec": {
            "schedulerName": scheduler,
            "automountServiceAccountToken": False,
            "containers": list(containers),
            **({"initContainers": list(init)} if init else {}),
        },
    }


def mixed_pods(prefix: str, number: int, seed: int = 16, *, policy: Policy = "") -> Iterator[Json]:
    """Pods of all shapes: shares, whole cards, several cards, several containers, sidecars, init
    containers, only cores, only memory. As in a cluster, many are of the same few sizes. Without
    ``policy``, each pod has one of them or none.
    """
    rng = random.Random(seed)
    for place in range(number):
        cores, memory = rng.choice((10, 20, 25, 50)), rng.choice((1024, 2048, 4096, 8192))
        init: list[Json] = []
        shape = place % 10
        if shape == 5:
            containers = [container("train", 2, 50, 8192)]
        elif shape == 6:
            containers = [container("first", 1, cores, memory), container("second", 1, 10, 512)]
        elif shape == 7:
            init = [container("prepare", 1, 50, 4096)]
            containers = [container("main", 1, cores, memory)]
        elif shape == 8:
            init = [container("side", 1, 5, 256, restartPolicy="Always")]
            containers = [container("plain", 0), container("main", 1, cores, memory)]
        elif shape == 9:
            containers = [container("whole", rng.choice((1, 1, 2, 4)))]
        elif shape == 4:
            containers = [container("lean", 1, 0, memory)]
        else:
            containers = [container("main", 1, cores, memory)]
        chosen: Policy = policy or rng.choice(("", "", "binpack", "spread"))
        yield pod(f"{prefix}-{place:05}", containers, init=init, policy=chosen)


def create(rig: Rig, pods: Iterable[Json]) -> list[str]:
    """Create pods, many at a time; their names."""
    made = list(pods)
    rig.api.send_all([("POST", PODS, each) for each in made])
    return [each["metadata"]["name"] for each in made]


def bound_pods(nodes: int, a_node: int, prefix: str = "old") -> Iterator[Json]:
    """Pods that run since long, as vgpu-manager has left them: so many on each Node."""
    for number in range(nodes):
        for place in range(a_node):
            made = pod(f"{prefix}-{number:05}-{place}", [container("main", 1, 20, 4096)])
            card = place % CARDS
            claim = f"main[{card}_{uuid(number, card)}_20_4096]"
            made["spec"]["nodeName"] = node_name(number)
            made["metadata"]["annotations"] |= {
                "nvidia.com/pre-allocated": claim,
                "nvidia.com/real-allocated": claim,
                "nvidia.com/predicate-node": node_name(number),
                "nvidia.com/predicate-time": "9223372036854775807",
            }
            made["metadata"]["labels"] = {
                "nvidia.com/assigned-phase": "succeed",
                "nvidia.com/metrics-node": node_name(number),
            }
            yield made
