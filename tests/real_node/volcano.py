"""Volcano beside a real API server: the stand-in scheduler as a process, pods for it,
and what it wrote.

For tests of the agent and of the stand-in itself. The scheduler runs on the host, in the rig's
network, as cluster admin; `Advertised` puts onto a Node what a device plugin would, for tests
without one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import container, pod

VGPU = "volcano.sh/vgpu-"
IDS = "volcano.sh/vgpu-ids-new"
_PROJECT = Path(__file__).resolve().parents[2]
END_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")  # also when the test run itself is killed
_MERGE_PATCH = "application/merge-patch+json"


class VolcanoScheduler:
    """The stand-in scheduler on a rig's API server;
    a context, plain or asynchronous, or `start`, `kill` and `start` again.

    State: the process, and its log in a folder that goes with the context.
    """

    module = "vgpu_agent.sim.volcano.scheduler"
    started = "sim.volcano.started"

    def __init__(
        self,
        rig: Rig,
        *,
        policy: Literal["none", "binpack", "spread"] = "none",
        old: bool = False,
        gpushare: Literal["off", "share", "number"] = "off",
        node_lock: bool = False,
        min_members: Mapping[str, int] | None = None,
        scheduler_name: str = "volcano",
    ) -> None:
        """The arguments mean what they mean to `vgpu_agent.sim.volcano.scheduler`."""
        self._flags = ["--policy", policy, "--gpushare", gpushare]
        self._flags += ["--scheduler-name", scheduler_name]
        self._flags += ["--old"] if old else []
        self._flags += ["--node-lock"] if node_lock else []
        for group, number in (min_members or {}).items():
            self._flags += ["--min-member", f"{group}={number}"]
        self._rig = rig
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="vga-volcano")
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.__exit__)

    def start(self) -> None:
        """Start the process and wait until it schedules;
        it ends with the thread that started it, however that ends.

        Raises:
            TimeoutError: it did not come up; the message holds its log.
        """
        command = [
            sys.executable,
            "-m",
            self.module,
            "--kubeconfig",
            str(self._rig.layout.kubeconfig()),
            *self._flags,
        ]
        with self._log.open("ab") as log:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                [*END_WITH_PARENT, *self._rig.in_network(*command)],
                cwd=_PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._rig.wait_for(
                lambda: self.started in self.events() or None,
                what="the scheduler to start",
            )
        except TimeoutError as err:
            raise TimeoutError(f"{err}; its log:\n{self._log.read_text()}") from err

    def kill(self) -> None:
        """End the process, as kill -9 would; once is enough."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def log_lines(self) -> list[dict[str, Any]]:
        """The log of this run, one object per line."""
        with self._log.open("rb") as log:
            log.seek(self._log_from)
            whole = log.read().rpartition(b"\n")[0]
        return [
            json.loads(line) if line.startswith(b"{") else {"msg": line.decode(errors="replace")}
            for line in whole.splitlines()
        ]

    def events(self) -> list[str]:
        """The names of this run's log lines, in order."""
        return [line["msg"] for line in self.log_lines()]

    @property
    def _log(self) -> Path:
        assert self._folder is not None, "the scheduler is used outside of its context"
        return Path(self._folder.name, "volcano.log")


