"""A rolling update of the DaemonSet on a real node under a stream of bare pods, which the kubelet
fails for good if it has no healthy ids at their admission.

The update is one of the image, or of a setting that needs a restart. What is measured comes from
the kubelet: the phases of the pods, and from its log for how long a resource had no healthy ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from tests.real_node.agents import GPU, wait_allocatable
from tests.real_node.deployment import (
    MERGE,
    NAMESPACE,
    image,
    kustomized,
    on_simulated_gpus,
    simulated_node,
    wait_until_rolled_out,
)
from tests.real_node.rig import Rig, images
from tests.real_node.rig.manifests import pod
from tests.real_node.volcano import IDS, VGPU, vgpu
from vgpu_agent.sim.state import SimulatedNode

# Updates of each kind; more where the figures of docs/performance.md are measured.
UPDATES = int(os.environ.get("UPGRADE_TEST_UPDATES", "1"))
pytestmark = [pytest.mark.timeout(900 + 300 * UPDATES), pytest.mark.alone]
PAUSE_SECONDS = 0.2
# A machine that starts pods more slowly than five a second would run out of shares, and the test
# waits for the end of all pods. Looked at now and then, for that costs something as well.
MOST_UNFINISHED, LOOK_EACH = 20, 5
LEAST_PODS = 5  # in each update; fewer would say nothing of it
# Two cores that five new pods a second keep busy.
ROLL_OUT_SECONDS = 180
IMAGE, REBUILT = "localhost/vgpu-agent:0.1.0", "localhost/vgpu-agent:0.1.0-rebuilt"
_LINE = re.compile(
    r".\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*"
    r'"(Mark all resources Unhealthy for resource|Processed device updates for resource)"'
    r' resourceName="([^"]+)"'
)
# What the agent says of ids that the kubelet has given to two pods (docs/contracts/kubelet.md,
# section 7): it allows neither start, and an operator has to delete one of the pods. The test does
# what an operator does, and counts it. The agents avoid in a hand-over what leads there. Otherwise
# a List and a call may still meet by chance.
_SAME_IDS = re.compile(r" in two pods at once, \S+?/(\S+) and \S+?/(\S+);")
# Shares enough for pods whose containers a slow machine has yet to end.
NVIDIA = f"""\
version: v1
sharing: {{timeSlicing: {{resources: [{{name: {GPU}, replicas: 50}}]}}}}
"""
VOLCANO = """\
version: v1
families: {nvidia: false, volcanoVgpu: true}
volcanoVgpu: {isolation: none, deviceSplitCount: 50, gpuMemoryFactor: 64}
"""
Report = Callable[[str, object], None]
_DELETED, _LASTING_SECONDS = "Deleted", 30.0


class Pods(threading.Thread):
    """Creates a pod five times a second until the end of the context, or as fast as pods end where
    that is slower, and keeps count of them.

    The pods are bound at creation, so that the kubelet and no scheduler meets the window.
    """

    def __init__(self, rig: Rig, make: Callable[[str], dict[str, Any]], prefix: str) -> None:
        super().__init__(daemon=True)
        self._rig, self._make, self._prefix = rig, make, prefix
        self._over = threading.Event()
        self.names: list[str] = []
        self.held_back = 0  # how often a pod was not created
        self.error: Exception | None = None

    def _unfinished(self) -> list[str]:
        ended = "status.phase!=Succeeded,status.phase!=Failed"
        return self._rig.api.names(f"/api/v1/namespaces/default/pods?fieldSelector={ended}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            while not self._over.wait(PAUSE_SECONDS):
                if len(self.names) % LOOK_EACH == 0 and len(self._unfinished()) > MOST_UNFINISHED:
                    self.held_back += 1
                    continue
                name = f"{self._prefix}-{len(self.names)}"
                self._rig.create_pod(self._make(name))
                self.names.append(name)
        except Exception as err:  # noqa: BLE001 - the test reports it, whatever it is
            self.error = err


@dataclasses.dataclass
class Measured:
    """The outcome of all updates of one kind.

    Attributes:
        pods: how many were created meanwhile.
        held_back: how many were not created in time, because too many others had yet to end.
        failed: the phase and message of each that failed.
        windows: the seconds for which the kubelet had no healthy ids, for each resource and update
            where that was so.
        same_ids: how many pods were deleted because the kubelet had given their ids to another one.
    """

    pods: int = 0
    held_back: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    windows: list[float] = dataclasses.field(default_factory=list)
    same_ids: int = 0


class Deployment:
    """The DaemonSet on a rig's node, with one family in force."""

    def __init__(self, rig: Rig, config: str) -> None:
        self.rig, self._config = rig, config
        self._image, self._usage_seconds = IMAGE, 5

    def change_image(self) -> None:
        """Let the DaemonSet have the other of two images."""
        self._image = REBUILT if self._image == IMAGE else IMAGE
        self.rig.kubectl(
            "set", "image", "daemonset/vgpu-agent", f"agent={self._image}", "-n", NAMESPACE
        )

    def change_setting(self) -> None:
        """Change a setting that needs a restart, as docs/operations.md says."""
        self._usage_seconds += 1
        text = f"{self._config}gpu: {{usageSeconds: {self._usage_seconds}}}\n"
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/vgpu-agent"
        self.rig.api.patch(path, {"data": {"config.yaml": text}}, content_type=MERGE)
        self.rig.kubectl("rollout", "restart", "daemonset/vgpu-agent", "-n", NAMESPACE)

    def until_started_beside(self) -> None:
        """Wait until the new pod's container runs. Until then only the old agent has a part in
        anything, and a slow machine needs its cores to get there.
        """
        self.rig.wait_for(
            lambda: len(self._running()) == 2, ROLL_OUT_SECONDS, what="the new pod's container"
        )

    def _running(self) -> list[str]:
        return [
            one["metadata"]["name"]
            for one in self.rig.pods(namespace=NAMESPACE)
            if any(
                "running" in each["state"] for each in one["status"].get("containerStatuses", ())
            )
        ]

    def until_replaced(self) -> None:
        """Wait until the new agent has taken over and the old pod is gone."""
        wait_until_rolled_out(self.rig, ROLL_OUT_SECONDS)
        (name,) = self.rig.wait_for(
            self._the_only_pod, ROLL_OUT_SECONDS, what="the end of the old pod"
        )
        lines = self.rig.kubectl("logs", "-n", NAMESPACE, name).splitlines()
        assert "agent.took_over" in [json.loads(line)["msg"] for line in lines], lines

    def _the_only_pod(self) -> list[str] | None:
        names = [one["metadata"]["name"] for one in self.rig.pods(namespace=NAMESPACE)]
        return names if len(names) == 1 else None


