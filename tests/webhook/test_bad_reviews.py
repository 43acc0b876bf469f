"""Reviews that are none, and pods of every shape: the answer has the form of the contract."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.webhook.reviews import UID, V1, container, pod, response, review
from tests.webhook.test_mutate import reviewer
from vgpu_agent.families.admission import LargestNode
from vgpu_agent.journal import Journal
from vgpu_agent.webhook.review import Reviewer

VERBS = ("mutate", "validate")
NUMBER = "nvidia.com/vgpu-number"


def answers(body: bytes) -> list[bytes]:
    """The answers of both verbs."""
    return [getattr(reviewer(), verb)(body) for verb in VERBS]


@pytest.mark.parametrize(
    ("body", "uid", "reason"),
    [
        (b"", "", "no AdmissionReview: "),
        (b"\xff\xfe", "", "no AdmissionReview: "),
        (b"null", "", "no AdmissionReview: "),
        (b"[]", "", "no AdmissionReview: "),
        (b"{}", "", "expected AdmissionReview of admission.k8s.io/v1 or "),
        (
            json.dumps({"kind": "AdmissionReview", "apiVersion": V1}).encode(),
            "",
            "no request in the AdmissionReview",
        ),
        (
            json.dumps({"kind": "AdmissionReview", "apiVersion": V1, "request": None}).encode(),
            "",
            "no request in the AdmissionReview",
        ),
        (
            json.dumps({"kind": "AdmissionReview", "apiVersion": V1, "request": [1]}).encode(),
            "",
            "the request of the AdmissionReview cannot be read: ",
        ),
        (review(pod(), version="admission.k8s.io/v2"), UID, "set admissionReviewVersions: [v1]"),
        (review(pod()).replace(b"AdmissionReview", b"Pod"), UID, "got 'Pod' of "),
        (review(pod(), uid=5), "", "the request of the AdmissionReview cannot be read: "),
        (review(pod(), operation=5), UID, "the request of the AdmissionReview cannot be read: "),
        (review(pod())[:300], UID, "no AdmissionReview: "),
        (review(pod())[:-1], UID, "no AdmissionReview: "),
        (review("DEEP").replace(b'"DEEP"', b"[" * 99999 + b"]" * 99999), UID, "recursion"),
        (review(None), UID, "the pod cannot be read: "),
        (review([]), UID, "the pod cannot be read: "),
        (review({"metadata": []}), UID, "the pod cannot be read: "),
        (review(pod(spec={"containers": {}})), UID, "the pod cannot be read: "),
        (review(pod(container(number=True))), UID, "the pod cannot be read: "),
        (review(pod(annotations={"a": 1})), UID, "the pod cannot be read: "),
        (review("BIG").replace(b'"BIG"', b'{"spec":{"nodeName":1e999}}'), UID, "the pod cannot"),
    ],
)
def test_a_review_that_cannot_be_read_is_refused_with_the_reason(
    body: bytes, uid: str, reason: str
) -> None:
    """With the UID of the request where there is one; otherwise the API server takes the answer
    for a failed call.
    """
    for answer in answers(body):
        found = response(answer, uid=uid)
        assert not found["allowed"]
        assert found["status"]["code"] == 400
        assert reason in found["status"]["message"]
        assert len(answer) < 5000


def test_the_older_version_is_answered_in_its_own() -> None:
    """vgpu-manager's webhook configuration asks for v1beta1 only; vgpu-manager:D38."""
    version = "admission.k8s.io/v1beta1"
    for answer in answers(review(pod(container()), version=version)):
        assert response(answer, version=version)["allowed"]


@pytest.mark.parametrize("version", [V1, "admission.k8s.io/v1beta1"])
def test_a_review_that_was_too_large_to_be_read_whole_is_refused(version: str) -> None:
    """Its first part has the UID and the version; the pod behind it must not pass unchecked."""
    found = reviewer()
    start = review(pod(container(number="1")), version=version)[:300]
    for verb in VERBS:
        answer = response(found.too_large(verb, start, 8_388_608, "10.0.0.1"), version=version)
        assert not answer["allowed"]
        assert answer["status"]["code"] == 413
        assert answer["status"]["message"] == (
            "the AdmissionReview is larger than 8388608 bytes; make the pod smaller"
        )
    assert found.counts == {(verb, "too_large"): 1 for verb in VERBS}
    nothing = response(found.too_large("mutate", b"{" * 99, 1, ""), uid="")
    assert not nothing["allowed"]


