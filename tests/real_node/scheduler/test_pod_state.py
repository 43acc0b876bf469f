"""components/pod-state on a real API server: who may change what a pod holds.

A restarted extender reads the claims of bound pods from their annotations. All accounts here have
the same rights, so that nothing but the policy tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from tests.manifests.documents import COMPONENTS
from tests.real_node.deployment import MERGE, NAMESPACE
from tests.real_node.rig import Rig
from tests.real_node.rig.api import Api, ApiError
from tests.real_node.scheduler.objects import PODS, add_nodes, node_name
from vgpu_agent.families.vgpu_manager.keys import Keys

_POLICY = str(COMPONENTS / "pod-state" / "policy.yaml")
_KEYS = Keys()
_WRITERS = (
    (NAMESPACE, "vgpu-scheduler"),
    (NAMESPACE, "vgpu-agent"),
    ("kube-system", "vgpu-manager-scheduler"),
    ("kube-system", "vgpu-manager-device-plugin"),
)
_TENANT = ("default", "tenant")
# Names that differ from a writer's by the namespace or by an end.
_OTHERS = (_TENANT, ("default", "vgpu-agent"), ("kube-system", "vgpu-manager-scheduler-2"))
_ROLE = "pod-state-test"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_PATIENCE_SECONDS = 30
_STATE = {
    "annotations": dict.fromkeys(_KEYS.state_annotations, "1"),
    "labels": dict.fromkeys(_KEYS.state_labels, "a"),
}


@pytest.fixture
def accounts(plane: Rig) -> Iterator[dict[tuple[str, str], Api]]:
    """The API server as the accounts see it, under the policy; gone afterwards."""
    names = (*_WRITERS, *_OTHERS)
    rules = [
        {
            "apiGroups": [""],
            "resources": ["pods", "pods/status", "pods/ephemeralcontainers", "pods/resize"],
            "verbs": ["get", "create", "patch", "update"],
        },
        {"apiGroups": [""], "resources": ["pods/binding"], "verbs": ["create"]},
    ]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _ROLE}
    subjects = [
        {"kind": "ServiceAccount", "namespace": namespace, "name": name}
        for namespace, name in names
    ]
    try:
        plane.api.post(f"{_RBAC}/clusterroles", {"metadata": {"name": _ROLE}, "rules": rules})
        plane.api.post(
            f"{_RBAC}/clusterrolebindings",
            {"metadata": {"name": _ROLE}, "roleRef": reference, "subjects": subjects},
        )
        found = {
            (namespace, name): plane.api.as_user(f"system:serviceaccount:{namespace}:{name}")
            for namespace, name in names
        }
        plane.kubectl("apply", "--validate=strict", "-f", _POLICY)
        plane.api.post(PODS, _pod("probe"))
        # The API server takes a moment to know the rights, without which all are refused, and to
        # enforce a new policy.
        plane.wait_for(
            lambda: _status(found[_WRITERS[0]], "probe?dryRun=All", {"metadata": _STATE}) == 200,
            _PATIENCE_SECONDS,
            what="the rights",
        )
        plane.wait_for(
            lambda: _status(found[_TENANT], "probe?dryRun=All", {"metadata": _STATE}) == 403,
            _PATIENCE_SECONDS,
            what="the policy",
        )
        yield found
    finally:
        plane.kubectl("delete", "-f", _POLICY, "--ignore-not-found")
        for path in (f"{_RBAC}/clusterrolebindings/{_ROLE}", f"{_RBAC}/clusterroles/{_ROLE}"):
            if plane.api.exists(path):
                plane.api.delete(path)


def _pod(name: str, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "example.com/none", "resources": {}}]
    return {"metadata": {"name": name}, "spec": {"containers": containers, **spec}}


def _status(api: Api, pod: str, body: Mapping[str, Any]) -> int:
    """The HTTP status of a patch."""
    try:
        api.patch(f"{PODS}/{pod}", dict(body), content_type=MERGE)
    except ApiError as err:
        return err.status
    return 200


def _state_of(rig: Rig, pod: str) -> dict[str, dict[str, str]]:
    metadata = rig.api.get(f"{PODS}/{pod}")["metadata"]
    return {
        kind: {key: text for key, text in metadata.get(kind, {}).items() if key in values}
        for kind, values in _STATE.items()
    }


_KINDS = [(kind, key) for kind, values in _STATE.items() for key in values]
_PATHS = ("bound", "bound/status", "bound/ephemeralcontainers", "bound/resize")


def _changes(api: Api, paths: Iterable[str], text: str | None) -> dict[tuple[str, str], int]:
    """Patch each key by each path; path and key → the status."""
    return {
        (path, key): _status(api, path, {"metadata": {kind: {key: text}}})
        for path, (kind, key) in itertools.product(paths, _KINDS)
    }


def test_nobody_but_the_named_accounts_changes_what_a_pod_holds(
    plane: Rig, accounts: dict[tuple[str, str], Api]
) -> None:
    """Neither written, nor changed, nor taken away, by the pod or by any subresource; also by none
    who may do everything else. All other keys and fields are free.
    """
    plane.api.post(PODS, _pod("bound"))
    pod_and_status = _PATHS[:2]
    for who in _OTHERS:  # there are none yet
        assert set(_changes(accounts[who], pod_and_status, "x").values()) == {403}, who
    for who, text in zip(_WRITERS, ("1", "2", None, "4"), strict=True):
        assert set(_changes(accounts[who], ("bound",), text).values()) == {200}, who
    held = _state_of(plane, "bound")
    assert held == {kind: dict.fromkeys(values, "4") for kind, values in _STATE.items()}
    tenant = accounts[_TENANT]
    for text in ("x", None):
        assert set(_changes(tenant, pod_and_status, text).values()) == {403}
        # These take over nothing but their own part of the pod, refused or not.
        _changes(tenant, _PATHS[2:], text)
    assert _state_of(plane, "bound") == held
    free = {"annotations": {"nvidia.com/node-scheduler-policy": "spread", "a.b/c": "x"}}
    for path in pod_and_status:
        assert _status(tenant, path, {"metadata": {**free, "labels": {"app": path[-1]}}}) == 200
    assert _status(tenant, "bound", {"spec": {"activeDeadlineSeconds": 9999}}) == 200


def test_a_refusal_names_the_key_and_the_user(
    plane: Rig, accounts: dict[tuple[str, str], Api]
) -> None:
    """An admin who has to correct a pod is refused, too, and reads where to name an account."""
    with pytest.raises(
        ApiError,
        match=r"schedulers and agents write nvidia\.com/pre-allocated, and nobody else; "
        r"\S+ is none that components/pod-state names",
    ):
        plane.api.patch(
            f"{PODS}/probe", {"metadata": {"annotations": {_KEYS.pre_allocated: "main[]"}}}
        )
    assert accounts


def test_a_binding_writes_claims_and_a_new_pod_brings_none(
    plane: Rig, accounts: dict[tuple[str, str], Api]
) -> None:
    """A pod that names its own Node passes all schedulers by, and would hold what it says. Without
    a Node its texts count for nothing, and old manifests of pods can be applied as they are.
    """
    add_nodes(plane, range(1))
    tenant, extender = accounts[_TENANT], accounts[_WRITERS[0]]
    forged = _pod("forged", nodeName=node_name(0))
    forged["metadata"] |= _STATE
    with pytest.raises(ApiError, match="and nobody else") as refused:
        tenant.post(PODS, forged)
    assert refused.value.status == 403
    honest = _pod("honest", nodeName=node_name(0))
    tenant.post(PODS, honest)
    applied = _pod("applied", schedulerName="nobody")
    applied["metadata"] |= {"annotations": {_KEYS.predicate_time: "1"}}
    tenant.post(PODS, applied)
    target = {"apiVersion": "v1", "kind": "Node", "name": node_name(0)}
    metadata = {"name": "applied", "namespace": "default", **_STATE}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
    extender.post(f"{PODS}/applied/binding", body)
    assert _state_of(plane, "applied")["annotations"][_KEYS.pre_allocated] == "1"
    assert plane.api.get(f"{PODS}/applied")["spec"]["nodeName"] == node_name(0)
