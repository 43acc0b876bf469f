"""The commands of README.md and docs/ for a cluster, run as they are written there: by bash with
the real kubectl, beside a deployed agent.

The folder `manifests` has the objects of this repository with the agent on simulated GPUs and all
its families of shares on. What the pages take for granted of a replaced plugin is there: its
ConfigMaps, DaemonSets that select no node, pods that nobody places.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.docs_commands import COMMANDS, NVIDIA_FILE, ROOT, Command, Way
from tests.real_node.deployment import (
    MANIFESTS,
    NAMESPACE,
    kustomized,
    on_simulated_gpus,
    simulated_node,
)
from tests.real_node.rig import Rig, images

_SECONDS = 180.0  # for one command, on a busy machine; a namespace takes a while to go
_SETTINGS = """\
version: v1
families: {nvidia: false, volcanoVgpu: true, vgpuManager: true}
volcanoVgpu: {isolation: none, gpuMemoryFactor: 64}
vgpuManager: {isolation: none}
nodeStatus: {condition: true}
"""
_CONFIG_MAPS = {
    "nvidia-config": {"config": NVIDIA_FILE},
    "vgpu-manager-device-plugin-config": {"nodeConfig.yaml": "version: v1\nconfigs: []\n"},
    "volcano-vgpu-node-config": {"config.json": '{"nodeconfig": []}'},
    "hami-device-plugin": {"config.json": '{"nodeconfig": []}'},
}
_DAEMON_SETS = (
    "aws-virtual-gpu-device-plugin-daemonset",
    "nvidia-device-plugin-daemonset",
    "the-plugin",
    "volcano-device-plugin",
)
# The pages' order is that of a person with one of the plugins. Here all of them are on one cluster:
# what installs comes first, and what removes comes last.
_ORDER = (
    r"^kubectl apply -f manifests/namespace\.yaml",
    r"^kubectl apply -k",
    r"rollout status",
    r"get configmap .*> ",
    r" create configmap ",
    r"",
    r"rollout restart",
    r" drain ",
    r" uncordon ",
    r" delete (pod|daemonset (?!vgpu-agent))",
    r" label node .* nvidia\.com/gpu\.present-",
    r" wait pod -l app\.kubernetes\.io/name=vgpu-agent",
    r" delete daemonset vgpu-agent",
    r" delete -k manifests --ignore-not-found",
    r" delete -k manifests$",
)
# A command that undoes what another one has done, or that needs it once more, has this before it.
_BEFORE = {
    r"get configmap volcano-vgpu-node-config -o yaml": (
        "kubectl -n vgpu-agent delete configmap volcano-vgpu-node-config --ignore-not-found"
    ),
    r"delete -k manifests$": "kubectl apply -k manifests",
}
# grep's status 1 is what the comment expects: nothing is left of the replaced program.
_ABSENT = re.compile(r"must (?:be empty|say NotFound)")
_NO_MATCH = (1, "")  # of grep: a healthy program has no lines but those of the level info
_SILENT = re.compile(r"get events|create configmap|wait pod|> \w+\.\w+$")


class Place(NamedTuple):
    """A machine for the commands: bash in ``folder``, in the network of the rig."""

    rig: Rig
    folder: Path
    environment: dict[str, str]

    def text(self, command: Command) -> str:
        """The command for bash."""
        text = command.text
        for pattern, replacement in (
            (r"\bNODE\b", self.rig.node_name()),
            (r"\bNAMESPACE\b", "kube-system"),
            (r"\bNAME-OF-THE-PLUGIN\b", "the-plugin"),
            (r"\bNAME\b(?!:)", "nvidia-config"),
            (r"\bKEY\b", "config"),
            (r"\bIMAGE-WITH-SLEEP\b", images.BUSYBOX),
            (r"(?<!\$)\bAGENT\b(?!=)", "$AGENT"),
        ):
            text = re.sub(pattern, replacement, text)
        if assigned := re.match(r"(\w+)=\$\(", text):
            text += f' && echo "${assigned[1]}" && test "$(wc -w <<<"${assigned[1]}")" = 1'
        before = next((found for key, found in _BEFORE.items() if re.search(key, text)), "true")
        return f"set -o pipefail; ({before}) >/dev/null && {text}"

    def run(self, command: Command) -> tuple[int, str]:
        """Exit status and output."""
        text = self.text(command)
        if " port-forward " in text:  # without an end of its own
            text = f"timeout --preserve-status --signal KILL 5 {text.rpartition('&& ')[2]}"
            text = f"{text.removesuffix('&')} | grep -m1 'Forwarding from'"
        agents = self.rig.pods(namespace=NAMESPACE)
        names = [each["metadata"]["name"] for each in agents]
        agent = next((name for name in names if name.startswith("vgpu-agent-")), "")
        ran = subprocess.run(
            self.rig.in_network("bash", "-c", text),
            cwd=self.folder,
            env={**self.environment, "AGENT": f"pod/{agent}"},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
        return ran.returncode, ran.stdout


def _as_simulated(objects: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The agent on simulated GPUs, and the extender without the kube-scheduler beside it, whose
    image is not here.
    """
    on_simulated_gpus(objects, folder)
    (daemon_set,) = [each for each in objects if each["kind"] == "DaemonSet"]
    image = daemon_set["spec"]["template"]["spec"]["containers"][0]["image"]
    for each in objects:
        name = (each["kind"], each["metadata"]["name"])
        if name == ("ConfigMap", "vgpu-agent"):
            each["data"]["config.yaml"] = _SETTINGS
        if name == ("Deployment", "vgpu-scheduler"):
            each["spec"]["replicas"] = 1
            _, extender = each["spec"]["template"]["spec"]["containers"]
            extender["args"].remove("--watch-lease")
            extender["image"] = image  # that of a kustomization's `images` is for its own objects
            each["spec"]["template"]["spec"]["containers"] = [extender]
    return objects


