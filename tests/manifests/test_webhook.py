"""The component of the webhook against the code that it deploys: names, paths, rights and times."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import yaml

from tests.manifests.documents import COMPONENTS, NAME, documents_of
from vgpu_agent.cli import webhook
from vgpu_agent.families.vgpu_manager.keys import IGNORE_WEBHOOK_LABEL, Keys
from vgpu_agent.webhook import bodies
from vgpu_agent.webhook.options import Options, OwnCertificateOptions
from vgpu_agent.webhook.own_certificate import KINDS

FOLDER = COMPONENTS / "webhook"
WEBHOOK = "vgpu-agent-webhook"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Every object of the component, by kind."""
    files = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    every = [one for file in files for one in documents_of(f"components/webhook/{file}")]
    assert len({one["kind"] for one in every}) == len(every)
    return {one["kind"]: one for one in every}


@pytest.fixture(scope="module")
def pod(found: dict[str, Any]) -> Any:
    """The pod of the Deployment."""
    return found["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def options(pod: Any) -> Options:
    """The options by the container's arguments."""
    parser = argparse.ArgumentParser()
    webhook.add_parser(parser.add_subparsers())
    return webhook._options(parser.parse_args(pod["containers"][0]["args"]))


def test_everything_has_one_name_and_lies_in_one_namespace(found: dict[str, Any]) -> None:
    """And none of the labels by which the agent's own pods are selected."""
    cluster_wide = {"ClusterRole", "ClusterRoleBinding"} | {
        f"{kind.title()}WebhookConfiguration" for kind in KINDS
    }
    for kind, one in found.items():
        assert one["metadata"]["name"] == WEBHOOK
        assert one["metadata"].get("namespace", "") == ("" if kind in cluster_wide else NAME)
        assert one["metadata"]["labels"] == {"app.kubernetes.io/name": WEBHOOK}


def test_the_service_reaches_the_pods_at_their_port(
    found: dict[str, Any], pod: Any, options: Options
) -> None:
    """By the name in the certificate."""
    spec, labels = found["Service"]["spec"], found["Deployment"]["spec"]["template"]["metadata"]
    assert spec["selector"] == labels["labels"] == {"app.kubernetes.io/name": WEBHOOK}
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels["labels"]
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels["labels"]
    (port,), (container,) = spec["ports"], pod["containers"]
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": options.port}]
    certificate = options.certificate
    assert isinstance(certificate, OwnCertificateOptions)
    assert certificate.names[0] == f"{WEBHOOK}.{NAME}.svc"
    assert certificate.secret == found["Secret"]["metadata"]["name"]
    assert certificate.configurations == (WEBHOOK,)
    (variable,) = container["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_stops_nothing(found: dict[str, Any], kind: str) -> None:
    """Ignored by default, soon, and never for the pods that the cluster and the webhook need;
    vgpu-manager:D43.
    """
    (one,) = found[f"{kind.title()}WebhookConfiguration"]["webhooks"]
    assert one["failurePolicy"] == "Ignore"
    assert one["timeoutSeconds"] <= 10
    assert one["sideEffects"] == "None"
    assert one["admissionReviewVersions"] == ["v1"]
    assert one["objectSelector"] == {}  # every tenant can label a pod
    by_name, by_label = one["namespaceSelector"]["matchExpressions"]
    assert by_name["operator"] == by_label["operator"] == "NotIn"
    assert set(by_name["values"]) == {"kube-system", "cert-manager", NAME}
    assert (by_label["key"], by_label["values"]) == (IGNORE_WEBHOOK_LABEL, ["true"])
    (rule,) = one["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])
    client = one["clientConfig"]
    assert set(client) == {"service"}  # the webhook writes caBundle
    verb = {"mutating": "mutate", "validating": "validate"}[kind]
    (port,) = found["Service"]["spec"]["ports"]
    assert client["service"] == {
        "name": WEBHOOK,
        "namespace": NAME,
        "path": f"/pods/{verb}",
        "port": port["port"],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_with_a_request_or_with_state_is_sent(found: dict[str, Any], kind: str) -> None:
    """The condition names prefixes; a key beside them would pass unseen."""
    (one,) = found[f"{kind.title()}WebhookConfiguration"]["webhooks"]
    (condition,) = one["matchConditions"]
    requests, *metadata = (
        f'key.startsWith("{text}")' for text in ("nvidia.com/vgpu-", "nvidia.com/")
    )
    assert condition["expression"].count(requests) == 2
    assert condition["expression"].count(metadata[0]) == 2
    places = ("metadata.annotations.ex", "metadata.labels.ex", "spec.containers", "initContainers)")
    found_at = [condition["expression"].index(place) for place in places]
    assert found_at == sorted(found_at)  # made-up state is found before the budget of CEL is spent
    keys = Keys()
    assert all(
        name.startswith("nvidia.com/vgpu-") for name in (keys.number, keys.cores, keys.memory)
    )
    every = (*keys.state_annotations, *keys.state_labels, *keys.user_annotations)
    assert all(name.startswith("nvidia.com/") for name in every)


def test_nothing_is_granted_that_is_not_used(found: dict[str, Any]) -> None:
    """One Secret and two configurations by their name; nothing is created or deleted."""
    nodes, configurations = found["ClusterRole"]["rules"]
    assert nodes == {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
    assert configurations == {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": [f"{kind}webhookconfigurations" for kind in KINDS],
        "resourceNames": [WEBHOOK],
        "verbs": ["get", "patch"],
    }
    (secret,) = found["Role"]["rules"]
    assert secret == {
        "apiGroups": [""],
        "resources": ["secrets"],
        "resourceNames": [WEBHOOK],
        "verbs": ["get", "patch"],
    }
    assert "data" not in found["Secret"]


def test_the_pod_has_no_rights_on_its_node(pod: Any) -> None:
    """No user, no file, no capability; the token is only its own."""
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert not {"volumes", "hostNetwork", "hostPID"} & set(pod)
    assert pod["serviceAccountName"] == WEBHOOK


def test_two_replicas_serve_at_any_time(found: dict[str, Any], pod: Any, options: Options) -> None:
    """On two nodes where there are two, also while they are replaced, and until a stopping one is
    forgotten.
    """
    spec = found["Deployment"]["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert found["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert pod["terminationGracePeriodSeconds"] > options.drain_seconds + options.stop_seconds
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("liveness", "readiness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"liveness": "/healthz", "readiness": "/readyz"}
    assert {probe["httpGet"]["scheme"] for probe in probes.values()} == {"HTTPS"}
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert found[kind]["webhooks"][0]["timeoutSeconds"] > options.body_seconds
    readiness = probes["readiness"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < options.drain_seconds
    assert readiness["failureThreshold"] == 3  # one large pod must not make it unready
    assert container["resources"]["limits"] == {"memory": "256Mi"}
    assert bodies.LARGE_AT_ONCE * options.max_body_bytes < 64 * 1024 * 1024


def test_the_commented_defaults_are_flags_that_are_accepted() -> None:
    """Taking the ``#`` away is all that there is to do."""
    text = (FOLDER / "deployment.yaml").read_text()
    flags = [line.partition("# - ")[2] for line in text.splitlines() if "# - --" in line]
    parser = argparse.ArgumentParser()
    webhook.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["webhook", *flags])
    assert webhook._family(arguments)
    assert arguments.largest_node == 8