def _phases(rig: Rig, names: list[str]) -> dict[str, str]:
    """Wait until each pod has ended, and return its phase with the message: `_DELETED` for one that
    had to be deleted because it had another's ids.
    """
    phases: dict[str, str] = {}
    told_at: dict[tuple[str, str], float] = {}  # by pods with the same ids

    def all_ended() -> bool:
        for item in rig.api.get("/api/v1/namespaces/default/pods")["items"]:
            name, status = item["metadata"]["name"], item["status"]
            if phases.get(name) == _DELETED:
                continue
            phases[name] = f"{status['phase']} {status.get('message', '')}"
            if found := _SAME_IDS.search(json.dumps(status)):
                one, other = found.groups()
                # one reading of the records may be from between the end of a pod and the next one
                first_seen = told_at.setdefault((one, other), time.monotonic())
                if time.monotonic() - first_seen > _LASTING_SECONDS and _DELETED not in {
                    phases.get(one),
                    phases.get(other),
                }:
                    rig.kubectl("delete", "pod", other, "--wait=true")
                    phases[other] = _DELETED
        return all(phases[name].startswith(("Succeeded", "Failed", _DELETED)) for name in names)

    try:
        rig.wait_for(all_ended, ROLL_OUT_SECONDS, what="all pods to end")
    except TimeoutError as err:
        raise AssertionError(phases) from err
    return {name: phases[name].strip() for name in names}


def _windows(rig: Rig, since: int) -> list[float]:
    """The seconds for which the kubelet had no healthy ids, for each resource of which that was so,
    by the kubelet's own log from byte ``since`` on.
    """
    gone: dict[str, float] = {}
    windows = []
    for line in rig.layout.log("kubelet-1").read_bytes()[since:].decode().splitlines():
        if not (found := _LINE.match(line)):
            continue
        hours, minutes, seconds, text, resource = found.groups()
        moment = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
        if text.startswith("Mark"):
            gone.setdefault(resource, moment)
        elif resource in gone:
            windows.append((moment - gone.pop(resource)) % 86400)
    assert not gone, gone
    return windows