def _checkout(place: Path, objects: list[dict[str, Any]]) -> None:
    (place / "manifests").mkdir()
    shutil.copy(MANIFESTS / "namespace.yaml", place / "manifests")
    (place / "manifests" / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    (place / "manifests" / "kustomization.yaml").write_text("resources: [objects.yaml]\n")
    old = yaml.safe_dump(_daemon_set("volcano-device-plugin"))
    (place / "volcano-vgpu-device-plugin.yml").write_text(old)


def _daemon_set(name: str) -> dict[str, Any]:
    template = {
        "metadata": {"labels": {"name": name}},
        "spec": {
            "nodeSelector": {"no-node": "has-this"},
            "containers": [{"name": "plugin", "image": images.BUSYBOX}],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"name": name}}, "template": template},
    }


def _of_replaced_plugins() -> list[dict[str, Any]]:
    def named(kind: str, name: str, **more: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": "kube-system"}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}

    plugin = {"name": "plugin", "image": images.BUSYBOX}
    unplaced = {"schedulerName": "nobody", "containers": [plugin]}
    asked = {"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}}
    return [
        *(named("ConfigMap", name, data=data) for name, data in _CONFIG_MAPS.items()),
        *(_daemon_set(name) for name in _DAEMON_SETS),
        named("ServiceAccount", "vgpu-manager"),
        named("Pod", "vgpu-manager-device-plugin-x", spec=unplaced),
        named("Pod", "volcano-device-plugin-x", spec=unplaced),
        named("Pod", "of-hami", spec={**unplaced, "containers": [{**plugin, "resources": asked}]}),
    ]


@pytest.fixture
def place(rig: Rig, tmp_path: Path) -> Iterator[Place]:
    """A cluster with a node that has simulated GPUs, and remains of each replaced plugin."""
    programs = tmp_path / "programs"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    programs.mkdir()
    kubectl = f"{rig.plan.kubernetes}/kubernetes kubectl --kubeconfig {rig.layout.kubeconfig()}"
    agent = f"env PYTHONPATH={ROOT} {sys.executable} -m vgpu_agent"
    for path, program in {
        programs / "kubectl": kubectl,
        tmp_path / ".venv" / "bin" / "vgpu-agent": agent,
    }.items():
        path.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        path.chmod(0o755)
    old = yaml.safe_dump_all(_of_replaced_plugins())
    label = ["label", "node", rig.node_name(), "--overwrite"]
    with simulated_node(rig) as folder:
        _checkout(tmp_path, _as_simulated(kustomized(rig, folder, ["scheduler"]), folder))
        try:
            rig.kubectl("apply", "-f", "-", stdin=old)
            labels = ["vgpu-manager=device-plugin", "vgpu-manager-enable=enable", "gpu=on"]
            rig.kubectl(*label, *labels)
            found_in = f"{programs}:{os.environ['PATH']}"
            yield Place(rig, tmp_path, {**os.environ, "PATH": found_in})
        finally:
            rig.kubectl(*label, "vgpu-manager-", "vgpu-manager-enable-", "gpu-")
            gone = ["--ignore-not-found", "--wait=true"]
            rig.kubectl("delete", "-f", "-", *gone, stdin=old)
            rig.kubectl("delete", "-k", str(tmp_path / "manifests"), *gone)


def _turn(command: Command) -> int:
    return next(
        (
            turn
            for turn, pattern in enumerate(_ORDER)
            if pattern and re.search(pattern, command.text)
        ),
        _ORDER.index(""),
    )


@pytest.mark.timeout(900)  # some sixty commands, each of which waits for its effect
def test_the_commands_do_what_the_pages_say(place: Place) -> None:
    """Each ends well and prints something, the same one once."""
    commands = {place.text(each): each for each in COMMANDS if each.way is Way.CLUSTER}
    wrong = []
    for command in sorted(commands.values(), key=_turn):
        status, output = place.run(command)
        expected = 1 if _ABSENT.search(command.comment) else 0
        silent = expected or _SILENT.search(command.text)
        if "| grep -v " in command.text and (status, output) == _NO_MATCH:
            continue
        if status != expected or not (output.strip() or silent):
            wrong.append(f"{command.place}\n  status {status}\n{output[-500:]}")
    assert not wrong, "\n".join(wrong)
