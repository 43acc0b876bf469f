"""The rig itself: what the tests of the agent take for granted about the cluster they run in, and
that nothing of it is left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.real_node.rig import (
    Api,
    ApiError,
    Options,
    Rig,
    RigError,
    cache,
    host,
    images,
    leftovers,
    netns,
    running_rig,
    waiting,
)
from tests.real_node.rig.layout import Layout
from tests.real_node.rig.manifests import container, pod, quantity
from tests.real_node.rig.record import KeeperRecord

if TYPE_CHECKING:
    from collections.abc import Callable

_PROJECT = Path(__file__).resolve().parents[2]
_OWNER = (
    "import sys, time; from tests.real_node.rig import Rig; Rig(sys.argv[1]).start(); print('up', "
    "flush=True); time.sleep(1000)"
)


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)


def _owner_of(layout: Layout) -> subprocess.Popen[str]:
    """A process that starts a rig and then holds it."""
    return subprocess.Popen(
        [sys.executable, "-c", _OWNER, layout.name], cwd=_PROJECT, text=True, stdout=subprocess.PIPE
    )


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _record(layout: Layout) -> KeeperRecord:
    record = KeeperRecord.load(layout)
    assert record is not None
    return record


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _kubectl_finds_it_ready(rig: Rig) -> bool:
    """Ask the API server without the connections of `Rig.api`."""
    with contextlib.suppress(RigError):
        return rig.kubectl("get", "--raw", "/readyz") == "ok"
    return False


def _interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def _sockets() -> set[str]:
    """The sockets of this process, by their numbers."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith("socket:")}


def _cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_PROJECT / "scripts" / "cluster", *arguments],
        cwd="/",
        text=True,
        capture_output=True,
        check=False,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the inode and time that tell a file from its successor of the same name.

    The number of an inode alone is soon used again.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


