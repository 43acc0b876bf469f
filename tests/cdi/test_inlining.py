"""The edits behind CDI names, put together for a spec of a grant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vgpu_agent.cdi.document import Spec, decode
from vgpu_agent.cdi.inlining import resolve_edits
from vgpu_agent.errors import HostFileError


def _spec(kind: str, common: dict[str, Any], **devices: dict[str, Any]) -> Spec:
    named = [{"name": name, "containerEdits": edits} for name, edits in devices.items()]
    return decode(
        json.dumps(
            {"cdiVersion": "0.6.0", "kind": kind, "devices": named, "containerEdits": common}
        ).encode()
    )


HOOK = {"hookName": "createContainer", "path": "/hook", "args": ["hook", "update-ldcache"]}
GPUS = _spec(
    "vendor.com/gpu",
    {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}],
        "hooks": [HOOK],
    },
    a={"deviceNodes": [{"path": "/dev/nvidia0"}], "hooks": [HOOK]},
    b={"deviceNodes": [{"path": "/dev/nvidia1"}, {"path": "/dev/nvidiactl"}]},
)
CHANNELS = _spec(
    "vendor.com/channel", {}, c={"deviceNodes": [{"path": "/dev/channel0"}], "additionalGids": [44]}
)


def test_common_edits_come_once_and_each_device_adds_its_own() -> None:
    """Two GPUs: the control node and the hook once, both GPUs' nodes, in order."""
    assert resolve_edits(
        ["vendor.com/gpu=a", "vendor.com/gpu=b", "vendor.com/gpu=a"], [GPUS, CHANNELS]
    ) == (
        "0.6.0",
        {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [
                {"path": "/dev/nvidiactl"},
                {"path": "/dev/nvidia0"},
                {"path": "/dev/nvidia1"},
            ],
            "hooks": [HOOK],
        },
    )


def test_what_a_device_sets_over_the_common_edits_stays() -> None:
    """Common edits come before all devices of their spec, and not again before the second one,
    over the first.
    """
    spec = _spec(
        "vendor.com/gpu",
        {"deviceNodes": [{"path": "/dev/nvidiactl", "permissions": "r"}]},
        a={"deviceNodes": [{"path": "/dev/nvidiactl", "permissions": "rwm"}]},
        b={"env": ["A=b"]},
    )
    _, edits = resolve_edits(["vendor.com/gpu=a", "vendor.com/gpu=b"], [spec])
    assert edits["deviceNodes"] == [{"path": "/dev/nvidiactl", "permissions": "rwm"}]


def test_the_version_is_what_the_edits_take() -> None:
    """Groups are known from CDI 0.7 on."""
    version, edits = resolve_edits(["vendor.com/channel=c"], [GPUS, CHANNELS])
    assert version == "0.7.0"
    assert edits["additionalGids"] == [44]


def test_a_name_that_nothing_stands_behind_is_refused() -> None:
    """The alternative would be a container without its GPU."""
    with pytest.raises(
        HostFileError, match=r"no CDI spec of this node has the device vendor\.com/gpu=z"
    ):
        resolve_edits(["vendor.com/gpu=z"], [GPUS])


def test_two_specs_of_one_kind_have_common_edits_of_their_own() -> None:
    """Runtimes count specs and not kinds: another program may describe MIG instances in a second
    file under the kind of the first.
    """
    other = _spec(
        "vendor.com/gpu", {"env": ["SECOND=1"]}, m={"deviceNodes": [{"path": "/dev/nvidia-cap1"}]}
    )
    _, edits = resolve_edits(["vendor.com/gpu=a", "vendor.com/gpu=m"], [GPUS, other])
    assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void", "SECOND=1"]
