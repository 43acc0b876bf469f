"""`Rig`: the object that tests and `scripts/cluster` hold in their hands.

It starts and ends a rig, talks to its API server, and stops and starts its components. It keeps no
state that is not also on disk, so `Rig(name)` in another process is the same rig.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from tests.real_node.rig import build, config, host, images, leftovers, netns
from tests.real_node.rig.api import Api, Json
from tests.real_node.rig.errors import RigError
from tests.real_node.rig.layout import Layout, NodeLayout, Options, Plan
from tests.real_node.rig.record import KeeperRecord
from tests.real_node.rig.supervisor import order
from tests.real_node.rig.waiting import POLL_SECONDS, wait_until

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

_PROJECT = Path(__file__).resolve().parents[3]
_START_SECONDS = 90.0
_STOP_SECONDS = 60.0  # 300 ended pods on a busy machine took longer than 30
_Found = TypeVar("_Found")


def prepare(say: Callable[[str], None]) -> tuple[Path, Path, Path]:
    """Have everything that a rig is made of, and what tests of the manifests need besides; returns
    the folders of Kubernetes, containerd and the images.

    Raises:
        RequirementError: this machine cannot hold a rig.
        RigError: a build fails.
    """
    host.ensure_packages(say)
    host.allow_watches()
    build.ensure(build.HELM, say)
    build.operator_definitions(say)
    return build.ensure(build.KUBERNETES, say), build.ensure(build.CONTAINERD, say), images.ensure()


class Rig:
    """One Kubernetes cluster of one or two nodes.
    ``with Rig() as rig:`` starts it and leaves nothing behind.
    """

    def __init__(
        self,
        name: str | None = None,
        options: Options | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``name`` becomes part of every path and cgroup; without one, the rig gets an unused name.
        ``say`` receives slow steps.
        """
        self.layout = Layout.fresh() if name is None else Layout(name)
        self._wanted = options
        self._say = say
        self._keeper: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self.start_seconds = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def name(self) -> str:
        return self.layout.name

    @cached_property
    def plan(self) -> Plan:
        return Plan.load(self.layout)

    # ---------------------------------------------------------------- start and stop

    def start(self, *, owned: bool = True) -> None:
        """Start the rig and wait until its nodes take pods; ``start_seconds`` then says how long
        that took, builds not counted.

        An ``owned`` rig ends with this process, however that ends. Others run until `stop` is
        called.

        Raises:
            RequirementError: this machine cannot hold a rig.
            RigError: it is already running, or does not come up; the message holds the ends of the
                logs.
        """
        kubernetes, containerd, archives = prepare(self._say)
        leftovers.collect()
        began = time.monotonic()
        try:
            self.layout.run.mkdir(mode=0o711)
        except FileExistsError as err:
            raise RigError(
                f"a rig named {self.name!r} is already running; stop it with `scripts/cluster down "
                f"--name {self.name}`"
            ) from err
        self.layout.logs.mkdir()
        self.plan = Plan(self._wanted or Options(), kubernetes, containerd, archives)
        self.plan.save(self.layout)
        try:
            self._start_keeper(owned=owned)
            self._wait_until_ready()
        except BaseException:
            # also Ctrl-C and a test's timeout: whatever stops the start must not leave half a rig
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def start_with_retry(self) -> None:
        """Start the rig, and once more if it does not come up: on a busy machine a component of
        Kubernetes may give up waiting for another one, and that says nothing about what is tested.

        Raises:
            RigError: it does not come up the second time either.
        """
        try:
            self.start()
        except RigError as err:
            print(f"{err}\nit is started again", file=sys.stderr)  # noqa: T201 - for pytest's report
            self.start()

    def _start_keeper(self, *, owned: bool) -> None:
        lifeline_read, lifeline_write = os.pipe()
        self._lifeline = lifeline_write
        environment = config.environment(self.plan) | {"PYTHONDONTWRITEBYTECODE": "1"}
        with self.layout.log("keeper").open("ab") as log:
            self._keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.real_node.rig.keeper",
                    self.name,
                    "owned" if owned else "free",
                ],
                cwd=_PROJECT,
                env=environment,
                stdin=lifeline_read if owned else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # a Ctrl-C or a kill of the test run's process group must not hit the process that
                # cleans up
                start_new_session=True,
            )
        os.close(lifeline_read)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.layout.ready.exists():
            dead = self._keeper is not None and self._keeper.poll() is not None
            if dead or self.layout.failed.exists() or time.monotonic() > deadline:
                tails = "\n".join(f"--- {name}\n{tail}" for name, tail in self.log_tails(lines=8))
                raise RigError(f"rig {self.name!r} did not come up; the ends of its logs:\n{tails}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End the rig and wait until nothing of it is left.
        Does nothing to one that is already gone.

        Raises:
            RigError: its keeper does not end.
        """
        self._forget_api()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        record = KeeperRecord.load(self.layout)
        if record is not None and record.keeper.is_alive():
            descriptor = os.pidfd_open(record.keeper.pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                if not select.select([descriptor], [], [], _STOP_SECONDS)[0]:
                    raise RigError(
                        f"the keeper of rig {self.name!r} (pid {record.keeper.pid}) did not end "
                        f"within {_STOP_SECONDS:g} s"
                    )
            finally:
                os.close(descriptor)
        if self._keeper is not None:
            self._keeper.wait(_STOP_SECONDS)
            self._keeper = None
        leftovers.remove(self.layout)
        self._forget_api()  # a thread of a test may have asked meanwhile
        self.__dict__.pop("plan", None)

    def _forget_api(self) -> None:
        """Close the connections to the API server. After the next start it has another network."""
        if (api := self.__dict__.pop("api", None)) is not None:
            api.close()

    def is_running(self) -> bool:
        return leftovers.is_running(self.layout)

    # ---------------------------------------------------------------- from outside to inside

    @property
    def record(self) -> KeeperRecord:
        """Return the keeper's record. Raises: RigError when the rig does not run."""
        record = KeeperRecord.load(self.layout)
        if record is None or record.first is None or not record.first.is_alive():
            raise RigError(
                f"rig {self.name!r} does not run; `scripts/cluster status` lists those that do"
            )
        return record

    @property
    def _first_pid(self) -> int:
        first = self.record.first
        assert first is not None
        return first.pid

    @property
    def network_namespace(self) -> str:
        """A file that stands for the rig's network namespace,
        for setns(2) and ``nsenter --net=``.
        """
        return f"/proc/{self._first_pid}/ns/net"

    def connect(self, address: str, port: int) -> socket.socket:
        """A TCP connection as a process on the node would make it, e.g. to a pod's address."""
        return netns.connect(self.network_namespace, (address, port), timeout_seconds=10.0)

    def in_network(self, *command: str) -> list[str]:
        """``command`` so that it runs in the rig's network but otherwise on the host:
        host files, host pids.
        """
        return ["nsenter", f"--net={self.network_namespace}", "--", *command]

    def in_node(self, *command: str, node: int = 1) -> list[str]:
        """``command`` so that it runs as a process of Kubernetes node ``node`` would:
        its mounts, network and pids.
        """
        into_rig = ["nsenter", "--target", str(self._first_pid), "--pid", "--mount", "--net", "--"]
        into_node = [
            "nsenter",
            "--target",
            self.layout.node(node).process_id.read_text(),
            "--mount",
            "--",
        ]
        path = f"PATH={config.tools_dir(self.layout)}:{host.program_path(self.plan.containerd)}"
        return [
            *into_rig,
            *into_node,
            "env",
            path,
            f"KUBECONFIG={self.layout.kubeconfig()}",
            *command,
        ]

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as cluster admin; returns what it prints.

        Raises:
            RigError: it fails; the message is what it printed to standard error.
        """
        return _output(self.kubectl_command(*arguments), stdin)

    def kubectl_command(self, *arguments: str) -> list[str]:
        kubernetes = str(self.plan.kubernetes / "kubernetes")
        return self.in_network(
            kubernetes, "kubectl", "--kubeconfig", str(self.layout.kubeconfig()), *arguments
        )

    def ctr(self, *arguments: str, node: int = 1) -> str:
        """Run containerd's `ctr` on a node, among Kubernetes' containers. Raises:
        RigError when it fails.
        """
        return _output(self.in_node(*config.ctr(self.plan), *arguments, node=node), None)

    def import_image(self, archive: Path, *, node: int = 1) -> None:
        """Make an OCI archive (images.py writes them) known to a node's containerd."""
        self.ctr("images", "import", "--local", str(archive), node=node)

    @cached_property
    def api(self) -> Api:
        """The API server, as cluster admin."""
        return Api.of(self.layout, network_namespace=self.network_namespace)

    # ---------------------------------------------------------------- pods and nodes

    def wait_for(
        self,
        predicate: Callable[[], _Found | None],
        timeout: float = 30.0,
        *,
        what: str = "the condition",
    ) -> _Found:
        """The first true value of ``predicate``, asked for ``timeout`` seconds (`wait_until`).
        Raises: TimeoutError.
        """
        return wait_until(what, predicate, timeout_seconds=timeout)

    def create_pod(self, manifest: Json) -> Json:
        """Create a pod in the namespace it names, ``default`` without. Raises:
        ApiError when it is refused.
        """
        return self.api.post(_pods(manifest["metadata"].get("namespace", "default")), manifest)

    def pod(self, name: str, *, namespace: str = "default") -> Json | None:
        """The pod as the API server has it, None when there is none."""
        return self.api.find(f"{_pods(namespace)}/{name}")

    def pods(self, *, namespace: str = "default") -> list[Json]:
        items: list[Json] = self.api.get(_pods(namespace))["items"]
        return items

    def add_static_pod(self, manifest: Json, *, node: int = 1) -> Path:
        """Give a node's kubelet a static pod, named in the API ``NAME-NODE``;
        removing the returned file ends it.

        On a kubelet a second old, its status can take 10 s to show in the API: too early for an
        event, it waits for the next round.
        """
        file = self.layout.node(node).static_pods / f"{manifest['metadata']['name']}.json"
        writing = self.layout.node(node).folder / f"{file.name}.writing"
        writing.write_text(json.dumps(manifest))
        return writing.rename(file)  # at once, for the kubelet reads a file as soon as it appears

    def delete_pod(self, name: str, *, namespace: str = "default", timeout: float = 30.0) -> None:
        """Delete a pod as a user would, and wait until the kubelet has ended it."""
        self.api.delete(f"{_pods(namespace)}/{name}")
        self.wait_for(
            lambda: self.pod(name, namespace=namespace) is None,
            timeout,
            what=f"the end of pod {name}",
        )

    def wait_for_phase(
        self, name: str, phase: str, timeout: float = 30.0, *, namespace: str = "default"
    ) -> Json:
        """The pod, once its phase is ``phase``. Raises: TimeoutError with the pod's status."""
        last: Json = {}

        def reached() -> Json | None:
            found = self.pod(name, namespace=namespace)
            last.clear()
            last.update((found or {}).get("status", {"phase": "(no such pod)"}))
            return found if last.get("phase") == phase else None

        try:
            return self.wait_for(reached, timeout)
        except TimeoutError as err:
            raise TimeoutError(
                f"pod {name} is not {phase} after {timeout:g} s: {json.dumps(last)}"
            ) from err

    def logs(self, pod: str, *, container: str = "main", namespace: str = "default") -> str:
        """Return a container's output so far. Raises: ApiError when it has not started."""
        return self.api.text(f"{_pods(namespace)}/{pod}/log?container={container}")

    def exec(
        self, pod: str, *command: str, container: str = "main", namespace: str = "default"
    ) -> str:
        """Run ``command`` in a running container; returns what it prints. Raises:
        RigError when it fails.
        """
        return self.kubectl(
            "exec", "--namespace", namespace, pod, "--container", container, "--", *command
        )

    def node(self, index: int = 1) -> Json:
        """The Node object of Kubernetes node ``index``."""
        return self.api.get(f"/api/v1/nodes/{self.node_name(index)}")

    def node_name(self, index: int = 1) -> str:
        return self.layout.node(index).name

    # ---------------------------------------------------------------- folders of a node, as the
    # host sees them

    def kubelet_dir(self, index: int = 1) -> Path:
        """The kubelet's /var/lib/kubelet: ``device-plugins/`` and ``pod-resources/``
        with their sockets lie below.
        """
        return self.layout.node(index).kubelet_dir

    def cdi_dir(self, index: int = 1) -> Path:
        """The node's /run/cdi."""
        return self.layout.node(index).cdi_dir

    def static_pod_dir(self, index: int = 1) -> Path:
        """The kubelet's staticPodPath."""
        return self.layout.node(index).static_pods

    # ---------------------------------------------------------------- components

    def stop_kubelet(self, index: int = 1, *, signal_number: int = signal.SIGTERM) -> None:
        """Stop a node's kubelet and wait until it is gone; its pods keep running."""
        self.stop_component("kubelet", node=index, signal_number=signal_number)

    def start_kubelet(self, index: int = 1) -> None:
        """Start a node's kubelet unless it runs; does not wait until it is Ready."""
        self.start_component("kubelet", node=index)

    def restart_kubelet(self, index: int = 1) -> None:
        self.stop_kubelet(index)
        self.start_kubelet(index)

    def stop_component(
        self, name: str, *, node: int | None = None, signal_number: int = signal.SIGTERM
    ) -> None:
        """Stop ``kubelet`` or ``containerd`` of a node, or ``etcd``, ``apiserver``,
        ``controller-manager``, ``scheduler`` of the rig.
        """
        order(self._supervisor(node), {"do": "stop", "name": name, "signal": int(signal_number)})

    def start_component(self, name: str, *, node: int | None = None) -> None:
        order(self._supervisor(node), {"do": "start", "name": name})

    def components(self) -> dict[str, int]:
        """Return the running components as component → pid inside the rig;
        components of nodes end with ``-INDEX``.
        """
        running = order(self.layout.control, {"do": "status"})
        for node in self.nodes():
            running |= {
                f"{name}-{node.index}": pid
                for name, pid in order(node.control, {"do": "status"}).items()
            }
        return running

    def nodes(self) -> list[NodeLayout]:
        return [self.layout.node(index) for index in range(1, self.plan.options.nodes + 1)]

    def _supervisor(self, node: int | None) -> Path:
        return self.layout.control if node is None else self.layout.node(node).control

    # ---------------------------------------------------------------- between tests, and after a
    # failure

    def clean(self, timeout: float = 60.0) -> None:
        """Undo what a test did, and wait until the kubelets are done with it.

        Starts what was stopped; removes static pods, CDI specs, and the namespace ``default``'s
        pods and what would make new ones.
        """
        for name in ("etcd", "apiserver", "controller-manager", "scheduler"):
            self.start_component(name)
        self.wait_for(self.api.is_ready, timeout, what="the API server")
        for node in self.nodes():
            self.start_component("containerd", node=node.index)
            self.start_kubelet(node.index)
            for file in [*node.static_pods.iterdir(), *node.cdi_dir.iterdir()]:
                # An agent that still runs tidies up there, too.
                shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(
                    missing_ok=True
                )
        for kind in ("daemonsets", "deployments"):
            self.api.delete(f"/apis/apps/v1/namespaces/default/{kind}")
        self.api.delete(_pods("default"))
        self.wait_for(lambda: not self.pods(), timeout, what="the end of all pods")

    def log_tails(self, *, lines: int = 40) -> Iterator[tuple[str, str]]:
        """The last ``lines`` of the logs that explain most failures, as (component, text):
        its own, containerd's, kubelets'.
        """
        for pattern in ("keeper", "inside", "node-*", "containerd-*", "kubelet-*"):
            for path in sorted(self.layout.logs.glob(f"{pattern}.log")):
                text = path.read_text(errors="replace").splitlines()[-lines:]
                if text:
                    yield path.stem, "\n".join(text)


def _pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def _output(command: list[str], stdin: str | None) -> str:
    result = subprocess.run(command, text=True, input=stdin or "", capture_output=True, check=False)
    if result.returncode:
        raise RigError(
            result.stderr.strip() or f"{' '.join(command)} ended with {result.returncode}"
        )
    return result.stdout


@contextlib.contextmanager
def running_rig(options: Options | None = None) -> Iterator[Rig]:
    """A rig that runs until the end of the context, for many tests.

    Raises:
        RigError: it does not come up, see `Rig.start_with_retry`.
    """
    rig = Rig(options=options)
    rig.start_with_retry()
    try:
        yield rig
    finally:
        rig.stop()