class TestOneNode:
    """Pods and a device plugin on the session's rig."""

    @pytest.mark.alone
    def test_a_node_takes_pods_ten_seconds_after_a_warm_start(
        self, start_rig: Callable[..., Rig], record_property: Callable[..., None]
    ) -> None:
        """From nothing but cached builds to a node that is Ready, without taints,
        takes at most 10 s.
        """
        rig = start_rig()

        record_property("start_seconds", rig.start_seconds)
        # a figure to look at with -s
        print(f"warm start: {rig.start_seconds:.1f} s, {rig.layout.ready.read_text()}")  # noqa: T201
        assert rig.start_seconds <= 10
        assert rig.node()["status"]["nodeInfo"]["kubeletVersion"] == "v1.36.3"

    def test_a_pod_runs_and_prints(self, rig: Rig) -> None:
        """A pod is scheduled and runs. Its log, its environment and its file system can be read."""
        rig.create_pod(
            pod("speaker", command="echo I am $NAME; sleep 1000", containers=[_named_container()])
        )

        rig.wait_for_phase("speaker", "Running")

        rig.wait_for(
            lambda: rig.logs("speaker") == "I am a container\n", 5, what="the pod's output"
        )
        assert rig.exec("speaker", "sh", "-c", "echo $NAME") == "a container\n"

    def test_a_service_account_is_known_and_limited(self, rig: Rig) -> None:
        """A pod has a token of its own with which the API server knows it;
        RBAC refuses what was not granted.
        """
        rig.create_pod(pod("client", automountServiceAccountToken=True))
        rig.wait_for_phase("client", "Running")

        token = rig.exec("client", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token")

        with pytest.raises(
            ApiError, match='serviceaccount:default:default" cannot list resource "nodes"'
        ) as refused:
            rig.api.as_bearer(token).get("/api/v1/nodes")
        assert refused.value.status == 403

    def test_requests_share_a_connection_as_long_as_the_api_server_lives(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tests ask many times a second, each time with TLS otherwise. An answer is that of its own
        request, whoever asks, and the end of the API server is noticed.
        """
        made, connect = [0], netns.connect

        def counted(*arguments: Any, **more: Any) -> socket.socket:
            made[0] += 1
            return connect(*arguments, **more)

        monkeypatch.setattr(netns, "connect", counted)
        rig.api.close()
        for _ in range(3):
            assert rig.api.text("/readyz") == "ok"
            assert rig.api.find("/api/v1/nodes/nobody") is None
            assert rig.api.get(f"/api/v1/nodes/{rig.node_name()}")["kind"] == "Node"
            with pytest.raises(ApiError, match='User "nobody" cannot list resource "nodes"'):
                rig.api.as_user("nobody").get("/api/v1/nodes")
        assert made == [1]

        rig.stop_component("apiserver", signal_number=signal.SIGKILL)
        rig.start_component("apiserver")
        rig.wait_for(lambda: _kubectl_finds_it_ready(rig), 60, what="the API server")
        assert rig.node()["kind"] == "Node"
        assert made == [2]

    def test_a_pod_reaches_the_api_server_at_its_service_address(self, rig: Rig) -> None:
        """From the pod network, where there is no kube-proxy."""
        rig.create_pod(
            pod(
                "client",
                command=(
                    "nc -w 2 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT < /dev/null && echo "
                    "reached"
                ),
            )
        )

        rig.wait_for_phase("client", "Succeeded")

        assert rig.logs("client") == "reached\n"

    def test_a_static_pod_runs(self, rig: Rig) -> None:
        """A manifest in the static pod folder becomes a pod, and the pod ends with it."""
        manifest = rig.add_static_pod(pod("fixed"))

        rig.wait_for_phase("fixed-node-1", "Running")
        manifest.unlink()
        rig.wait_for(lambda: rig.pod("fixed-node-1") is None, what="the end of the static pod")

    def test_the_kubelet_can_be_stopped_and_started_under_a_running_pod(self, rig: Rig) -> None:
        """The pod's container survives. The host sees the new kubelet's registration socket."""
        rig.create_pod(pod("survivor"))
        before = rig.wait_for_phase("survivor", "Running")["status"]["containerStatuses"]
        socket_file = rig.kubelet_dir() / "device-plugins" / "kubelet.sock"

        rig.stop_kubelet()
        stopped = rig.components()
        old = _identity(socket_file)
        rig.start_kubelet()

        assert "kubelet-1" not in stopped
        assert "containerd-1" in stopped
        rig.wait_for(
            lambda: _identity(socket_file) not in {None, old} or None, 15, what="a new kubelet.sock"
        )
        rig.wait_for(lambda: _is_healthy(rig), 15, what="the kubelet's health")
        assert rig.wait_for_phase("survivor", "Running")["status"]["containerStatuses"] == before

    def test_host_processes_reach_the_kubelets_folders(self, rig: Rig) -> None:
        """The sockets' host paths leave room for long plugin names,
        and a CDI spec written on the host is there on the node.
        """
        (rig.cdi_dir() / "a.json").write_text("{}")

        seen = subprocess.run(
            rig.in_node("ls", "/run/cdi"), text=True, capture_output=True, check=True
        ).stdout

        assert seen == "a.json\n"
        assert (rig.kubelet_dir() / "pod-resources" / "kubelet.sock").is_socket()
        assert len(str(rig.kubelet_dir())) < 60

    def test_an_image_of_this_python_runs_as_a_pod(self, rig: Rig, tmp_path: Path) -> None:
        """The image has this interpreter, its libraries with compiled parts, and the project."""
        reference = "vgpu-agent.test/python:1"
        images.write_python_image(tmp_path / "python.tar", reference, [_PROJECT / "vgpu_agent"])
        rig.import_image(tmp_path / "python.tar")
        probe = container(
            "main",
            command="python3 -c 'import aiohttp, msgspec, ssl; print(ssl.OPENSSL_VERSION)'",
            image=reference,
        )

        rig.create_pod(pod("python", containers=[probe]))

        rig.wait_for_phase("python", "Succeeded")
        assert rig.logs("python").startswith("OpenSSL")


class TestShapes:
    """Rigs of other kinds, and beside each other."""

    def test_the_kubelet_sees_two_numa_nodes(self, start_rig: Callable[..., Rig]) -> None:
        """With a memory manager that keeps a book per NUMA node,
        the kubelet's own state file names both.
        """
        book_per_numa_node = {
            "memoryManagerPolicy": "Static",
            "reservedMemory": [{"numaNode": 0, "limits": {"memory": "50Mi"}}],
        }
        rig = start_rig(Options(numa_nodes=2, kubelet=book_per_numa_node))

        state = json.loads((rig.kubelet_dir() / "memory_manager_state").read_text())

        assert sorted(state["machineState"]) == ["0", "1"]

    def test_two_nodes_have_separate_kubelets_and_one_network(
        self, start_rig: Callable[..., Rig]
    ) -> None:
        """A pod on each node runs, each kubelet has its own folder,
        and one pod reaches the other over the network.
        """
        rig = start_rig(Options(nodes=2))
        rig.create_pod(
            pod(
                "server",
                command="echo hello > /tmp/index.html; exec httpd -f -p 80 -h /tmp",
                nodeName=rig.node_name(1),
            )
        )
        rig.create_pod(pod("client", nodeName=rig.node_name(2)))

        server = rig.wait_for_phase("server", "Running")
        rig.wait_for_phase("client", "Running")

        assert rig.exec("client", "wget", "-q", "-O", "-", server["status"]["podIP"]) == "hello\n"
        assert [len(list((rig.kubelet_dir(node) / "pods").iterdir())) for node in (1, 2)] == [1, 1]

    def test_two_rigs_run_side_by_side(self, rig: Rig, start_rig: Callable[..., Rig]) -> None:
        """The same names, addresses and ports in both, and neither sees the other's pods."""
        other = start_rig()
        other.create_pod(pod("here"))

        other.wait_for_phase("here", "Running")

        assert rig.pod("here") is None
        assert rig.node()["metadata"]["uid"] != other.node()["metadata"]["uid"]


class TestEnd:
    """Nothing of a rig is left, however it ends."""

    def test_stop_leaves_nothing(self, cluster_available: None) -> None:
        """Neither processes nor mounts, sockets, interfaces, cgroups or files,
        with a pod still running at the end. An open connection would keep the rig's network.
        """
        interfaces, sockets = _interfaces(), _sockets()
        rig = Rig()
        rig.start()
        rig.create_pod(pod("last"))
        rig.wait_for_phase("last", "Running")
        namespaces = rig.record.namespaces
        while_running = leftovers.traces(rig.layout, namespaces)
        api = rig.api  # somebody may still have it
        assert api.is_ready()
        assert _sockets() > sockets

        ended = _since_boot()
        rig.stop()

        assert leftovers.traces(rig.layout, namespaces, ended=ended) == []
        assert _sockets() <= sockets
        assert {trace.split()[0] for trace in while_running} == {"cgroup", "folder", "process"}
        assert _interfaces() == interfaces

    def test_a_killed_owner_leaves_nothing(self, cluster_available: None) -> None:
        """SIGKILL to the test run ends the rig within seconds, pods included."""
        layout = Layout.fresh()
        owner = _owner_of(layout)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        record = _record(layout)
        interfaces = _interfaces()
        api = Api.of(layout, network_namespace=Rig(layout.name).network_namespace)
        api.post("/api/v1/namespaces/default/pods", pod("orphan"))
        _wait_until(
            lambda: (
                api.get("/api/v1/namespaces/default/pods/orphan")["status"]["phase"] == "Running"
            ),
            30,
        )

        ended = _since_boot()
        _kill(owner)

        _wait_until(lambda: not leftovers.traces(layout, record.namespaces, ended=ended), 15)
        assert leftovers.traces(layout, record.namespaces, ended=ended) == []
        _wait_until(lambda: not record.keeper.is_alive(), 5)  # it collects first and ends last
        assert _interfaces() == interfaces

    def test_an_owner_killed_during_the_start_leaves_nothing(self, cluster_available: None) -> None:
        """The lifeline is in place before the first process of the rig is."""
        layout = Layout.fresh()
        owner = _owner_of(layout)
        _wait_until(layout.log("apiserver").exists, 30)
        record = _record(layout)

        ended = _since_boot()
        _kill(owner)

        _wait_until(lambda: not leftovers.traces(layout, record.namespaces, ended=ended), 15)
        assert leftovers.traces(layout, record.namespaces, ended=ended) == []

    @pytest.mark.alone  # the start of any other rig collects them, too
    def test_the_remains_of_a_killed_keeper_are_collected(self, cluster_available: None) -> None:
        """Its processes die with it. The folder and the cgroups go at the next start,
        or at `scripts/cluster down`.
        """
        layout = Layout.fresh()
        rig = Rig(layout.name)
        rig.start(owned=False)
        record = _record(layout)

        ended = _since_boot()
        os.kill(record.keeper.pid, signal.SIGKILL)
        _wait_until(lambda: not record.keeper.is_alive(), 5)
        collected = leftovers.collect()

        _wait_until(lambda: not leftovers.traces(layout, record.namespaces, ended=ended), 5)
        assert leftovers.traces(layout, record.namespaces, ended=ended) == []
        assert layout.name in collected
        rig.stop()  # does nothing, but for reaping the keeper

    def test_a_rig_that_cannot_start_says_why_and_leaves_nothing(
        self, cluster_available: None
    ) -> None:
        """A kubelet that refuses its configuration: the error holds the end of its log."""
        rig = Rig(options=Options(topology_manager_policy="nonsense"))

        with pytest.raises(RigError, match=r"kubelet ended with 1 during the start(?s:.*)nonsense"):
            rig.start()

        assert leftovers.traces(rig.layout, ()) == []


class TestCommand:
    """`scripts/cluster`, as a person uses it."""

    def test_a_cluster_stays_up_until_down(self, cluster_available: None) -> None:
        """Up, looked at from another folder, refused a second time, down. Each says what it did."""
        name = Layout.fresh().name
        try:
            up = _cluster("up", "--name", name)
            nodes = _cluster(
                "--name", name, "kubectl", "-n", "default", "get", "nodes", "-o", "name"
            )
            again = _cluster("up", "--name", name)
            status = _cluster("status")
        finally:
            down = _cluster("down", "--name", name)

        assert (up.returncode, nodes.stdout) == (0, "node/node-1\n")
        assert f"--kubelet-dir {Layout(name).node(1).kubelet_dir}" in up.stdout
        assert again.returncode == 1
        assert "already running" in again.stderr
        assert f"{name}: apiserver, containerd-1" in status.stdout
        assert f"removed {name}" in down.stdout
        assert not Layout(name).run.exists()

    def test_an_unknown_cluster_is_named(self, cluster_available: None) -> None:
        """One line, exit status 1."""
        result = _cluster("--name", "nobody", "kubectl", "get", "nodes")

        assert result.returncode == 1
        assert result.stderr.startswith("scripts/cluster: no rig named 'nobody'")


class TestParts:
    """Small parts that need no cluster."""

    def test_who_waits_for_long_asks_less_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each answer costs processor time. The first pauses are short, and none is long."""
        now, asked = [0.0], list[float]()
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(time, "sleep", lambda pause: now.append(now.pop() + pause))

        def come() -> bool:
            asked.append(now[0])
            return now[0] >= 20

        assert waiting.wait_until("the end", come, timeout_seconds=30)
        pauses = [round(after - before, 3) for before, after in itertools.pairwise(asked)]
        assert pauses == sorted(pauses)
        assert (pauses[:20], pauses[-1]) == ([0.05] * 20, 0.25)
        with pytest.raises(TimeoutError, match="waited 30 s in vain for the end"):
            waiting.wait_until("the end", lambda: False, timeout_seconds=30)

    def test_a_rig_for_many_tests_is_tried_twice(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The first error is shown. The second one counts."""
        fails = [True, False, True, True]

        def start(_: Rig) -> None:
            if fails.pop(0):
                raise RigError("did not come up")

        monkeypatch.setattr(Rig, "start", start)
        monkeypatch.setattr(Rig, "stop", lambda _: None)
        with running_rig():
            assert "did not come up" in capfd.readouterr().err
        with pytest.raises(RigError, match="did not come up"), running_rig():
            pass
        assert not fails

    def test_without_root_the_reason_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It says what is needed and why."""
        monkeypatch.setattr(os, "geteuid", lambda: 1000)

        assert host.missing_requirement() == (
            "the cluster tests need root (namespaces, mounts, cgroups); run them with sudo or in CI"
        )

    def test_without_go_and_cache_the_reason_is_one_line(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It names Go and where it is looked for."""
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        assert "Go 1.26 or newer in PATH" in (host.missing_requirement() or "")

    def test_an_interrupted_build_is_no_entry(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A half-made entry is thrown away and made anew at the next call."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        def fail(folder: Path) -> None:
            (folder / "half").touch()
            raise RigError("power cut")

        with pytest.raises(RigError, match="power cut"):
            cache.get("thing", fail)
        entry = cache.get("thing", lambda folder: (folder / "whole").touch())

        assert [path.name for path in entry.iterdir()] == ["whole"]
        assert not [path for path in cache.root().iterdir() if "making" in path.name]

    def test_whoever_builds_second_waits_and_takes_what_the_first_built(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Two test runs on a fresh machine build once."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        made: list[Path] = []

        def make(folder: Path) -> None:
            made.append(folder)
            time.sleep(0.2)

        with ThreadPoolExecutor(max_workers=2) as threads:
            entries = list(threads.map(lambda _: cache.get("thing", make), range(2)))

        assert len(made) == 1
        assert entries[0] == entries[1]

    @pytest.mark.parametrize(
        ("text", "number"),
        [("0", 0), ("20", 20), ("10k", 10_000), ("2Ki", 2048), ("1M", 1_000_000), (None, 0)],
    )
    def test_a_quantity_is_read_as_the_api_server_writes_it(
        self, text: str | None, number: int
    ) -> None:
        """Ten thousand devices come back as ``10k``."""
        assert quantity(text) == number

    @pytest.mark.parametrize("name", ["", "-a", "Upper", "a/b", "x" * 21])
    def test_a_name_that_would_not_fit_paths_is_refused(self, name: str) -> None:
        """The message shows the name and the rule."""
        with pytest.raises(RigError, match="expected at most 20 of a-z"):
            Layout(name)


def _is_healthy(rig: Rig) -> bool:
    """Tell what the kubelet says; false while the API server does not reach it."""
    try:
        return rig.api.text("/api/v1/nodes/node-1/proxy/healthz") == "ok"
    except ApiError:
        return False


def _named_container() -> dict[str, object]:
    return container("main", command="echo I am $NAME; sleep 1000") | {
        "env": [{"name": "NAME", "value": "a container"}]
    }
