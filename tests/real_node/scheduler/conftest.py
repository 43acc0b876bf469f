"""A control plane without kubelets for the tests of the scheduler: Nodes are only objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real_node.rig import Options, Rig, running_rig
from tests.real_node.scheduler.objects import remove_all


@pytest.fixture(scope="session")
def control_plane(cluster_available: None) -> Iterator[Rig]:
    """etcd, API server and controllers, for all tests of the session."""
    with running_rig(Options(nodes=0)) as running:
        running.stop_component("scheduler")  # the tests start one with the extender
        yield running


@pytest.fixture
def plane(control_plane: Rig) -> Iterator[Rig]:
    """The control plane without Nodes and pods, before and after the test."""
    yield control_plane
    control_plane.start_component("etcd")
    control_plane.start_component("apiserver")
    control_plane.wait_for(control_plane.api.is_ready, 60, what="the API server")
    remove_all(control_plane)
