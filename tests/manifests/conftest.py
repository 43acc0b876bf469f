"""Fixtures for the tests of the manifests:
the base's objects, and the agent's pod and container in them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.manifests.documents import documents_of


@pytest.fixture(scope="module")
def kustomization() -> Any:
    """Return the document that ``kubectl apply -k`` reads first."""
    return documents_of("kustomization.yaml")[0]


@pytest.fixture(scope="module")
def objects(kustomization: Any) -> dict[str, Any]:
    """Every object of the base, by kind; there is one of each."""
    found = [document for name in kustomization["resources"] for document in documents_of(name)]
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def library_component() -> Any:
    """The pod spec that the init container is patched into."""
    return documents_of("components/hami-core-library/daemonset.yaml")[0]["spec"]["template"][
        "spec"
    ]


@pytest.fixture(scope="module")
def pod(objects: dict[str, Any]) -> Any:
    """The pod spec of the DaemonSet."""
    return objects["DaemonSet"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    """Its only container."""
    (only,) = pod["containers"]
    return only
