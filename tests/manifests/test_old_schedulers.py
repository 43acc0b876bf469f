"""The components for old versions of kube-scheduler, against the types of these versions and
against components/scheduler (vgpu-manager §5.1).

No kube-scheduler of these versions is run here. The fields are those of
k8s.io/kube-scheduler/config: v1beta2 in release 1.22, v1 in release 1.25, and ``Policy`` with
``LegacyExtender`` in release 1.21, all of which are read strictly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.manifests.documents import COMPONENTS, documents_of

OLD = ("scheduler-1.24", "scheduler-1.21", "scheduler-1.20")
_POLICIES = ("scheduler-1.21", "scheduler-1.20")
_SECOND_NS = 10**9

Schema = Mapping[str, Any]
"""Field → its type, the schema of its object, or a list with that of its items."""

_TLS: Schema = {
    "insecure": bool,
    "serverName": str,
    "certFile": str,
    "keyFile": str,
    "caFile": str,
    "certData": str,
    "keyData": str,
    "caData": str,
}
_EXTENDER: Schema = {
    "urlPrefix": str,
    "filterVerb": str,
    "preemptVerb": str,
    "prioritizeVerb": str,
    "weight": int,
    "bindVerb": str,
    "enableHTTPS": bool,
    "tlsConfig": _TLS,
    "httpTimeout": str,
    "nodeCacheCapable": bool,
    "managedResources": [{"name": str, "ignoredByScheduler": bool}],
    "ignorable": bool,
}
_PROFILE: Schema = {"schedulerName": str, "plugins": dict, "pluginConfig": list}
_V1BETA2: Schema = {
    "apiVersion": str,
    "kind": str,
    "parallelism": int,
    "leaderElection": {
        "leaderElect": bool,
        "leaseDuration": str,
        "renewDeadline": str,
        "retryPeriod": str,
        "resourceLock": str,
        "resourceName": str,
        "resourceNamespace": str,
    },
    "clientConnection": {
        "kubeconfig": str,
        "acceptContentTypes": str,
        "contentType": str,
        "qps": int,
        "burst": int,
    },
    "healthzBindAddress": str,
    "metricsBindAddress": str,
    "enableProfiling": bool,
    "enableContentionProfiling": bool,
    "percentageOfNodesToScore": int,
    "podInitialBackoffSeconds": int,
    "podMaxBackoffSeconds": int,
    "profiles": [_PROFILE],
    "extenders": [_EXTENDER],
}
_V1: Schema = {
    name: kind for name, kind in _V1BETA2.items() if not name.endswith("BindAddress")
} | {"profiles": [{**_PROFILE, "percentageOfNodesToScore": int}]}
_POLICY: Schema = {
    "kind": str,
    "apiVersion": str,
    "predicates": list,
    "priorities": list,
    "extenders": [
        {name: kind for name, kind in _EXTENDER.items() if name != "enableHTTPS"}
        | {"enableHttps": bool, "httpTimeout": int}
    ],
    "hardPodAffinitySymmetricWeight": int,
    "alwaysCheckAllPredicates": bool,
}


def _unknown(value: Any, schema: Any, path: str = "") -> list[str]:
    """The places where a value is not what the schema says."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [path]
        return [
            each
            for place, item in enumerate(value)
            for each in _unknown(item, schema[0], f"{path}[{place}]")
        ]
    if isinstance(schema, Mapping):
        if not isinstance(value, dict):
            return [path]
        return [
            each
            for name, item in value.items()
            for each in (
                _unknown(item, schema[name], f"{path}.{name}")
                if name in schema
                else [f"{path}.{name}"]
            )
        ]
    return [] if type(value) is schema else [path]


def _data(component: str) -> dict[str, Any]:
    (document,) = documents_of(f"components/{component}/configmap.yaml")
    assert (document["kind"], document["metadata"]["name"]) == ("ConfigMap", "vgpu-scheduler")
    data: dict[str, Any] = document["data"]
    return data


def _configuration(component: str) -> Any:
    return yaml.safe_load(_data(component)["config.yaml"])


def _policy(component: str) -> Any:
    data = _data(component)
    assert data["config.yaml"] is None  # which removes it
    return json.loads(data["policy.json"])


