"""The shares that a container gets of the family, and the limits that its backend is given
(vgpu-manager §7).
"""

from __future__ import annotations

import msgspec
import pytest

from tests.families.vgpu_manager.golden import (
    KEYS,
    UID,
    Targets,
    container,
    family,
    pod,
    question,
    written,
)
from tests.families.vgpu_manager.node import INVENTORY, NUMBER, U0, U1
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.isolation.vgpu_control import CardLimit, ComputePolicy, ControlTarget
from vgpu_agent.model import Share


def test_the_golden_container_reaches_the_backend() -> None:
    """vgpu-manager §13.4: what the library is told is made of this."""
    backend = Targets()
    of = family(backend)
    provision = of.provision(question(pod(annotations=written())), (Share(U0, 1024, 10),))
    assert provision.edits.environment["NVIDIA_VISIBLE_DEVICES"] == U0
    assert backend.asked == [
        ControlTarget(
            pod_uid=UID,
            pod="gpu-pod",
            namespace="default",
            container="default",
            ids=(f"{U0}::0",),
            cards=(CardLimit(0, U0, 10, 1024, 100, 24576),),
            driver_version="570.86.10",
            cuda_version="12.8",
        )
    ]


def test_what_pod_and_node_say_reaches_the_backend() -> None:
    """vgpu-manager:D34: the Node as it was read; and the container's own switches."""
    backend = Targets()
    of = family(backend, memory_scaling=2.0, cores_scaling=1.5)
    values = {"CUDA_MEM_OVERSOLD": "Enabled", "DISABLE_VGPU_CONTROL": "0"}
    about = pod(container(number=2, values=values), annotations={KEYS.compute_policy: "balance"})
    asked = question(about, of=of, node_annotations={KEYS.compute_policy: "none"})
    of.provision(asked, (Share(U1, 49152, 100), Share(U0, 49152, 100)))
    (target,) = backend.asked
    assert (target.policy, target.memory_ratio) == (ComputePolicy.BALANCE, 2.0)
    assert (target.oversold, target.disabled) == (True, False)
    assert target.cards == (
        CardLimit(1, U1, 100, 49152, 150, 49152),
        CardLimit(0, U0, 100, 49152, 150, 49152),
    )


def test_a_card_that_is_gone_is_waited_for() -> None:
    """The kubelet asks again."""
    with pytest.raises(UnhealthyDeviceError, match=f"GPU {U1} was decided .* and is missing"):
        family().provision(
            question(pod(), inventory=msgspec.structs.replace(INVENTORY, gpus=INVENTORY.gpus[:1])),
            (Share(U1, 1, 1),),
        )


def test_names_of_the_default_domain_stay_ours() -> None:
    """The kubelet's records may have them from before a change of the domain."""
    of = family(keys=Keys("example.com"))
    for name in (NUMBER, "example.com/vgpu-memory"):
        assert of.owns(name) is Ownership.CERTAIN
    assert of.owns("nvidia.com/gpu") is Ownership.NONE
