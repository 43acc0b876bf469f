"""components/scheduler against the command that it deploys, and against the contract of
kube-scheduler's configuration (vgpu-manager §5.1).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.manifests.documents import COMPONENTS, NAME, documents_of
from vgpu_agent.cli import main as command_line
from vgpu_agent.families.vgpu_manager.keys import Keys

COMPONENT = COMPONENTS / "scheduler"
SCHEDULER = "vgpu-scheduler"
ACCOUNT = {"kind": "ServiceAccount", "name": SCHEDULER, "namespace": NAME}
_READ = ("list", "watch")
_MILLISECONDS = {"ms": 1, "s": 1000}
# client-go's JitterFactor: a pause is up to so much longer than retryPeriod.
_JITTER = 1.2
_TAKEN_OVER_SECONDS = 5


def _documents() -> list[Any]:
    """Every object of the component."""
    listed = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["resources"]
    return [one for name in listed for one in documents_of(f"components/scheduler/{name}")]


def _only(kind: str, name: str = SCHEDULER) -> Any:
    (found,) = [
        one for one in _documents() if one["kind"] == kind and one["metadata"]["name"] == name
    ]
    return found


@pytest.fixture(scope="module")
def pod_template() -> Any:
    """The template of the Deployment's pods."""
    return _only("Deployment")["spec"]["template"]


@pytest.fixture(scope="module")
def containers(pod_template: Any) -> dict[str, Any]:
    """Its containers by name."""
    return {each["name"]: each for each in pod_template["spec"]["containers"]}


@pytest.fixture(scope="module")
def configuration() -> Any:
    """kube-scheduler's configuration."""
    return yaml.safe_load(_only("ConfigMap")["data"]["config.yaml"])


@pytest.fixture(scope="module")
def extender(configuration: Any) -> Any:
    """The only extender in it."""
    (only,) = configuration["extenders"]
    return only


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9]+)(ms|s)", text).groups()  # type: ignore[union-attr]
    return int(number) * _MILLISECONDS[unit] / 1000


def _flag(container: Any, name: str) -> str:
    arguments: list[str] = container["args"]
    return arguments[arguments.index(name) + 1]


def test_the_extender_s_arguments_are_a_call_that_the_command_line_understands(
    containers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """``--help`` behind them, so that nothing is started; every flag is in the parser by its whole
    name.
    """
    arguments = containers["extender"]["args"]
    with pytest.raises(SystemExit) as ended:
        command_line.main([*arguments, "--help"])
    assert ended.value.code == 0
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert {each for each in arguments if each.startswith("--")} <= known
    with pytest.raises(SystemExit) as ended:  # not even with them is a wrong one taken
        command_line.main([*arguments, "--no-such-flag"])
    assert ended.value.code == 2


def test_kube_scheduler_calls_the_extender_as_the_contract_says(extender: Any) -> None:
    """vgpu-manager §5.1."""
    keys = Keys()
    resources = extender.pop("managedResources")
    try:
        assert extender == {
            "urlPrefix": "http://127.0.0.1:3456/scheduler",
            "filterVerb": "filter",
            "bindVerb": "bind",
            "preemptVerb": "preempt",
            "nodeCacheCapable": True,
            "weight": 1,
            "httpTimeout": "30s",
            "ignorable": False,
        }
    finally:
        extender["managedResources"] = resources
    assert resources == [
        {"name": keys.number, "ignoredByScheduler": False},
        {"name": keys.cores, "ignoredByScheduler": True},
        {"name": keys.memory, "ignoredByScheduler": True},
    ]


def test_the_verbs_are_reached_from_the_pod_alone(
    extender: Any, pod_template: Any, containers: dict[str, Any]
) -> None:
    """Whoever calls them can have any pod bound: they listen where the command does by default, and
    no port of the pod leads there.
    """
    arguments = containers["extender"]["args"]
    assert not {"--server-bind-address", "--server-bind-port"} & set(arguments)
    address = extender["urlPrefix"].removeprefix("http://").removesuffix("/scheduler")
    assert address == "127.0.0.1:3456"
    published = {
        port["containerPort"] for each in containers.values() for port in each.get("ports", ())
    }
    assert 3456 not in published
    assert not any(pod_template["spec"].get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))


