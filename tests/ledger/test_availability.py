"""Devices that a decision may name."""

from __future__ import annotations

from vgpu_agent.ledger.accounting import Device
from vgpu_agent.ledger.availability import own_trouble, strangers
from vgpu_agent.ledger.cordons import Cordons
from vgpu_agent.model import Resource, Share

GPU, OTHER, SLICE = "GPU-1", "GPU-2", "MIG-1"
DEVICES = {
    GPU: Device(GPU, GPU, 40960),
    OTHER: Device(OTHER, OTHER, 40960),
    SLICE: Device(SLICE, GPU, 4864),
}


def test_an_instance_of_an_offered_gpu_may_be_decided_for() -> None:
    """An instance is as good as its GPU where GPUs are offered and instances are given."""
    assert strangers([Share(SLICE), Share(GPU)], (GPU,), DEVICES) == []


def test_other_devices_are_strangers() -> None:
    """A GPU that is not offered, its instance, and an unknown device."""
    assert strangers([Share(GPU), Share(SLICE), Share("MIG-9")], (OTHER,), DEVICES) == [
        GPU,
        SLICE,
        "MIG-9",
    ]


def test_a_device_may_be_listed_and_never_given_out() -> None:
    """Its own fault comes first, because that is what an operator can mend."""
    resource = Resource("example.com/gpu", "example", (), never_granted={GPU: "excluded"})
    assert own_trouble(GPU, resource, DEVICES, Cordons()) == "excluded"
    assert own_trouble(OTHER, resource, DEVICES, Cordons()) == ""
    ill = {**DEVICES, GPU: Device(GPU, GPU, 40960, "XID 79")}
    assert own_trouble(GPU, resource, ill, Cordons()) == "XID 79"
