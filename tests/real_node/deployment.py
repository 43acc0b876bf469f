"""The agent deployed by its manifests on a rig's node, for the tests of the manifests.

The DaemonSet's pod runs on simulated GPUs, and the folders of the backend hami-core lie in a
temporary folder instead of in /usr of the machine that runs the tests; everything that says how the
agent may run and what it may do stays as it is in manifests/.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.real_node.rig import Rig, images
from tests.real_node.rig.build import operator_definitions
from vgpu_agent.sim.build import build
from vgpu_agent.sim.state import SimulatedNode

PROJECT = Path(__file__).resolve().parents[2]
MANIFESTS = PROJECT / "manifests"
NAMESPACE = "vgpu-agent"
MERGE = "application/merge-patch+json"
SLOTS = 3
SIMULATOR = "/opt/vgpu-agent/lib/vgpu_agent/sim"


class Deployed(NamedTuple):
    """A rig on whose node the DaemonSet's pod is Ready, and the folder of the node in which
    simulated GPUs and hami-core's files lie.
    """

    rig: Rig
    folder: Path


def kustomized(rig: Rig, folder: Path, components: list[str]) -> list[dict[str, Any]]:
    """The objects of the base with more ``components``,
    as a user's own kustomization beside it would have them.
    """
    relative = os.path.relpath(MANIFESTS, folder.resolve())
    kustomization = {
        "resources": [relative],
        "components": [f"{relative}/components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return list(yaml.safe_load_all(rig.kubectl("kustomize", str(folder))))


def on_simulated_gpus(objects: list[dict[str, Any]], folder: Path) -> None:
    """Let the DaemonSet's pod run on the simulated GPUs in ``folder``."""
    (daemon_set,) = [each for each in objects if each["kind"] == "DaemonSet"]
    daemon_set["spec"]["minReadySeconds"] = 0
    spec = daemon_set["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    agent["args"] += ["--simulate", str(folder / "gpus")]
    agent["env"].append({"name": "XDG_CACHE_HOME", "value": str(folder / "cache")})
    agent["volumeMounts"].append({"name": "simulation", "mountPath": str(folder)})
    # The image has no simulator, so the checkout's is mounted where it would be.
    agent["volumeMounts"].append(
        {"name": "simulation", "mountPath": SIMULATOR, "subPath": "sim", "readOnly": True}
    )
    spec["volumes"].append(
        {"name": "simulation", "hostPath": {"path": str(folder), "type": "Directory"}}
    )


def _with_hami_core_in(objects: list[dict[str, Any]], folder: Path) -> None:
    """libvgpu.so out of busybox's image, which has a shell, and hami-core's folders inside
    ``folder``.
    """
    (daemon_set,) = [each for each in objects if each["kind"] == "DaemonSet"]
    spec = daemon_set["spec"]["template"]["spec"]
    named = {each["name"]: each for each in spec["initContainers"]}
    slots, library = named["region-slots"], named["hami-core-library"]
    slots["args"][slots["args"].index("--count") + 1] = str(SLOTS)
    library.update(
        image=images.BUSYBOX,
        imagePullPolicy="Never",
        env=[{"name": "LIBRARY", "value": "/bin/busybox"}],
    )
    for volume in spec["volumes"]:
        if volume["name"].startswith("hami-core"):
            volume["hostPath"]["path"] = str(folder / volume["name"])


def image() -> Path:
    """An archive with the agent's image, built if need be."""
    # A fixed commit: the image is built anew when what is in it changes, and not for every commit.
    command = [str(PROJECT / "scripts" / "image"), "--commit", "test"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return Path(archive)


@contextlib.contextmanager
def simulated_node(rig: Rig) -> Iterator[Path]:
    """The agent's image and a folder with simulated GPUs and their library on the rig's node, and
    the node labelled as one that has GPUs.
    """
    rig.import_image(image())
    folder = Path(tempfile.mkdtemp(prefix="vgm", dir="/tmp"))
    folder.chmod(0o755)
    SimulatedNode.create(folder / "gpus", model="A100-SXM4-40GB", gpus=2)
    library = build()
    shutil.copytree(library.parent, folder / "cache" / "vgpu-agent" / "sim" / library.parent.name)
    shutil.copytree(
        PROJECT / "vgpu_agent" / "sim", folder / "sim", ignore=shutil.ignore_patterns("__pycache__")
    )
    try:
        rig.kubectl("label", "node", rig.node_name(), "nvidia.com/gpu.present=true")
        yield folder
    finally:
        rig.kubectl("label", "node", rig.node_name(), "nvidia.com/gpu.present-")
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def deployed_agent(rig: Rig) -> Iterator[Deployed]:
    """The base and hami-core with slots for regions, applied;
    gone afterwards with all it left on the node.
    """
    with simulated_node(rig) as folder:
        objects = kustomized(rig, folder, ["hami-core", "region-slots", "hami-core-library"])
        on_simulated_gpus(objects, folder)
        _with_hami_core_in(objects, folder)
        manifest = yaml.safe_dump_all(objects)
        try:
            rig.kubectl("apply", "-f", "-", stdin=manifest)
            wait_until_rolled_out(rig)
            yield Deployed(rig, folder)
        finally:
            rig.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=true", stdin=manifest)


@contextlib.contextmanager
def room_for_components(rig: Rig) -> Iterator[None]:
    """Everything that components need of a cluster: the namespace volcano-system, and the kinds of
    the Prometheus operator.
    """
    definitions = [str(path) for path in operator_definitions(lambda _: None)]
    files = [argument for path in definitions for argument in ("-f", path)]
    rig.kubectl("create", "namespace", "volcano-system")
    try:
        # Server-side, since an annotation of kubectl's would not hold them.
        rig.kubectl("apply", "--server-side", *files)
        rig.kubectl("wait", "--for=condition=Established", "--timeout=30s", *files)
        yield
    finally:
        rig.kubectl("delete", "namespace", "volcano-system")
        rig.kubectl("delete", "--ignore-not-found", *files)


def wait_until_rolled_out(rig: Rig, seconds: int = 60) -> None:
    """Until the DaemonSet's pod is the one of its template and Ready, at most for ``seconds``."""
    limit = f"--timeout={seconds}s"
    rig.kubectl("rollout", "status", "daemonset/vgpu-agent", "-n", NAMESPACE, limit)
