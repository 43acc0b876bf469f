"""Real Kubernetes clusters as fixtures:
started when first asked for, ended with the test run however that ends.

`rig`, `numa_rig`, `volcano_rig` and `extender_rig` live for the whole session, since a start takes
seconds; after every test that used one, its pods are removed and whatever was stopped is started
again. A test that needs another kind, or wants to break one for good, takes `start_rig`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real_node.rig import Options, RequirementError, Rig, RigError, running_rig
from tests.real_node.rig.host import missing_requirement
from tests.real_node.rig.lifecycle import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

_HERE = Path(__file__).resolve().parent
_INSIST = "REQUIRE_CLUSTER"
_TIMEOUT_SECONDS = 300
_LONGEST = ("test_mixed_day", "test_handover")
_SESSION_RIGS = ("rig", "numa_rig", "volcano_rig", "extender_rig")
_unavailable = pytest.StashKey[str]()
_started = pytest.StashKey[list[Rig]]()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything below this folder is a cluster test, and may take its time. The longest files come
    first, so that no process is left with one at the end.
    """
    items.sort(key=lambda item: item.path.stem not in _LONGEST)
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_SECONDS))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is not in the cache before the first test,
    so that no test's timeout has to allow for it.
    """
    if session.config.option.collectonly or not any(
        _HERE in item.path.parents for item in session.items
    ):
        return
    reason = missing_requirement()
    if reason is None:
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        try:
            prepare(terminal.write_line if terminal else lambda _: None)
        except RequirementError as err:
            reason = str(err)
        except RigError as err:
            raise pytest.UsageError(f"the cluster tests cannot be prepared: {err}") from err
    if reason is not None:
        session.config.stash[_unavailable] = reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the components' logs with a failure, for after the run they are gone; and
    say only once why there is no cluster.
    """
    report = yield
    reason = item.config.stash.get(_unavailable, None)
    if report.skipped and reason is not None:
        report.longrepr = (
            str(_HERE / "conftest.py"),
            1,
            f"Skipped: {reason}",
        )  # one place, so that pytest sums up in one line
    if report.failed:
        values = getattr(item, "funcargs", {}).values()
        for rig in {
            *(value for value in values if isinstance(value, Rig)),
            *item.stash.get(_started, []),
        }:
            for component, tail in rig.log_tails():
                report.sections.append((f"rig {rig.name}: {component}", tail))
    return report


@pytest.fixture(scope="session")
def cluster_available(pytestconfig: pytest.Config) -> None:
    """Skip, in one line that says why, where no cluster can be;
    fail where REQUIRE_CLUSTER=1 insists on one.
    """
    reason = pytestconfig.stash.get(_unavailable, None)
    if reason is None:
        return
    if os.environ.get(_INSIST) == "1":
        pytest.fail(f"{_INSIST}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def rig(cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node with one NUMA node."""
    with running_rig() as running:
        yield running


@pytest.fixture(scope="session")
def numa_rig(cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node with two NUMA nodes, whose kubelet admits only what fits one of them."""
    with running_rig(Options(numa_nodes=2, topology_manager_policy="single-numa-node")) as running:
        yield running


@pytest.fixture(scope="session")
def volcano_rig(cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node for Volcano's resources,
    of which others would find traces on their Node.
    """
    with running_rig() as running:
        yield running


@pytest.fixture(scope="session")
def extender_rig(cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node for vgpu-manager's resources,
    of which others would find traces on their Node.
    """
    with running_rig() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean_session_rigs(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, give back the session's rigs that it used as they were."""
    used: list[Rig] = [
        request.getfixturevalue(name) for name in _SESSION_RIGS if name in request.fixturenames
    ]
    yield
    for running in used:
        running.clean()


@pytest.fixture
def start_rig(
    request: pytest.FixtureRequest, cluster_available: None
) -> Iterator[Callable[..., Rig]]:
    """Start a rig of one's own: ``start_rig(Options(nodes=2))``; it ends with the test."""
    started: list[Rig] = []
    request.node.stash[_started] = started

    def start(options: Options | None = None) -> Rig:
        fresh = Rig(options=options)
        started.append(fresh)
        fresh.start()
        return fresh

    yield start
    for fresh in started:
        fresh.stop()
