"""Processes that end or do not answer while pods are scheduled. No card is ever given out beyond
its size, and scheduling goes on within seconds.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

import pytest

from tests.bench.processors import REFERENCE_SECONDS, seconds_for_additions
from tests.real_node.rig import Rig
from tests.real_node.rig.images import BUSYBOX
from tests.real_node.scheduler.checker import judge
from tests.real_node.scheduler.objects import PODS, add_nodes, create, mixed_pods, remove_pods
from tests.real_node.scheduler.processes import PORT, Bound, Extender, Forwarder, KubeScheduler

pytestmark = pytest.mark.alone

_NODES, _PODS = 100, 300
_AWAY_SECONDS = 3.0
PATIENCE_SECONDS = 90
# The last pod after the extender is back, and the takeover by another one.
_LATER_SECONDS, _TAKEOVER_SECONDS = 5.0, 5.0
_TRIES = 2
_ROLE = "vgpu-manager.io/scheduler-role"


def _slower() -> float:
    """Return the factor by which this machine is slower now than the one that the limits are for;
    at least 1.
    """
    return max(1.0, seconds_for_additions() / REFERENCE_SECONDS)


def _check(rig: Rig, names: Sequence[str]) -> None:
    verdict = judge(rig.api.get("/api/v1/nodes")["items"], rig.pods())
    assert verdict.problems == []
    assert sorted(verdict.bound) == sorted(names)


def _a_third(rig: Rig, bound: Bound, names: Sequence[str]) -> None:
    """Wait until so many pods are bound."""
    rig.wait_for(
        lambda: bound.number(names) >= _PODS // 3 or None, PATIENCE_SECONDS, what="a third"
    )
    assert bound.number(names) < _PODS, "all pods were bound before anything was killed"


def _create_held(rig: Rig, scheduler: KubeScheduler, prefix: str) -> list[str]:
    """Create all pods before any of them is looked at."""
    with scheduler.held():
        return create(rig, mixed_pods(prefix, _PODS))


def test_an_extender_that_is_killed(plane: Rig) -> None:
    """Killed in the middle of 300 pods, and back after three seconds."""
    add_nodes(plane, range(_NODES))
    later = []
    with Extender(plane) as extender, KubeScheduler(plane) as scheduler:
        for place in range(_TRIES):
            with Bound(plane) as bound:
                names = _create_held(plane, scheduler, f"try-{place}")
                _a_third(plane, bound, names)
                extender.kill()
                time.sleep(_AWAY_SECONDS)
                extender.start()
                ready = time.monotonic()
                later.append(bound.wait(names, timeout=PATIENCE_SECONDS) - ready)
            _check(plane, names)
            if later[-1] <= _LATER_SECONDS:
                break
            remove_pods(plane)
    print(f"last pod after the extender was ready: {later} s")  # noqa: T201 - the figure
    assert min(later) <= _LATER_SECONDS * _slower()


def test_the_leader_is_killed(plane: Rig) -> None:
    """The other one of two replicas leads within five seconds, and scheduling goes on."""
    add_nodes(plane, range(_NODES))
    for replica in range(2):
        spec = {"containers": [{"name": "main", "image": BUSYBOX}], "schedulerName": "nobody"}
        plane.create_pod({"metadata": {"name": f"replica-{replica}"}, "spec": spec})

    def leader() -> int | None:
        roles = [
            plane.api.get(f"{PODS}/replica-{replica}")["metadata"].get("labels", {}).get(_ROLE)
            for replica in range(2)
        ]
        return roles.index("leader") if roles.count("leader") == 1 else None

    replicas = [
        Extender(
            plane,
            "--leader-elect",
            port=PORT + replica,
            environment={"POD_NAME": f"replica-{replica}", "POD_NAMESPACE": "default"},
        )
        for replica in range(2)
    ]
    with (
        replicas[0],
        replicas[1],
        Forwarder(plane, PORT) as address,
        KubeScheduler(plane, address.port) as scheduler,
        Bound(plane) as bound,
    ):
        first = 0 if plane.wait_for(_as_true(leader), 20, what="a leader") == "0" else 1
        address.point_to(PORT + first)
        names = _create_held(plane, scheduler, "pod")
        _a_third(plane, bound, names)
        replicas[first].kill()
        killed = time.monotonic()
        other = replicas[1 - first]
        plane.wait_for(
            lambda: other.metric("vgpu_scheduler_leader") or None,
            PATIENCE_SECONDS,
            what="the other one to lead",
        )
        takeover = time.monotonic() - killed
        address.point_to(other.port)  # as a Service does when the label changes
        last = bound.wait(names, timeout=PATIENCE_SECONDS) - killed
        _check(plane, names)
    print(f"takeover after {takeover:.1f} s, last pod after {last:.1f} s")  # noqa: T201 - the figure
    assert takeover <= _TAKEOVER_SECONDS * _slower()


def _as_true(number: Callable[[], int | None]) -> Callable[[], str | None]:
    """Return the number as a text, of which 0 is true as well."""
    return lambda: None if (found := number()) is None else str(found)


def test_an_api_server_that_is_away(plane: Rig) -> None:
    """For some seconds in the middle of 300 pods; extender and kube-scheduler stay as they are."""
    add_nodes(plane, range(_NODES))
    with (
        Extender(plane) as extender,
        KubeScheduler(plane) as scheduler,
        Bound(plane) as bound,
    ):
        names = _create_held(plane, scheduler, "pod")
        _a_third(plane, bound, names)
        plane.stop_component("apiserver", signal_number=signal.SIGKILL)
        time.sleep(_AWAY_SECONDS)
        plane.start_component("apiserver")
        plane.wait_for(plane.api.is_ready, PATIENCE_SECONDS, what="the API server")
        ready = time.monotonic()
        later = bound.wait(names, timeout=PATIENCE_SECONDS) - ready
        assert extender.is_ready()
        _check(plane, names)
    print(f"last pod {later:.1f} s after the API server was ready")  # noqa: T201 - the figure
