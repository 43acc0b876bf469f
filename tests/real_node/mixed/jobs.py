"""The jobs of a mixed day on a real node:
short ones, long ones, and one family that floods the node; drawn from a seed.

Each job writes down by itself what it finds when it starts, and when it ends, into a folder of the
host. The times are those of ``/proc/uptime``, the same in every container and on the host. Read by
`checker`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.real_node.rig.images import BUSYBOX
from tests.real_node.rig.manifests import LEAN
from tests.real_node.vgpu_manager_node import NUMBER, asks, reading
from tests.real_node.volcano import VGPU

NVIDIA, AWS, VGPU_FAMILY, GPUSHARE = "nvidia", "aws", "volcano-vgpu", "volcano-gpushare"
VGPU_MANAGER = "vgpu-manager"
FAMILIES = (NVIDIA, AWS, VGPU_FAMILY, GPUSHARE, VGPU_MANAGER)
BY_IDS = (NVIDIA, AWS)
RESOURCES: Mapping[str, str] = {
    NVIDIA: "nvidia.com/gpu",
    AWS: "k8s.amazonaws.com/vgpu",
    VGPU_FAMILY: f"{VGPU}number",
    GPUSHARE: "volcano.sh/gpu-memory",
    VGPU_MANAGER: NUMBER,
}
# Both of Volcano's families on one node need two schedulers (docs/mixed-nodes.md).
SCHEDULERS: Mapping[str, str] = {
    NVIDIA: "default-scheduler",
    AWS: "default-scheduler",
    VGPU_FAMILY: "volcano",
    GPUSHARE: "volcano-gpushare",
    VGPU_MANAGER: "vgpu-scheduler",
}
UNIT_MIB = 1024  # of both of Volcano's families, and of a job's memory
SLOTS = 4  # of vgpu-manager's file that a job reads, one for each GPU of the node

_FOUND = "/found"  # the folder of the host, in the container
_SCRIPT = """\
at() {{ cut -d' ' -f1 /proc/uptime; }}
trap 'at > {found}/{name}.end; exit 0' TERM
{{ echo "AT=$(at)"; env; echo "NODES=$(echo /dev/nvidia[0-9]*)"
test ! -e /tmp/cudevshr.cache ||
  echo "REGION_BYTES=$(od -An -v -t u8 -j 1600 -N 8 /tmp/cudevshr.cache | tr -d ' ')"
{reading}; }} > {found}/{name}.writing
mv {found}/{name}.writing {found}/{name}.start
sleep {seconds} & wait $!
at > {found}/{name}.end
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One pod and its fate.

    Attributes:
        arrives_seconds: when it is created, from the beginning of the day.
        init_seconds: how long an init container without a GPU runs before; 0 for none.
        run_seconds: how long it works.
        deleted: it would work on, and is deleted by its owner.
        memory: units of memory that it asks for, where its family counts memory.
    """

    name: str
    family: str
    arrives_seconds: float
    init_seconds: int
    run_seconds: int
    deleted: bool
    memory: int

    @property
    def cores_percent(self) -> int:
        """Percent of a GPU's compute that it asks for; 0 where its family is not asked for any."""
        return 5 * self.memory if self.family == VGPU_MANAGER else 0

    @property
    def limits(self) -> dict[str, int]:
        """The limits of its container."""
        if self.family in BY_IDS:
            return {RESOURCES[self.family]: 1}
        if self.family == GPUSHARE:
            return {RESOURCES[GPUSHARE]: self.memory}
        if self.family == VGPU_MANAGER:
            return asks(1, self.cores_percent, self.memory * UNIT_MIB)
        return {f"{VGPU}number": 1, f"{VGPU}memory": self.memory}

    def manifest(self, folder: str) -> dict[str, Any]:
        """The pod; ``folder`` is where it writes, on the host."""
        script = _SCRIPT.format(
            found=_FOUND,
            name=self.name,
            seconds=100000 if self.deleted else self.run_seconds,
            reading=reading(SLOTS),
        )
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            # a network for each pod would cost this machine more than all else
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 5,
            "schedulerName": SCHEDULERS[self.family],
            "volumes": [{"name": "found", "hostPath": {"path": folder}}],
            "containers": [_container("main", script, self.limits)],
            **LEAN,
        }
        if self.init_seconds:
            spec["initContainers"] = [_container("init", f"sleep {self.init_seconds}", {})]
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name}, "spec": spec}


def _container(name: str, script: str, limits: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": name,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", script],
        "resources": {"limits": {resource: str(number) for resource, number in limits.items()}},
        "volumeMounts": [{"name": "found", "mountPath": _FOUND}],
    }


def draw(seed: int, pods: int, *, families: Sequence[str], flooding: str) -> Iterator[Job]:
    """The jobs of a day, in the order in which they arrive.

    Args:
        seed: decides all of them.
        pods: how many.
        families: the families that the node offers; each but the flooding one has as many jobs.
        flooding: the family of every second job; these come in bursts and are short.
    """
    rng = random.Random(seed)
    others = [family for family in families if family != flooding]
    rng.shuffle(others)
    drawn = itertools.cycle(others)
    now, number = 0.0, 0
    while number < pods:
        for family in [flooding] * min(rng.randint(4, 8), pods - number):
            yield _job(rng, family, now, number, rng.randint(3, 9))
            number += 1
        for family in itertools.islice(drawn, min(rng.randint(4, 8), pods - number)):
            long = rng.random() < 0.25
            yield _job(
                rng,
                family,
                now + rng.random() * 8.0,
                number,
                rng.randint(25, 45) if long else rng.randint(2, 8),
            )
            number += 1
        now += rng.uniform(8.0, 16.0)


def _job(rng: random.Random, family: str, arrives: float, number: int, run_seconds: int) -> Job:
    init_seconds = rng.randint(2, 6) if rng.random() < 0.2 else 0
    return Job(
        f"{family}-{number:03}",
        family,
        arrives,
        init_seconds,
        run_seconds,
        rng.random() < 0.15,
        rng.choice((2, 4, 6, 8)),
    )