class Broken:
    """A family with a bug."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"no {name}")


@pytest.mark.parametrize("verb", VERBS)
def test_a_bug_refuses_the_pod_and_leaves_a_trace(verb: str) -> None:
    """A failed call would let the pod pass."""
    journal = Journal()
    found = Reviewer(Broken(), journal=journal, largest_node=LargestNode)
    answer = response(getattr(found, verb)(review(pod(container(number="1")))))
    assert not answer["allowed"]
    assert answer["status"]["code"] == 500
    assert "webhook.failed" in answer["status"]["message"]
    assert found.counts == {(verb, "failed"): 1}
    (entry,) = journal.entries
    assert entry.event == "webhook.failed"
    assert entry.facts["verb"] == verb
    assert entry.facts["error"].startswith("LookupError: no ")
    assert "in __getattr__" in entry.facts["traceback"][-1]


def test_a_review_that_is_too_slow_leaves_a_trace() -> None:
    """There is no answer that the API server would take."""
    journal = Journal()
    found = Reviewer(Broken(), journal=journal, largest_node=LargestNode)
    found.too_slow("mutate", "10.0.0.1")
    assert found.counts == {("mutate", "too_slow"): 1}
    (entry,) = journal.entries
    assert (entry.event, entry.facts) == (
        "webhook.too_slow",
        {"verb": "mutate", "client": "10.0.0.1"},
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": None},
        {"containers": [None, {}], "initContainers": None},
        {"containers": [{"name": None, "resources": None}]},
        {"containers": [{"resources": {"limits": None, "requests": None}}]},
        {"containers": [{"resources": {"limits": {NUMBER: 1.0, "cpu": "1", "a/b": "x"}}}]},
        {"containers": [{"resources": {"limits": {NUMBER: 10**30, "a" * 5000 + "/b": "1"}}}]},
        {"containers": [{"name": "x" * 100_000, "resources": {"limits": {NUMBER: "17"}}}]},
        {"containers": [{"name": "\u2028\U0001f600", "resources": {"limits": {NUMBER: "17"}}}]},
        {"affinity": None, "nodeName": None, "nodeSelector": None},
    ],
)
@pytest.mark.parametrize("metadata", [{}, {"annotations": None, "labels": None}, {"name": ""}])
def test_pods_of_every_shape_are_answered(spec: Any, metadata: Any) -> None:
    """The API server judges most fields only after the webhook."""
    given_pod = {"metadata": metadata, "spec": spec}
    for answer in answers(review(given_pod)):
        response(answer)
        assert len(answer) < 10_000
    for answer in answers(review({"spec": spec})):
        response(answer)


def test_a_pod_with_a_thousand_containers_is_judged_whole() -> None:
    """A limit that is hidden behind others counts as well."""
    many = [container(f"c{place}") for place in range(999)]
    mutated, judged = answers(review(pod(*many, container("last", number="17"))))
    assert response(mutated)["allowed"]
    assert "container last" in response(judged)["status"]["message"]


def test_a_pod_with_more_containers_is_refused_before_any_is_looked_at() -> None:
    """It would keep the webhook from all other pods."""
    many = [container(f"c{place}", number="17") for place in range(501)]
    for answer in answers(review(pod(*many[:500], spec={"initContainers": many}))):
        assert not response(answer)["allowed"]
        assert response(answer)["status"]["message"] == (
            "the pod has 1001 containers; expected at most 1000"
        )
    for answer in answers(review({"spec": {"containers": [None] * 1001}})):
        assert not response(answer)["allowed"]


def test_a_pod_with_more_limits_is_refused_before_any_is_read() -> None:
    """To read 120,000 of them took a second, in which the webhook judged no other pod."""
    limits = {f"a.b/{number}": "1k" for number in range(2000)}
    many = {"name": "main", "resources": {"limits": limits}}
    for answer in answers(review(pod(many))):
        assert response(answer)["allowed"]
    for answer in answers(review(pod(many, container("last", number="1")))):
        assert not response(answer)["allowed"]
        assert response(answer)["status"]["message"] == (
            "the containers of the pod have 2001 limits; expected at most 2000"
        )


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "metadata",
                    "spec",
                    "annotations",
                    "labels",
                    "containers",
                    "initContainers",
                    "resources",
                    "limits",
                    "requests",
                    "affinity",
                    "nodeAffinity",
                    "requiredDuringSchedulingIgnoredDuringExecution",
                    "nodeSelectorTerms",
                    "nodeName",
                    "name",
                    NUMBER,
                    "nvidia.com/vgpu-cores",
                    "nvidia.com/pre-allocated",
                    "nvidia.com/device-topology-mode",
                ]
            ),
            below,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(_JSON)
def test_nothing_in_a_pod_raises(found: Any) -> None:
    """Whatever a tenant writes."""
    for answer in answers(review(found)):
        response(answer)


@given(
    st.dictionaries(
        st.sampled_from(
            ["metadata", "pre-allocated", "device-topology-mode", "stuck-grace-period"]
            + [f"{verb}-gpu-{kind}" for verb in ("include", "exclude") for kind in ("uuid", "type")]
        ),
        st.text(max_size=30),
        max_size=6,
    ),
    st.dictionaries(
        st.sampled_from(["number", "cores", "memory"]),
        st.integers() | st.text(max_size=6) | st.floats(allow_nan=False, allow_infinity=False),
    ),
)
def test_no_text_and_no_amount_raises(texts: dict[str, str], limits: dict[str, Any]) -> None:
    """Tenants choose the text of annotations and the amounts that families read."""
    annotations = {f"nvidia.com/{key}": text for key, text in texts.items()}
    for answer in answers(review(pod(container(**limits), annotations=annotations))):
        response(answer)