def test_probes_and_scraper_ask_the_port_that_the_flag_opens(
    pod_template: Any, containers: dict[str, Any]
) -> None:
    """The kubelet does not reach 127.0.0.1 of a pod. Only readiness waits for the API server."""
    container = containers["extender"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == _flag(container, "--probe-bind-port")
    assert pod_template["metadata"]["annotations"]["prometheus.io/port"] == str(
        port["containerPort"]
    )
    probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    assert probes == {
        "startupProbe": {"path": "/healthz", "port": port["name"]},
        "livenessProbe": {"path": "/healthz", "port": port["name"]},
        "readinessProbe": {"path": "/readyz", "port": port["name"]},
    }


def test_kube_scheduler_reads_the_mounted_configuration(
    pod_template: Any, containers: dict[str, Any]
) -> None:
    """Otherwise it would schedule as default-scheduler, beside the cluster's own."""
    container = containers["kube-scheduler"]
    (mount,), (volume,) = container["volumeMounts"], pod_template["spec"]["volumes"]
    (key,) = _only("ConfigMap")["data"]
    assert container["command"] == ["kube-scheduler", f"--config={mount['mountPath']}/{key}"]
    assert volume == {"name": mount["name"], "configMap": {"name": SCHEDULER}}
    assert "volumeMounts" not in containers["extender"]


def test_the_lease_is_that_which_the_extender_follows(
    configuration: Any, containers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """By its flags' defaults: the name of the scheduler, in the pod's own namespace; and the
    extender knows its pod.
    """
    lease = configuration["leaderElection"]
    assert lease["leaderElect"] is True
    assert (lease["resourceNamespace"], lease["resourceName"]) == (NAME, SCHEDULER)
    container = containers["extender"]
    assert "--watch-lease" in container["args"]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
    with pytest.raises(SystemExit):
        command_line.main(["scheduler", "--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"the Lease's name (default {SCHEDULER})" in text
    assert "variable POD_NAMESPACE" in text


def test_a_standby_takes_over_in_time(configuration: Any) -> None:
    """It has seen the last renewal one pause late, and looks again one pause after the Lease has
    run out. client-go refuses times that are too close to each other.
    """
    lease = configuration["leaderElection"]
    held, renewed, pause = (
        _seconds(lease[name]) for name in ("leaseDuration", "renewDeadline", "retryPeriod")
    )
    longest_pause = pause * (1 + _JITTER)
    assert held + 2 * longest_pause <= _TAKEN_OVER_SECONDS
    assert held > renewed > pause * _JITTER
    assert held == round(held)  # a Lease has whole seconds


def test_the_only_profile_is_the_name_that_pods_give(configuration: Any) -> None:
    """And not default-scheduler, which the cluster has."""
    assert configuration["apiVersion"] == "kubescheduler.config.k8s.io/v1"
    assert [profile["schedulerName"] for profile in configuration["profiles"]] == [SCHEDULER]


def test_both_containers_have_the_least_that_works(containers: dict[str, Any]) -> None:
    """No root, no capability, nothing to write to; and requests, so that they are not the first to
    go.
    """
    for container in containers.values():
        context = dict(container["securityContext"])
        assert context.pop("runAsUser") == context.pop("runAsGroup") > 0
        assert context == {
            "runAsNonRoot": True,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["limits"].keys() == {"memory"}


def test_two_replicas_are_kept_apart_and_one_may_be_drained() -> None:
    """Preferred: on a cluster of one Node the second must not wait for ever."""
    deployment, budget = _only("Deployment")["spec"], _only("PodDisruptionBudget")["spec"]
    labels = deployment["selector"]["matchLabels"]
    assert deployment["replicas"] == 2
    assert labels.items() <= deployment["template"]["metadata"]["labels"].items()
    assert budget["selector"]["matchLabels"] == labels
    (apart,) = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart["podAffinityTerm"] == {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": labels},
    }
    assert budget["maxUnavailable"] < deployment["replicas"]
    rolling = deployment["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] < deployment["replicas"]


def test_it_is_no_pod_of_the_daemon_set(objects: dict[str, Any], pod_template: Any) -> None:
    """The DaemonSet, its Services and policies select by this label."""
    selected = objects["DaemonSet"]["spec"]["selector"]["matchLabels"]
    labels = pod_template["metadata"]["labels"]
    assert selected.keys() <= labels.keys()
    assert not selected.items() <= labels.items()


def test_images_are_chosen_in_the_kustomization(containers: dict[str, Any]) -> None:
    """The extender's is the agent's. For the other one the lines are there to be opened."""
    assert {name: each["image"] for name, each in containers.items()} == {
        "extender": NAME,
        "kube-scheduler": "kube-scheduler",
    }
    for file in (COMPONENTS.parent / "kustomization.yaml", COMPONENT / "kustomization.yaml"):
        text = file.read_text()
        assert re.search(r"name: kube-scheduler,?\s", text)
        assert "registry.k8s.io/kube-scheduler" in text
    opened = re.sub(
        r"^  # (- name: kube-scheduler|  new.*)$",
        r"  \1",
        (COMPONENTS.parent / "kustomization.yaml").read_text(),
        flags=re.MULTILINE,
    )
    images = yaml.safe_load(opened)["images"]
    assert [image["name"] for image in images] == [NAME, "kube-scheduler"]
    assert images[1].keys() == {"name", "newName", "newTag"}


def test_nothing_is_granted_that_is_not_used() -> None:
    """Nodes are read, pods read and patched, bound and told by events; budgets are read to choose
    whom to preempt. No creation of pods, no deletion, no secret, no wildcard.
    """
    rules = _only("ClusterRole")["rules"]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        *(("", "nodes", verb) for verb in _READ),
        *(("", "pods", verb) for verb in (*_READ, "get", "patch")),
        ("", "pods/binding", "create"),
        *(("", "events", verb) for verb in ("create", "patch")),
        *(("policy", "poddisruptionbudgets", verb) for verb in _READ),
    }


def test_one_lease_may_be_changed_and_no_other() -> None:
    """kube-scheduler renews it, and the extender reads it."""
    create, change = _only("Role")["rules"]
    assert create == {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["create"],
    }
    assert change == {**create, "resourceNames": [SCHEDULER], "verbs": ["get", "update"]}


def test_every_role_is_bound_to_the_one_account(pod_template: Any) -> None:
    """The component's own, and those that Kubernetes keeps for its scheduler."""
    assert _only("ServiceAccount")["metadata"]["namespace"] == NAME
    assert _only("ServiceAccount")["automountServiceAccountToken"] is False
    assert pod_template["spec"]["serviceAccountName"] == SCHEDULER
    assert pod_template["spec"]["automountServiceAccountToken"] is True
    bindings = [one for one in _documents() if one["kind"].endswith("Binding")]
    assert all(binding["subjects"] == [ACCOUNT] for binding in bindings)
    bound = {
        (binding["metadata"].get("namespace"), *sorted(binding["roleRef"].values()))
        for binding in bindings
    }
    group = "rbac.authorization.k8s.io"
    assert bound == {
        (None, "ClusterRole", group, SCHEDULER),
        (NAME, "Role", group, SCHEDULER),
        (None, "ClusterRole", group, "system:kube-scheduler"),
        (None, "ClusterRole", group, "system:volume-scheduler"),
        ("kube-system", "Role", "extension-apiserver-authentication-reader", group),
    }