class Advertised:
    """A Node's resources and annotations without a device plugin;
    taken back at the end of the context.
    """

    def __init__(
        self,
        rig: Rig,
        resources: Mapping[str, int],
        annotations: Mapping[str, str] | None = None,
        *,
        node: int = 1,
    ) -> None:
        self._rig, self._path = rig, f"/api/v1/nodes/{rig.node_name(node)}"
        self._resources = {name: str(number) for name, number in resources.items()}
        self._annotations = dict(annotations or {})

    def __enter__(self) -> Self:
        self._patch(self._resources, self._annotations)
        return self

    def __exit__(self, *_: object) -> None:
        # the scheduler's own among them
        written = [*self._annotations, "volcano.sh/node-vgpu-handshake", "hamivgpu", "gpu"]
        self._patch(dict.fromkeys(self._resources), dict.fromkeys(written))

    def annotate(self, **annotations: str | None) -> None:
        """Change annotations below ``volcano.sh/``; underscores stand for dashes, None removes."""
        named = {f"volcano.sh/{name.replace('_', '-')}": text for name, text in annotations.items()}
        self._rig.api.patch(
            self._path, {"metadata": {"annotations": named}}, content_type=_MERGE_PATCH
        )

    def _patch(
        self, resources: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        self._rig.api.patch(
            f"{self._path}/status",
            {"status": {"capacity": resources, "allocatable": resources}},
            content_type=_MERGE_PATCH,
        )
        self._rig.api.patch(
            self._path, {"metadata": {"annotations": annotations}}, content_type=_MERGE_PATCH
        )


def vgpu(
    number: int | None = 1, memory: int | None = None, cores: int | None = None
) -> dict[str, int]:
    """The limits of a container that asks for vGPU; what is None is not mentioned."""
    named = {"number": number, "memory": memory, "cores": cores}
    return {VGPU + name: value for name, value in named.items() if value is not None}


def printing(name: str = "main", limits: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A container that prints its environment, one NAME=value a line, and then ``READY``, and
    stays; read it with `environment`.
    """
    return container(name, command="env; echo READY; sleep 100000", limits=limits)


def volcano_pod(
    name: str,
    *,
    containers: Sequence[dict[str, Any]],
    annotations: Mapping[str, str] | None = None,
    group: str = "",
    min_member: int = 0,
    **spec: Any,
) -> dict[str, Any]:
    """A pod for the stand-in scheduler; ``containers`` come from `printing`, ``group`` and
    ``min_member`` make it part of a gang.
    """
    made = pod(name, containers=list(containers), schedulerName="volcano", **spec)
    gang = {"scheduling.k8s.io/group-name": group} if group else {}
    gang |= {"scheduling.volcano.sh/group-min-member": str(min_member)} if min_member else {}
    made["metadata"]["annotations"] = {**gang, **(annotations or {})}
    return made


def annotations_of(rig: Rig, pod_name: str) -> dict[str, str]:
    """The pod's annotations as they are now; empty when there are none."""
    found = rig.pod(pod_name)
    assert found is not None, f"there is no pod {pod_name}"
    return dict(found["metadata"].get("annotations") or {})


def wait_bound(rig: Rig, pod_name: str, timeout: float = 20) -> dict[str, str]:
    """Wait until the pod has a node; its annotations then."""

    def found() -> dict[str, Any] | None:
        seen = rig.pod(pod_name)
        return seen if seen and seen["spec"].get("nodeName") else None

    return dict(
        rig.wait_for(found, timeout, what=f"pod {pod_name} to be bound")["metadata"].get(
            "annotations"
        )
        or {}
    )


def wait_unschedulable(rig: Rig, pod_name: str, timeout: float = 20) -> str:
    """Wait until the pod's status says why it has no node, and return that."""

    def told() -> str | None:
        conditions = (rig.pod(pod_name) or {}).get("status", {}).get("conditions") or []
        return next(
            (
                each["message"]
                for each in conditions
                if each["type"] == "PodScheduled" and each["status"] == "False"
            ),
            None,
        )

    return rig.wait_for(told, timeout, what=f"a reason why pod {pod_name} is not scheduled")


def environment(
    rig: Rig, pod_name: str, container_name: str = "main", timeout: float = 20
) -> dict[str, str]:
    """Return the environment of a `printing` container, once it has printed all of it."""

    def printed() -> list[str] | None:
        lines = rig.logs(pod_name, container=container_name).splitlines()
        return lines if "READY" in lines else None

    lines = rig.wait_for(printed, timeout, what=f"the output of {pod_name}/{container_name}")
    return dict(line.split("=", 1) for line in lines if "=" in line)