def _under_load(
    deployment: Deployment,
    change: Callable[[], None],
    make: Callable[[str], dict[str, Any]],
    prefix: str,
) -> Measured:
    rig, measured = deployment.rig, Measured()
    for update in range(UPDATES):
        since = rig.layout.log("kubelet-1").stat().st_size
        change()
        deployment.until_started_beside()
        with Pods(rig, make, f"{prefix}{update}") as pods:
            deployment.until_replaced()
            time.sleep(3 * PAUSE_SECONDS)
        assert pods.error is None, pods.error
        names = pods.names
        measured.windows += _windows(rig, since)
        phases = _phases(rig, names)
        measured.failed += [phase for phase in phases.values() if phase.startswith("Failed")]
        measured.same_ids += list(phases.values()).count(_DELETED)
        measured.pods += len(names)
        measured.held_back += pods.held_back
        # one request; kubectl would send one for each pod, five a second
        rig.api.delete("/api/v1/namespaces/default/pods")
        rig.wait_for(lambda: not rig.pods(), ROLL_OUT_SECONDS, what="the end of all pods")
    return measured


def _measure(deployment: Deployment, make: Callable[[str], dict[str, Any]], report: Report) -> None:
    changes = {"image": deployment.change_image, "setting": deployment.change_setting}
    for kind, change in changes.items():
        measured = _under_load(deployment, change, make, kind)
        figures = (
            f"{measured.pods} pods, {len(measured.failed)} failed, {measured.same_ids} had to be "
            f"deleted, windows {measured.windows}"
        )
        print(f"{UPDATES} updates, another {kind}: {figures}")  # noqa: T201 - what it is run for
        report(f"{kind}_pods", measured.pods)
        report(f"{kind}_held_back", measured.held_back)
        report(f"{kind}_failed", measured.failed)
        report(f"{kind}_same_ids", measured.same_ids)
        report(f"{kind}_windows_ms", [round(1000 * each, 1) for each in sorted(measured.windows)])
        assert measured.pods >= LEAST_PODS * UPDATES
        assert not measured.failed
        assert not measured.windows
        assert measured.same_ids <= max(1, UPDATES // 10)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive with the agent's image as if it were built again."""
    images.write_rebuilt_image(tmp_path / "rebuilt.tar", REBUILT, image())
    return tmp_path / "rebuilt.tar"


@contextlib.contextmanager
def _deployed(rig: Rig, archive: Path, config: str) -> Iterator[tuple[Deployment, SimulatedNode]]:
    with simulated_node(rig) as folder:
        rig.import_image(archive)
        objects = kustomized(rig, folder, [])
        on_simulated_gpus(objects, folder)
        (settings,) = [
            each
            for each in objects
            if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", "vgpu-agent")
        ]
        settings["data"]["config.yaml"] = config
        manifest = yaml.safe_dump_all(objects)
        try:
            rig.kubectl("apply", "-f", "-", stdin=manifest)
            wait_until_rolled_out(rig)
            yield Deployment(rig, config), SimulatedNode.open(folder / "gpus")
        finally:
            rig.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=true", stdin=manifest)


@pytest.fixture
def nvidia(rig: Rig, archive: Path) -> Iterator[Deployment]:
    """Shares of two GPUs."""
    with _deployed(rig, archive, NVIDIA) as (deployment, _):
        wait_allocatable(rig, 100)
        yield deployment


@pytest.fixture
def volcano(volcano_rig: Rig, archive: Path) -> Iterator[tuple[Deployment, SimulatedNode]]:
    """Pods that decide which GPU they have."""
    with _deployed(volcano_rig, archive, VOLCANO) as (deployment, node):
        wait_allocatable(volcano_rig, 100, resource=VGPU + "number")
        yield deployment, node


def test_shares_of_nvidias_plugin(nvidia: Deployment, record_property: Report) -> None:
    """Ids name their GPUs."""

    def make(name: str) -> dict[str, Any]:
        return pod(name, command="true", limits={GPU: 1}, nodeName=nvidia.rig.node_name())

    _measure(nvidia, make, record_property)


def test_pods_of_volcano(
    volcano: tuple[Deployment, SimulatedNode], record_property: Report
) -> None:
    """The pod decides, and the agent that answers Allocate need not be the one that is asked before
    the start.
    """
    deployment, simulated = volcano
    node = deployment.rig.node_name()

    def make(name: str) -> dict[str, Any]:
        now = str(int(time.time()))
        segment = f"{simulated.uuids[len(name) % 2]},NVIDIA,1,0:"
        made = pod(name, command="true", limits=vgpu(1, 1), nodeName=node)
        made["metadata"]["annotations"] = {
            VGPU + "node": node,
            VGPU + "time": now,
            "volcano.sh/bind-time": now,
            "volcano.sh/bind-phase": "allocating",
            IDS: segment,
            "volcano.sh/devices-to-allocate": segment,
        }
        return made

    _measure(deployment, make, record_property)
