"""The spec of one grant, and the record that is read back out of it."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cdi.cdi_schema import SCHEMA
from tests.runtime.conftest import MakeGrant
from vgpu_agent.allocation.carrier import InlinedEdits, cdi_name
from vgpu_agent.cdi import grant_spec
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount
from vgpu_agent.model import Share

TOKEN = "0" * 32


def test_a_spec_is_what_a_runtime_accepts(grant: MakeGrant) -> None:
    """Environment, both kinds of mount and a device node,
    under the name that Allocate has answered.
    """
    record, _ = grant()
    edits = Edits(
        {"A": "1", "B": "x=y"},
        (
            Mount("/usr/local/vgpu/libvgpu.so", "/h/libvgpu.so.1", read_only=True),
            Mount("/tmp/vgpu", "/h/vgpu"),
        ),
        (DeviceNode("/dev/nvidia0", "/host/dev/nvidia0", "rwm"),),
    )
    spec = json.loads(grant_spec.spec_text(record, edits))
    jsonschema.validate(spec, SCHEMA)
    assert f"{spec['kind']}={spec['devices'][0]['name']}" == cdi_name(record.token)
    assert spec["devices"][0]["containerEdits"] == {
        "env": ["A=1", "B=x=y"],
        "deviceNodes": [
            {"path": "/dev/nvidia0", "hostPath": "/host/dev/nvidia0", "permissions": "rwm"}
        ],
        "mounts": [
            {
                "hostPath": "/h/libvgpu.so.1",
                "containerPath": "/usr/local/vgpu/libvgpu.so",
                "options": ["rbind", "rprivate", "ro"],
            },
            {
                "hostPath": "/h/vgpu",
                "containerPath": "/tmp/vgpu",
                "options": ["rbind", "rprivate", "rw"],
            },
        ],
    }


def test_the_schema_of_the_tests_refuses_what_a_runtime_refuses(grant: MakeGrant) -> None:
    """A device without edits, which is why a grant without any gets a variable."""
    spec = json.loads(grant_spec.spec_text(grant()[0], Edits()))
    jsonschema.validate(spec, SCHEMA)
    spec["devices"][0]["containerEdits"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, SCHEMA)


def test_the_version_is_the_lowest_that_knows_annotations(grant: MakeGrant) -> None:
    """A runtime refuses a version that is newer than itself."""
    assert json.loads(grant_spec.spec_text(grant()[0], Edits()))["cdiVersion"] == "0.6.0"


def test_a_record_is_read_back_as_it_was_written(grant: MakeGrant) -> None:
    """After a restart the files name the holder of each share, to the last fraction of a second."""
    record, _ = grant(
        shares=(Share("GPU-b", 3000, 50), Share("GPU-a", 0, 0, exclusive=True)),
        decided_at=1795200692.1234567,
    )
    assert (
        grant_spec.read_record(grant_spec.spec_text(record, Edits({"A": "b"})), record.token)
        == record
    )


def test_a_record_says_that_a_scheduler_decided(grant: MakeGrant) -> None:
    """Overcommitted shares are kept after a restart. A record from before there was such a fact
    says nothing and is within its device.
    """
    record, _ = grant(may_overcommit=True)
    assert (
        grant_spec.read_record(grant_spec.spec_text(record, Edits({"A": "b"})), record.token)
        == record
    )
    assert b"may-overcommit" not in grant_spec.spec_text(grant()[0], Edits({"A": "b"}))


def test_a_record_names_the_containers_that_it_rules_out(grant: MakeGrant) -> None:
    """After a restart without the API server, this shows which init containers have ended."""
    record, _ = grant(inits_not_running=("fetch", "prepare"))
    text = grant_spec.spec_text(record, Edits({"A": "b"}))
    assert grant_spec.read_record(text, record.token) == record
    assert b"rules-out" not in grant_spec.spec_text(grant()[0], Edits({"A": "b"}))


def test_the_same_grant_gives_the_same_text(grant: MakeGrant) -> None:
    """Delivering it again then writes nothing."""
    record, provision = grant()
    assert grant_spec.spec_text(record, provision.edits) == grant_spec.spec_text(
        msgspec.structs.replace(record), provision.edits
    )


@pytest.mark.parametrize(
    "edits", [Edits(annotations={"cdi.k8s.io/x": "y"}), Edits(cdi_names=("vendor.com/gpu=1",))]
)
def test_what_a_spec_cannot_carry_is_refused(edits: Edits, grant: MakeGrant) -> None:
    """If it were left out, this would be noticed only when the program misses it."""
    with pytest.raises(
        HostFileError, match=r"(cdi\.k8s\.io/x|vendor\.com/gpu=1).*binding\.mode early"
    ):
        grant_spec.spec_text(grant()[0], edits)


@pytest.mark.parametrize(
    "named",
    [
        Edits(cdi_names=("vendor.com/gpu=a", "vendor.com/channel=0")),
        Edits(
            annotations={
                "cdi.k8s.io/nvidia-device-plugin_1": "vendor.com/gpu=a,vendor.com/channel=0"
            }
        ),
        Edits(
            cdi_names=("vendor.com/gpu=a",),
            annotations={"example.org/x": "vendor.com/gpu=a,vendor.com/channel=0"},
        ),
    ],
)
def test_names_are_replaced_by_what_stands_behind_them(named: Edits, grant: MakeGrant) -> None:
    """A grant's spec cannot refer to names, however the list strategy gives them. The container
    gets the same devices by its own spec.
    """
    hook = {"hookName": "createContainer", "path": "/hook"}
    behind = {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidia0"}],
        "mounts": [{"hostPath": "/h", "containerPath": "/c"}],
        "hooks": [hook],
    }

    own = Edits(
        {"A": "1", "NVIDIA_VISIBLE_DEVICES": "GPU-1"},
        (Mount("/l", "/l"),),
        (DeviceNode("/dev/nvidia0", "/dev/nvidia0"),),
    )
    spec = json.loads(
        grant_spec.spec_text(grant()[0], own.joined(named), InlinedEdits("0.5.0", behind))
    )
    jsonschema.validate(spec, SCHEMA)
    assert grant_spec.other_names(named) == ("vendor.com/gpu=a", "vendor.com/channel=0")
    assert spec["cdiVersion"] == "0.6.0"
    edits = spec["devices"][0]["containerEdits"]
    assert edits["env"] == ["A=1", "NVIDIA_VISIBLE_DEVICES=void"]
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0"}]
    assert [mount["containerPath"] for mount in edits["mounts"]] == ["/l", "/c"]
    assert edits["hooks"] == [hook]


def test_what_is_inlined_may_take_a_newer_version(grant: MakeGrant) -> None:
    """Groups of device nodes are known from 0.7 on.
    The runtime would refuse them under an older version.
    """
    text = grant_spec.spec_text(
        grant()[0],
        Edits(cdi_names=("vendor.com/gpu=a",)),
        InlinedEdits("0.7.0", {"additionalGids": [44]}),
    )
    spec = json.loads(text)
    assert spec["cdiVersion"] == "0.7.0"
    assert spec["devices"][0]["containerEdits"]["additionalGids"] == [44]
    assert grant_spec.read_record(text, grant()[0].token)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "vendor.com/gpu"}, "expected exactly the device"),
        ({"devices": []}, "expected exactly the device"),
        ({"devices": [{"name": "another"}]}, "expected exactly the device"),
        ({"devices": 1}, "devices"),
        ({"annotations": {}}, "vgpu-agent.internal/"),
        ({"annotations": {"a": 1}}, "annotations"),
    ],
)
def test_a_damaged_spec_is_refused_with_the_reason(
    change: dict[str, object], said: str, grant: MakeGrant
) -> None:
    """The text goes into the journal."""
    record, provision = grant()
    spec = {**json.loads(grant_spec.spec_text(record, provision.edits)), **change}
    with pytest.raises(HostFileError, match=said):
        grant_spec.read_record(json.dumps(spec).encode(), record.token)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", "many"),
        ("decided-at", "noon"),
        ("shares", "[{}]"),
        ("shares", "null"),
        ("collected", "relative/path"),
        ("collected", "/a/../../etc"),
        ("collected", "/a/b/"),
        ("rules-out", "first,"),
        ("rules-out", "../etc"),
    ],
)
def test_a_damaged_annotation_is_refused(name: str, value: str, grant: MakeGrant) -> None:
    """Above all a directory to collect that is not plainly one."""
    record, provision = grant()
    spec = json.loads(grant_spec.spec_text(record, provision.edits))
    spec["annotations"][f"vgpu-agent.internal/{name}"] = value
    with pytest.raises(HostFileError):
        grant_spec.read_record(json.dumps(spec).encode(), record.token)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode) | st.just(b"[" * 5000))
def test_junk_never_raises_anything_else(content: bytes) -> None:
    """A file of our name may hold anything."""
    with pytest.raises(HostFileError):
        grant_spec.read_record(content, TOKEN)
