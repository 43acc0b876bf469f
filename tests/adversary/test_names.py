"""Attacks by names: a UID or a container's name that leads out of the folder in
which containers have their directories.

Kubernetes allows no such name, so each of these takes a forged API server, a damaged file or a
forged record. None may become a path.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.golden import U0
from vgpu_agent.allocation.carrier import GrantRecord
from vgpu_agent.cdi import grant_spec
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError, HostFileError, InvalidNameError
from vgpu_agent.grpc.wire import encode_field
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.isolation.hami_core import HamiCore
from vgpu_agent.kubelet.checkpoint import parse_checkpoint
from vgpu_agent.kubelet.held_ids import decode_pod_resources
from vgpu_agent.model import Owner, Share
from vgpu_agent.pods import container_directory

UID = "5b2f1c5e-8f5f-4f64-9d3b-0d5f5a3c9b11"
BAD_UIDS = (
    "../../../etc",
    "a/b",
    "..",
    ".",
    "",
    ".hidden",
    "a_b",
    "a\nb",
    "a\n",
    "a\0",
    "ä",
    "-a",
    "x" * 129,
)
BAD_CONTAINERS = ("../main", "a/b", "..", "", "a_b", "Main", "a.b", "-a", "a-", "a\n", "x" * 64)
NAMES = [*((uid, "main") for uid in BAD_UIDS), *((UID, name) for name in BAD_CONTAINERS)]


@pytest.mark.parametrize(("uid", "container"), NAMES)
def test_no_name_makes_a_path_that_leads_elsewhere(uid: str, container: str) -> None:
    """The last defence: a caller that builds a directory's name is refused,
    and nothing of the text is in a path.
    """
    with pytest.raises(InvalidNameError, match="no directory is made"):
        container_directory(uid, container)
    target = Target(
        pod_uid=uid,
        container=container,
        grant="g",
        environment=frozenset(),
        shares=(),
        oversubscribed=False,
        limit_cores=True,
    )
    with pytest.raises(InvalidNameError):
        HamiCore("/host", "/host/libvgpu.so").provision(target)


def test_no_two_containers_share_a_directory_by_the_spelling_of_their_names() -> None:
    """There is one underscore in the name of a directory,
    so UID and container can be read back from it.
    """
    assert container_directory(UID, "main") == f"{UID}_main"
    for uid, container in ((f"{UID}_a", "b"), (UID, "a_b")):
        with pytest.raises(InvalidNameError):
            container_directory(uid, container)


@pytest.mark.parametrize(
    "pod",
    [
        *({"metadata": {"uid": uid}} for uid in BAD_UIDS),
        *({"spec": {"containers": [{"name": name}]}} for name in BAD_CONTAINERS),
        *({"spec": {"initContainers": [{"name": name}]}} for name in BAD_CONTAINERS),
        {"metadata": {"name": "../nodes/n"}},
        {"metadata": {"namespace": "a/../../nodes"}},
    ],
)
def test_no_forged_pod_enters_the_book(pod: dict[str, Any]) -> None:
    """Paths of requests contain names of a pod, too. The error quotes the name within bounds."""
    good: dict[str, Any] = {
        "metadata": {"name": "p", "namespace": "n", "uid": UID},
        "spec": {"containers": [{"name": "main"}]},
    }
    forged = {
        "metadata": {**good["metadata"], **pod.get("metadata", {})},
        "spec": pod.get("spec", good["spec"]),
    }
    assert decode.pod(msgspec.json.encode(good)).uid == UID
    with pytest.raises(ClusterError, match="it is ignored") as caught:
        decode.pod(msgspec.json.encode(forged))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("uid", "container"), NAMES)
def test_no_forged_entry_of_the_checkpoint_is_believed(uid: str, container: str) -> None:
    """One such entry is left out, and those beside it count."""
    entries = [
        {
            "PodUID": each,
            "ContainerName": name,
            "ResourceName": "r",
            "DeviceIDs": {"-1": ["a"]},
            "AllocResp": "",
        }
        for each, name in ((uid, container), (UID, "main"))
    ]
    content = json.dumps(
        {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}
    ).encode()
    assert [
        (entry.pod_uid, entry.container_name) for entry in parse_checkpoint(content, name="c")
    ] == [(UID, "main")]


@pytest.mark.parametrize(
    ("namespace", "pod", "container"),
    [
        ("n", "p", "../main"),
        ("n", "../p", "main"),
        ("../n", "p", "main"),
        ("n", "p/q", "main"),
        ("", "p", "main"),
    ],
)
def test_no_forged_entry_of_pod_resources_is_believed(
    namespace: str, pod: str, container: str
) -> None:
    """The same for the other record of kubelet's."""

    def listed(namespace: str, pod: str, container: str) -> bytes:
        devices = encode_field(2, encode_field(1, b"r") + encode_field(2, b"a"))
        return encode_field(
            1,
            encode_field(1, pod.encode())
            + encode_field(2, namespace.encode())
            + encode_field(3, encode_field(1, container.encode()) + devices),
        )

    found = decode_pod_resources(listed(namespace, pod, container) + listed("n", "good", "main"))
    assert [holding.owner.pod for holding in found] == ["good"]


@pytest.mark.parametrize(("uid", "container"), NAMES)
def test_no_forged_record_beside_a_spec_is_read_back(uid: str, container: str) -> None:
    """The names in a record are looked up, written about and in the end removed."""
    record = GrantRecord(
        "t" * 32, "f", "r", 1, Owner(container, uid, "n", "p"), (Share(U0, 1000),), "by", 1.0
    )
    with pytest.raises(HostFileError, match="names that Kubernetes allows"):
        grant_spec.read_record(grant_spec.spec_text(record, Edits({"A": "b"})), record.token)
