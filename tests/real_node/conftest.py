"""Real Kubernetes clusters as fixtures:
started when first asked for, ended with the test run however that ends.

`rig`, `numa_rig`, `volcano_rig`, `extender_rig` and `control_plane` serve many tests, since a start
takes seconds; after every test that used a node, its pods are removed and whatever was stopped is
started again. A test that needs another kind, or wants to break one for good, takes `start_rig`.

An idle cluster takes a tenth of a processor, and each of the processes that share the tests had up
to five. So files that use the same clusters follow each other, a process goes on with files that
use the clusters it has (`distribution`), and a cluster is stopped before the first file that does
not use it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real_node.distribution import ByClusters, write_clusters
from tests.real_node.rig import Options, RequirementError, Rig, RigError, running_rig
from tests.real_node.rig.host import missing_requirement
from tests.real_node.rig.lifecycle import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

_HERE = Path(__file__).resolve().parent
_INSIST = "REQUIRE_CLUSTER"
_TIMEOUT_SECONDS = 300
_LONGEST = ("test_mixed_day", "test_handover")
_SESSION_RIGS = {
    "rig": Options(),
    "numa_rig": Options(numa_nodes=2, topology_manager_policy="single-numa-node"),
    "volcano_rig": Options(),
    "extender_rig": Options(),
    "control_plane": Options(nodes=0),
}
_unavailable = pytest.StashKey[str]()
_started = pytest.StashKey[list[Rig]]()
_session_rigs = pytest.StashKey[dict[str, Rig]]()
_used_by_file = pytest.StashKey[dict[Path, set[str]]]()
_clusters_file = pytest.StashKey[Path]()
_CLUSTERS = "file for the clusters that each test file uses"


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything below this folder is a cluster test, and may take its time. The longest files come
    first, so that no process is left with one at the end; then those without clusters, and files
    with the same clusters follow each other.
    """
    used = _used_rigs(items)
    items.sort(key=lambda item: (item.path.stem not in _LONGEST, sorted(used[item.path])))
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_SECONDS))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a process that will run tests where to write which clusters the files use."""
    path = node.config.stash.get(_clusters_file, None)
    if path is None:
        folder = Path(tempfile.mkdtemp(prefix="clusters-"))
        path = node.config.stash[_clusters_file] = folder / "clusters.json"
        node.config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    node.workerinput[_CLUSTERS] = str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByClusters | None:
    """Where whole files are distributed, choose them by their clusters."""
    if config.getvalue("dist") != "loadfile":
        return None
    return ByClusters(config, log, config.stash[_clusters_file])


def _used_rigs(items: list[pytest.Item]) -> dict[Path, set[str]]:
    """The session's clusters that the tests of each file use."""
    used: dict[Path, set[str]] = {}
    for item in items:
        names = getattr(item, "fixturenames", ())
        used.setdefault(item.path, set()).update(_SESSION_RIGS.keys() & set(names))
    return used


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_finish")
def pytest_note_used_clusters(session: pytest.Session) -> None:
    """Note which clusters each file uses, also for the process that distributes the files, before
    xdist tells that process that the tests are collected.
    """
    used = session.stash[_used_by_file] = _used_rigs(session.items)
    if path := getattr(session.config, "workerinput", {}).get(_CLUSTERS):
        names = {item.path: item.nodeid.partition("::")[0] for item in session.items}
        write_clusters(Path(path), {names[file]: clusters for file, clusters in used.items()})


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


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop the clusters that the test's file does not use; start again those that the test uses."""
    used = item.session.stash[_used_by_file][item.path]
    for name, running in item.session.stash.get(_session_rigs, {}).items():
        if name not in used:
            running.stop()
        elif name in getattr(item, "fixturenames", ()) and not running.is_running():
            running.start_with_retry()


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


@contextlib.contextmanager
def _session_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The cluster of that fixture, which `pytest_runtest_setup` stops and starts."""
    rigs = request.session.stash.setdefault(_session_rigs, {})
    with running_rig(_SESSION_RIGS[request.fixturename or ""]) as running:
        rigs[request.fixturename or ""] = running
        yield running


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest, cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node with one NUMA node."""
    with _session_rig(request) as running:
        yield running


@pytest.fixture(scope="session")
def numa_rig(request: pytest.FixtureRequest, cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node with two NUMA nodes, whose kubelet admits only what fits one of them."""
    with _session_rig(request) as running:
        yield running


@pytest.fixture(scope="session")
def volcano_rig(request: pytest.FixtureRequest, cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node for Volcano's resources,
    of which others would find traces on their Node.
    """
    with _session_rig(request) as running:
        yield running


@pytest.fixture(scope="session")
def extender_rig(request: pytest.FixtureRequest, cluster_available: None) -> Iterator[Rig]:
    """One Kubernetes node for vgpu-manager's resources,
    of which others would find traces on their Node.
    """
    with _session_rig(request) as running:
        yield running


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest, cluster_available: None) -> Iterator[Rig]:
    """etcd, API server, controllers and a scheduler; Nodes are only objects."""
    with _session_rig(request) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean_session_rigs(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, give back the session's nodes that it used as they were."""
    used: list[Rig] = [
        request.getfixturevalue(name)
        for name, options in _SESSION_RIGS.items()
        if options.nodes and name in request.fixturenames
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
