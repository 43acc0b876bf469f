"""A real kube-scheduler and the real command ``vgpu-agent scheduler`` beside a rig's API server.

Both run on the host, in the rig's network, as a cluster administrator, and end with the test
process. `Bound` notes when pods come to be bound.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.real_node.rig import Rig
from tests.real_node.rig.api import ApiError
from tests.real_node.scheduler.objects import PODS, SCHEDULER
from tests.replacing import replace_text

_PROJECT = Path(__file__).resolve().parents[3]
_END_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_START_SECONDS = 60.0
_WATCH_SECONDS = 600.0
PORT = 3456
BIND = "/scheduler/bind"


class Program:
    """One process in a rig's network; a context, or `start`, `kill` and `start` again.

    State: the process, and its files in a folder that goes with the context.
    """

    name = "program"

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.environment: Mapping[str, str] = {}
        self.folder = Path()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="vgs")
        self.folder = Path(self._temporary.name)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def command(self) -> list[str]:
        """Return the command line; each program has its own."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_END_WITH_PARENT, *self.rig.in_network("env", *self._set, *self.command())],
                cwd=_PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def _set(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environment.items()]

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None, f"{self.name} does not run"
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process, as kill -9 would; once is enough."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process by SIGTERM."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_START_SECONDS)
            self._process = None

    @property
    def pid(self) -> int:
        """The process id on the host."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    @property
    def log(self) -> Path:
        """All that it has written."""
        return self.folder / f"{self.name}.log"

    def wait(self, what: str, condition: Any) -> None:
        """Wait until ``condition`` is true. Raises: TimeoutError, with the end of the log."""
        try:
            self.rig.wait_for(lambda: condition() or None, _START_SECONDS, what=what)
        except TimeoutError as err:
            text = self.log.read_text(errors="replace")[-4000:]
            raise TimeoutError(f"{err}; the end of its log:\n{text}") from err


class Extender(Program):
    """``vgpu-agent scheduler``."""

    name = "extender"

    def __init__(
        self,
        rig: Rig,
        *flags: str,
        port: int = PORT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(rig)
        self.port, self._flags = port, flags
        self.environment = environment or {}
        self.ready_seconds = 0.0

    def command(self) -> list[str]:
        """See `Program`."""
        access = ["--kubeconfig", str(self.rig.layout.kubeconfig())]
        port = ["--server-bind-port", str(self.port)]
        return [sys.executable, "-m", "vgpu_agent", "scheduler", *access, *port, *self._flags]

    def start(self) -> None:
        """Start it and wait until it has read the cluster; ``ready_seconds`` is how long that
        took.
        """
        began = time.monotonic()
        super().start()
        self.wait("the extender to be ready", self.is_ready)
        self.ready_seconds = time.monotonic() - began

    def is_ready(self) -> bool:
        """Tell whether it has read the cluster."""
        try:
            return self.ask("GET", "/readyz")[0] == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        with connection_to(self.rig, self.port) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def metric(self, start: str) -> float:
        """Return the sum of all samples whose line starts so, such as ``name{verb="filter"``."""
        text = self.ask("GET", "/metrics")[1].decode()
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(start)
        )

    def calls(self, verb: str) -> int:
        """Return the number of kube-scheduler's calls of a verb, whatever their result."""
        return round(
            sum(
                self.metric(f'vgpu_scheduler_verb_total{{result="{result}",verb="{verb}"')
                for result in ("success", "refused", "error")
            )
        )

    def capacity(self) -> dict[str, Any]:
        """Return what it knows of all cards."""
        found: dict[str, Any] = json.loads(self.ask("GET", "/capacity")[1])
        return found

    def unhealthy_cards(self) -> int:
        """The number of unhealthy cards that it knows of."""
        return int(self.capacity()["cards"]["unhealthy"])

    def rss_mib(self, field: str = "VmRSS") -> float:
        """Its memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


class KubeScheduler(Program):
    """A kube-scheduler of its own, for the pods that name it as in ``profile``, with the extender
    behind ``port``; without one for port None.
    """

    name = "kube-scheduler"

    def __init__(
        self,
        rig: Rig,
        port: int | None = PORT,
        *,
        percentage_of_nodes: int | None = None,
        profile: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(rig)
        self._port, self._percentage = port, percentage_of_nodes
        self._profile = profile or {"schedulerName": SCHEDULER}

    def configuration(self) -> dict[str, Any]:
        """Return its KubeSchedulerConfiguration (vgpu-manager §5.1)."""
        found: dict[str, Any] = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(self.rig.layout.kubeconfig("scheduler")),
                "qps": 500,
                "burst": 1000,
            },
            "profiles": [dict(self._profile)],
        }
        if self._percentage is not None:
            found["percentageOfNodesToScore"] = self._percentage
        if self._port is not None:
            found["extenders"] = [
                {
                    "urlPrefix": f"http://127.0.0.1:{self._port}/scheduler",
                    "filterVerb": "filter",
                    "bindVerb": "bind",
                    "preemptVerb": "preempt",
                    "weight": 1,
                    "nodeCacheCapable": True,
                    "httpTimeout": "30s",
                    "ignorable": False,
                    "managedResources": [
                        {"name": "nvidia.com/vgpu-number", "ignoredByScheduler": False},
                        {"name": "nvidia.com/vgpu-cores", "ignoredByScheduler": True},
                        {"name": "nvidia.com/vgpu-memory", "ignoredByScheduler": True},
                    ],
                }
            ]
        return found

    def command(self) -> list[str]:
        """See `Program`."""
        file = self.folder / "scheduler.json"
        file.write_text(json.dumps(self.configuration()))
        program = str(self.rig.plan.kubernetes / "kubernetes")
        # its port is that of the rig's own kube-scheduler
        return [program, "scheduler", "--config", str(file), "--secure-port", "0"]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let it do nothing inside the context."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


class Forwarder(Program):
    """An address that leads to another port, which can be changed for new connections, as a
    Service would; it also measures and holds requests up (`forwarder`).
    """

    name = "forwarder"

    def __init__(self, rig: Rig, target: int, *, port: int = PORT + 10) -> None:
        super().__init__(rig)
        self.port, self._target = port, target

    def command(self) -> list[str]:
        """See `Program`."""
        self.point_to(self._target)
        replace_text(self.folder / "held", "")
        return [
            sys.executable,
            "-m",
            "tests.real_node.scheduler.forwarder",
            str(self.port),
            str(self.folder / "target"),
            str(self.folder / "times"),
            str(self.folder / "held"),
        ]

    def start(self) -> None:
        """Start it and wait until it listens."""
        super().start()
        self.wait("the forwarder to listen", lambda: "listening" in self.log.read_text())

    def point_to(self, port: int) -> None:
        """Lead new connections to another port."""
        replace_text(self.folder / "target", str(port))

    @contextlib.contextmanager
    def holding(self, path: str) -> Iterator[None]:
        """Pass on no request with this path inside the context."""
        replace_text(self.folder / "held", path)
        try:
            yield
        finally:
            replace_text(self.folder / "held", "")

    def held(self, path: str) -> int:
        """The number of requests with this path that have been held up so far."""
        return self.log.read_text().splitlines().count(f"held up {path}")

    def seconds(self) -> dict[str, list[float]]:
        """Stop it; path → the seconds of each call."""
        self.stop()
        found: dict[str, list[float]] = json.loads((self.folder / "times").read_text())
        return found


@contextlib.contextmanager
def connection_to(rig: Rig, port: int) -> Iterator[http.client.HTTPConnection]:
    """A connection to a program in the rig's network."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_SECONDS)
    connection.sock = rig.connect("127.0.0.1", port)
    try:
        yield connection
    finally:
        connection.close()


class Bound:
    """A record of the times at which pods of the namespace ``default`` were bound; a context
    manager.

    State: a thread with a watch, and name → the time (`time.monotonic`) at which it showed the pod.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.times: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        path = f"{PODS}?fieldSelector=spec.nodeName!="
        while not self._is_over.is_set():
            # An API server that is away ends the watch; the next one shows all pods again.
            with contextlib.suppress(OSError, ApiError, http.client.HTTPException, ValueError):
                watch = self._rig.api.watching_names(path, timeout_seconds=_WATCH_SECONDS)
                with watch as names:
                    for name in names:
                        self.times.setdefault(name, time.monotonic())
                        if self._is_over.is_set():
                            return
            time.sleep(0.05)

    def number(self, names: Iterable[str]) -> int:
        """Return how many of these pods are bound."""
        return sum(name in self.times for name in names)

    def wait(
        self,
        names: Sequence[str],
        number: int | None = None,
        *,
        timeout: float,
        beat: Callable[[], None] = lambda: None,
    ) -> float:
        """Wait until all of these, or ``number`` of them, are bound; when the last one was.

        ``beat`` is called once a second meanwhile, for the changes that a cluster always has:
        kube-scheduler may see a changed Node before the extender does, and then asks again with the
        next change.
        """
        wanted = len(names) if number is None else number
        beaten = time.monotonic()

        def are_bound() -> bool | None:
            nonlocal beaten
            if time.monotonic() > beaten + 1:
                beaten = time.monotonic()
                beat()
            return self.number(names) >= wanted or None

        try:
            self._rig.wait_for(
                are_bound,
                timeout,
                what=f"{wanted} of {len(names)} pods to be bound",
            )
        except TimeoutError as err:
            missing = [name for name in names if name not in self.times]
            found = self._rig.pod(missing[0]) or {}
            status = found.get("status", "no pod")
            raise TimeoutError(
                f"{err}; not bound are {missing[:20]}, the first of them with {status}"
            ) from err
        return sorted(self.times[name] for name in names if name in self.times)[wanted - 1]
