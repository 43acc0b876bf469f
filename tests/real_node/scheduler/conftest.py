"""A control plane without kubelets for the tests of the scheduler: Nodes are only objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real_node.rig import Rig
from tests.real_node.scheduler.objects import remove_all


@pytest.fixture
def plane(control_plane: Rig) -> Iterator[Rig]:
    """The control plane without Nodes and pods, before and after the test, and without a scheduler:
    the tests start one with the extender.
    """
    control_plane.stop_component("scheduler")
    yield control_plane
    control_plane.start_component("etcd")
    control_plane.start_component("apiserver")
    control_plane.wait_for(control_plane.api.is_ready, 60, what="the API server")
    remove_all(control_plane)
