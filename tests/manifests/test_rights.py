"""Rights that the manifests grant: none that the agent does not use,
and none to any other account.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.manifests.documents import (
    COMPONENTS,
    DEFAULTS,
    MANIFESTS,
    NAME,
    documents_of,
    rights_of,
)
from vgpu_agent.cluster.gpu_status import CONDITION, TAINT
from vgpu_agent.cluster.recreation import TRIES
from vgpu_agent.cluster.reviews import ACCESS_REVIEWS, TOKEN_REVIEWS
from vgpu_agent.families.vgpu_manager import keys as vgpu_manager
from vgpu_agent.families.volcano_gpushare import family as volcano_gpushare
from vgpu_agent.families.volcano_gpushare.settings import MEMORY_RESOURCE, NUMBER_RESOURCE
from vgpu_agent.families.volcano_vgpu import decisions, node_state, pod_state
from vgpu_agent.families.volcano_vgpu import family as volcano_vgpu
from vgpu_agent.families.volcano_vgpu.files import CONFIG_MAP, NAMESPACES
from vgpu_agent.pods import GPU_HEALTH_LABEL

READ_ONE = {("configmaps", "list"), ("configmaps", "watch")}


def test_nothing_is_granted_that_is_not_used(objects: dict[str, Any]) -> None:
    """Own Node and pods are read and patched, events written, one ConfigMap read; no creation, no
    deletion, no secret, no wildcard.
    """
    assert rights_of(objects["ClusterRole"]) == {
        *(("nodes", verb) for verb in ("get", "list", "watch", "patch")),
        ("nodes/status", "patch"),
        *(("pods", verb) for verb in ("get", "list", "watch", "patch")),
        *(("events", verb) for verb in ("create", "patch")),
    }
    assert not any("resourceNames" in rule for rule in objects["ClusterRole"]["rules"])


def test_one_config_map_is_readable_in_each_namespace_the_agent_looks_at(
    objects: dict[str, Any],
) -> None:
    """The base grants it in kube-system and the component in volcano-system. That is where the
    family looks, and by this name.
    """
    component = {
        document["kind"]: document for document in documents_of("components/volcano/rbac.yaml")
    }
    roles = [objects["Role"], component["Role"]]
    assert tuple(role["metadata"]["namespace"] for role in roles) == NAMESPACES
    for role in roles:
        assert rights_of(role) == READ_ONE
        assert [rule["resourceNames"] for rule in role["rules"]] == [[CONFIG_MAP]]


def test_evicting_must_be_asked_for() -> None:
    """No policy can confine it, so the component grants it and the base does not."""
    (role, _) = documents_of("components/eviction/rbac.yaml")
    assert rights_of(role) == {("pods/eviction", "create")}
    assert DEFAULTS.binding.refused_evict_seconds == 0
    assert DEFAULTS.node_status.evict_seconds == 0


def test_making_pods_anew_must_be_asked_for_and_is_held_to_the_own_node() -> None:
    """Creating a pod is the largest right of all, so the base is without it;
    vgpu-manager:D35.
    """
    (role, _) = documents_of("components/reschedule/rbac.yaml")
    assert rights_of(role) == {
        ("pods/eviction", "create"),
        ("pods", "create"),
        ("pods", "delete"),
    }
    assert DEFAULTS.binding.reschedule_failed is False
    policy, binding = documents_of("components/reschedule/policy.yaml")
    own_node_only = documents_of("components/own-node-only/policy.yaml")[0]["spec"]
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE", "DELETE"])
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert policy["spec"]["matchConditions"] == own_node_only["matchConditions"]
    assert policy["spec"]["variables"][0] == own_node_only["variables"][0]
    deletes, creates = (each["expression"] for each in policy["spec"]["validations"])
    assert "oldObject.spec.nodeName == variables.node" in deletes
    assert f'"{TRIES}" in' in creates
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }


def test_asking_who_a_scraper_is_must_be_asked_for() -> None:
    """Two questions and nothing else; they change nothing."""
    (role, _) = documents_of("components/scrape-reviews/rbac.yaml")
    asked = [path.split("/") for path in (TOKEN_REVIEWS, ACCESS_REVIEWS)]
    assert role["rules"] == [
        {"apiGroups": [group], "resources": [resource], "verbs": ["create"]}
        for _, _, group, _, resource in asked
    ]


def test_only_the_agents_pod_gets_the_token(objects: dict[str, Any], pod: Any) -> None:
    """The pod asks for it. Another pod under the same account would have to ask, too."""
    assert pod["automountServiceAccountToken"] is True
    assert objects["ServiceAccount"]["automountServiceAccountToken"] is False


def test_every_role_is_bound_to_the_pods_account(objects: dict[str, Any], pod: Any) -> None:
    """The rules reach the agent and no other account; those of a component with an account of its
    own reach that one.
    """
    agent = objects["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == agent
    roles = [MANIFESTS / "rbac.yaml", *COMPONENTS.rglob("rbac.yaml")]
    files = [path.relative_to(MANIFESTS) for path in roles]
    assert len(files) >= 5
    for file in files:
        documents = documents_of(str(file))
        own = MANIFESTS / file.with_name("serviceaccount.yaml")
        (name,) = (
            [document["metadata"]["name"] for document in yaml.safe_load_all(own.read_text())]
            if own.exists()
            else [agent]
        )
        account = {"kind": "ServiceAccount", "name": name, "namespace": NAME}
        for role, binding in zip(documents[::2], documents[1::2], strict=True):
            assert binding["kind"] == role["kind"] + "Binding"
            assert binding["roleRef"] == {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": role["kind"],
                "name": role["metadata"]["name"],
            }
            assert binding["metadata"].get("namespace") == role["metadata"].get("namespace")
            assert binding["subjects"] == [account]


def test_the_policies_speak_of_the_account_that_the_pod_uses(objects: dict[str, Any]) -> None:
    """Another name would match no account, and confine nothing. The namespace is that of whoever
    deploys, so it does not count. Together they cover every resource whose patch is granted.
    """
    documents = documents_of("components/own-node-only/policy.yaml")
    account = objects["ServiceAccount"]["metadata"]
    covered: set[str] = set()
    for policy, binding in zip(documents[::2], documents[1::2], strict=True):
        (condition,) = policy["spec"]["matchConditions"]
        pattern = condition["expression"].removeprefix('request.userInfo.username.matches("')
        matching = re.compile(pattern.removesuffix('")'))
        for namespace in (account["namespace"], "gpu-system"):
            assert matching.search(f"system:serviceaccount:{namespace}:{account['name']}")
        for other in ("system:serviceaccount:a:vgpu-agent-webhook", "vgpu-agent", "x:a:vgpu-agent"):
            assert matching.search(other) is None
        assert binding["spec"] == {
            "policyName": policy["metadata"]["name"],
            "validationActions": ["Deny"],
        }
        (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
        covered |= set(rule["resources"])
        assert policy["spec"]["failurePolicy"] == "Fail"
    assert covered == {
        resource for resource, verb in rights_of(objects["ClusterRole"]) if verb == "patch"
    }


def test_the_policy_allows_the_keys_that_families_write_and_no_other() -> None:
    """Labels and annotations have lists of their own,
    and of the schedulers' locks only the removal is exempt.
    """
    policy = documents_of("components/own-node-only/policy.yaml")[0]
    variables = {
        variable["name"]: variable["expression"] for variable in policy["spec"]["variables"]
    }

    def listed(name: str) -> list[str]:
        return re.findall(r'"([^"]+/[^"]+|hamivgpu|gpu)"', variables[name])

    keys = vgpu_manager.Keys()
    on_node = [node_state.REGISTER, node_state.HANDSHAKE, volcano_gpushare.UNHEALTHY_IDS]
    on_node += [keys.node_config, keys.node_register, keys.node_topology]
    on_pods = [
        pod_state.PHASE,
        pod_state.TIME,
        decisions.NODE,
        decisions.DECISION,
        decisions.TO_ALLOCATE,
    ]
    on_pods += [
        volcano_gpushare.GPU_INDEX,
        volcano_gpushare.PREDICATE_TIME,
        volcano_gpushare.GPU_ASSIGNED,
    ]
    on_pods += keys.state_annotations
    assert listed("ownAnnotations") == on_node + on_pods
    assert listed("removedAnnotations") == [
        node_state.LOCK,
        volcano_gpushare.NODE_LOCK,
        keys.node_heartbeat,
    ]
    assert listed("ownLabels") == [
        volcano_vgpu.UNIT_LABEL,
        volcano_vgpu.ISOLATION_LABEL,
        vgpu_manager.DRIVER_VERSION_LABEL,
        vgpu_manager.CUDA_VERSION_LABEL,
        vgpu_manager.CUDA_MAJOR_LABEL,
        vgpu_manager.CUDA_MINOR_LABEL,
        *keys.state_labels,
        GPU_HEALTH_LABEL,
    ]
    assert listed("ownCapacity") == [NUMBER_RESOURCE, MEMORY_RESOURCE]
    assert listed("removedCapacity") == [keys.cores, keys.memory]
    assert f'startsWith("{keys.mig("")}")' in variables["removableCapacity"]
    assert "removedAnnotations" not in variables["foreignLabels"]
    assert not re.search(r"startsWith", variables["foreignLabels"])


def test_the_policy_of_pod_state_names_all_keys_and_those_who_write_them(
    objects: dict[str, Any],
) -> None:
    """A key that is missing could still be forged; an account that is missing could not work. The
    two of vgpu-manager are those of its chart, so that a cluster can be moved half by half.
    """
    policy, binding = documents_of("components/pod-state/policy.yaml")
    spec, keys = policy["spec"], vgpu_manager.Keys()
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    variables = {each["name"]: each["expression"] for each in spec["variables"]}
    assert re.findall(r'"([^"]+)"', variables["keys"]) == [
        *keys.state_annotations,
        *keys.state_labels,
    ]
    agent = objects["ServiceAccount"]["metadata"]
    (scheduler,) = documents_of("components/scheduler/serviceaccount.yaml")
    extender = scheduler["metadata"]
    assert [each["expression"] for each in spec["matchConditions"]] == [
        f'request.userInfo.username != "system:serviceaccount:{namespace}:{name}"'
        for namespace, name in (
            (extender["namespace"], extender["name"]),
            (agent["namespace"], agent["name"]),
            ("kube-system", "vgpu-manager-scheduler"),
            ("kube-system", "vgpu-manager-device-plugin"),
        )
    ]
    matched = {
        (operation, resource)
        for rule in spec["matchConstraints"]["resourceRules"]
        for operation in rule["operations"]
        for resource in rule["resources"]
    }
    assert matched == {
        ("UPDATE", "pods"),
        ("UPDATE", "pods/status"),
        ("UPDATE", "pods/ephemeralcontainers"),
        ("UPDATE", "pods/resize"),
        ("CREATE", "pods"),
    }
    assert spec["failurePolicy"] == "Fail"


def test_the_policy_allows_the_condition_of_the_gpus_and_no_other() -> None:
    """With another one, a stolen token could tell the cluster that the node is not ready."""
    policy = documents_of("components/own-node-only/policy.yaml")[0]
    (expression,) = (
        each["expression"]
        for each in policy["spec"]["validations"]
        if "conditions" in each["expression"]
    )
    assert re.findall(r'one\.type != "(\w+)"', expression) == [CONDITION] * 2


def test_the_policy_and_the_tolerations_know_the_taint(objects: dict[str, Any]) -> None:
    """An agent that does not tolerate its own taint could not come back to remove it."""
    policy = documents_of("components/own-node-only/policy.yaml")[0]
    (expression,) = (
        each["expression"]
        for each in policy["spec"]["validations"]
        if "taints" in each["expression"]
    )
    assert re.findall(r'one\.key != "([^"]+)"', expression) == [TAINT] * 2
    tolerations = objects["DaemonSet"]["spec"]["template"]["spec"]["tolerations"]
    assert {"key": TAINT, "operator": "Exists"} in tolerations