def test_the_check_finds_what_a_version_does_not_have() -> None:
    """Otherwise the others would show nothing."""
    configuration = _configuration("scheduler")
    configuration["extenders"][0]["managedResources"][0]["ignored"] = False
    configuration["healthzBindAddress"] = ""
    configuration["leaderElection"]["leaseDuration"] = 3
    assert sorted(_unknown(configuration, _V1)) == [
        ".extenders[0].managedResources[0].ignored",
        ".healthzBindAddress",
        ".leaderElection.leaseDuration",
    ]


def test_the_configurations_have_the_fields_of_their_version_and_equal_values() -> None:
    """1.25 and newer, and 1.22 to 1.24."""
    new, old = _configuration("scheduler"), _configuration("scheduler-1.24")
    assert new.pop("apiVersion") == "kubescheduler.config.k8s.io/v1"
    assert old.pop("apiVersion") == "kubescheduler.config.k8s.io/v1beta2"
    assert new["kind"] == "KubeSchedulerConfiguration"
    assert (_unknown(new, _V1), _unknown(old, _V1BETA2)) == ([], [])
    assert old == new


@pytest.mark.parametrize("component", _POLICIES)
def test_a_policy_has_the_fields_of_its_version_and_equal_values(component: str) -> None:
    """Before 1.22. A duration there is a number of nanoseconds."""
    policy = _policy(component)
    assert _unknown(policy, _POLICY) == []
    assert (policy.pop("kind"), policy.pop("apiVersion")) == ("Policy", "v1")
    ((extender,),) = policy.values()
    (newer,) = _configuration("scheduler")["extenders"]
    assert extender.pop("httpTimeout") == int(newer.pop("httpTimeout")[:-1]) * _SECOND_NS
    if component == "scheduler-1.20":  # without policy/v1 the extender knows no budgets
        assert newer.pop("preemptVerb") == "preempt"
    assert extender == newer


def test_the_flags_beside_a_policy_say_what_the_configuration_says() -> None:
    """1.20 has the flags of 1.21: its component includes that one."""
    (deployment,) = documents_of("components/scheduler-1.21/deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (base,) = [
        each
        for each in documents_of("components/scheduler/deployment.yaml")[0]["spec"]["template"][
            "spec"
        ]["containers"]
        if each["name"] == container["name"]
    ]
    (mount,) = base["volumeMounts"]
    program, *flags = container["command"]
    assert program == base["command"][0]
    configuration = _configuration("scheduler")
    lease, client = configuration["leaderElection"], configuration["clientConnection"]
    (profile,) = configuration["profiles"]
    assert dict(flag.removeprefix("--").split("=", 1) for flag in flags) == {
        "policy-config-file": f"{mount['mountPath']}/policy.json",
        "scheduler-name": profile["schedulerName"],
        "leader-elect": "true",
        "leader-elect-resource-lock": lease["resourceLock"],
        "leader-elect-resource-name": lease["resourceName"],
        "leader-elect-resource-namespace": lease["resourceNamespace"],
        "leader-elect-lease-duration": lease["leaseDuration"],
        "leader-elect-renew-deadline": lease["renewDeadline"],
        "leader-elect-retry-period": lease["retryPeriod"],
        "kube-api-qps": str(client["qps"]),
        "kube-api-burst": str(client["burst"]),
        "port": "0",
    }
    (included,) = documents_of("components/scheduler-1.20/kustomization.yaml")[0]["components"]
    assert included == "../scheduler-1.21"


def test_the_budget_of_1_20_gets_the_version_that_it_has() -> None:
    """The patch names the object of components/scheduler."""
    (budget,) = documents_of("components/scheduler/poddisruptionbudget.yaml")
    (patch,) = [
        each
        for each in documents_of("components/scheduler-1.20/kustomization.yaml")[0]["patches"]
        if "target" in each
    ]
    target = patch["target"]
    assert f"{target['group']}/{target['version']}" == budget["apiVersion"]
    assert (target["kind"], target["name"]) == (budget["kind"], budget["metadata"]["name"])
    (change,) = yaml.safe_load(patch["patch"])
    assert change == {"op": "replace", "path": "/apiVersion", "value": "policy/v1beta1"}


def test_every_version_has_one_line_and_stands_behind_the_component() -> None:
    """kustomize patches what is there already."""
    text = (COMPONENTS.parent / "kustomization.yaml").read_text()
    places = [text.index(f"  # - components/{name} ") for name in ("scheduler", *OLD)]
    assert places == sorted(places)
