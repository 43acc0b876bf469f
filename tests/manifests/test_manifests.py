"""The base manifests against the code they deploy: names, ports, paths and times must agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.manifests.documents import DEFAULTS, HOST_FOLDERS, MANIFESTS, NAME, documents_of
from vgpu_agent import __version__
from vgpu_agent.agent import composition, late_web
from vgpu_agent.cli import main as command_line
from vgpu_agent.config import load
from vgpu_agent.config.settings import split_address
from vgpu_agent.families.nvidia.settings import Sharing
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu


def _host_folders(pod: Any) -> set[tuple[str, str, bool]]:
    """(path, type, may be written) of the pod's hostPath volumes,
    each mounted once and under its own path.
    """
    folders = set()
    (container,) = pod["containers"]
    for volume in pod["volumes"]:
        if "hostPath" in volume:
            (mount,) = [
                mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]
            ]
            assert mount["mountPath"] == volume["hostPath"]["path"]
            folders.add(
                (
                    volume["hostPath"]["path"],
                    volume["hostPath"]["type"],
                    not mount.get("readOnly", False),
                )
            )
    return folders


def _folder(pod: Any, container: Any, mount_path: str) -> Any:
    """The volume behind a mount path, with the mount's own fields."""
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == mount_path]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    return mount | volume


def test_the_kustomization_names_every_manifest_once(kustomization: Any) -> None:
    """A file that is not listed would look deployed and not be."""
    files = {path.name for path in MANIFESTS.glob("*.yaml")} - {"kustomization.yaml"}
    assert sorted(kustomization["resources"]) == sorted(files)


def test_everything_but_one_role_lies_in_the_one_namespace(
    kustomization: Any, objects: dict[str, Any]
) -> None:
    """Namespaced objects name it themselves, so that a file can also be applied alone."""
    assert objects["Namespace"]["metadata"]["name"] == NAME
    assert {
        objects[kind]["metadata"]["namespace"]
        for kind in ("ServiceAccount", "ConfigMap", "DaemonSet")
    } == {NAME}
    assert "namespace" not in kustomization  # it would move the role for kube-system along


def test_the_image_is_the_one_the_kustomization_sets_to_this_version(
    kustomization: Any, container: Any
) -> None:
    """A placeholder that kustomize does not know would reach the nodes as it is."""
    assert [image["name"] for image in kustomization["images"]] == [container["image"]]
    assert kustomization["images"][0]["newTag"] == __version__
    # no other account can publish under it
    assert kustomization["images"][0]["newName"].startswith("localhost/")


def test_the_config_map_holds_a_configuration_that_the_agent_accepts(
    objects: dict[str, Any], container: Any, tmp_path: Path
) -> None:
    """The file that the arguments name, read with the container's and the image's variables:
    no error and no warning.
    """
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap"]["data"]["config.yaml"])
    environment = {entry["name"]: entry.get("value", "node-1") for entry in container["env"]}
    environment["VGPU_AGENT_COMMIT"] = "0123abc"  # from the image

    loaded = load.load({"--config": str(file)}, environment)

    assert loaded.warnings == ()
    assert loaded.settings.node_name == "node-1"
    assert loaded.settings.section(Sharing) == DEFAULTS.section(Sharing)


def test_the_commented_sharing_is_accepted_once_the_hashes_are_gone(
    objects: dict[str, Any], tmp_path: Path
) -> None:
    """The ConfigMap tells its reader to take the ``#`` away. That must be all there is to do."""
    text = objects["ConfigMap"]["data"]["config.yaml"]
    opened = re.sub(r"^# (sharing:|  .*)$", r"\1", text, flags=re.MULTILINE)
    file = tmp_path / "config.yaml"
    file.write_text(opened)

    (shared,) = (
        load.load({"--config": str(file)}, {}).settings.section(Sharing).time_slicing.resources
    )

    assert (shared.name, shared.replicas) == ("nvidia.com/gpu", 4)


@pytest.mark.parametrize(
    "key", ["nvidia.com/gpu", "k8s.amazonaws.com/vgpu", "volcano.sh/gpu-memory"]
)
def test_the_pod_tolerates_the_taints_that_the_replaced_plugins_tolerate(
    pod: Any, key: str
) -> None:
    """Clusters that keep other pods off the GPU nodes in the usual way must not have
    to change the manifest.
    """
    assert {"key": key, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_the_arguments_are_a_call_that_the_command_line_understands(
    container: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--help`` behind them, so that nothing is started;
    an unknown flag or command would end with status 2.
    """
    with pytest.raises(SystemExit) as ended:
        command_line.main([*container["args"], "--help"])
    assert ended.value.code == 0
    assert "--config" in capsys.readouterr().out


def test_the_configuration_lies_where_the_arguments_look(pod: Any, container: Any) -> None:
    """Mounted as a directory, because Kubernetes never updates a subPath mount
    and the agent follows changes.
    """
    path = Path(container["args"][container["args"].index("--config") + 1])
    volume = _folder(pod, container, str(path.parent))
    assert volume["configMap"]["name"] == NAME
    assert "subPath" not in volume


def test_every_folder_of_the_node_is_there_for_a_setting(pod: Any) -> None:
    """Whole folders, since the kubelet makes its sockets anew, under the node's own path. The
    kubelet's must exist, ours are made.
    """
    assert _host_folders(pod) == HOST_FOLDERS[""]
    patched = documents_of("components/hami-core/daemonset.yaml")[0]["spec"]["template"]["spec"]
    assert _host_folders(patched) == HOST_FOLDERS["hami-core"]


def test_nothing_else_can_be_written(pod: Any, container: Any) -> None:
    """The ConfigMaps are read-only, so is the image; and the pod has a network of its own."""
    writable = {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert writable == {path for path, _, may_be_written in HOST_FOLDERS[""] if may_be_written}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))


def test_the_node_configuration_may_be_missing(pod: Any, container: Any) -> None:
    """Mounted where the setting looks, and a pod without that ConfigMap starts all the same."""
    assert DEFAULTS.section(VolcanoVgpu).node_config_file is not None
    volume = _folder(
        pod, container, str(Path(DEFAULTS.section(VolcanoVgpu).node_config_file).parent)
    )
    assert volume["configMap"] == {"name": "volcano-vgpu-node-config", "optional": True}


def test_the_metrics_port_is_the_default_one_everywhere(
    objects: dict[str, Any], container: Any
) -> None:
    """The container's port, the probes' and the scraper's annotation.
    The debug port is not published at all.
    """
    (port,) = container["ports"]
    _, listening = split_address(DEFAULTS.listen)
    annotations = objects["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
    assert port["containerPort"] == listening == int(annotations["prometheus.io/port"])
    assert {
        container[probe]["httpGet"]["port"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    } == {port["name"]}
    assert split_address(DEFAULTS.debug_listen)[0] == "127.0.0.1"


def test_readiness_can_never_restart_anything(container: Any) -> None:
    """A missing kubelet or a hung card makes the agent not ready.
    Only a stuck loop may cost it its life.
    """
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }


def test_the_agent_has_time_to_stop_in_order(pod: Any) -> None:
    """Draining and the web server's last answers are each bounded. Both fit before SIGKILL."""
    bounded = composition.SHUTDOWN_SECONDS + late_web.SHUTDOWN_SECONDS
    assert pod["terminationGracePeriodSeconds"] > bounded


def test_the_container_has_the_least_that_works(container: Any) -> None:
    """Root for the kubelet's sockets, and no capability, no privilege, no way to get one."""
    context = container["securityContext"]
    assert context["runAsUser"] == 0
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["privileged"] is context["allowPrivilegeEscalation"] is False
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_config_map_says_nothing_that_would_beat_a_configuration_of_nvidias(
    objects: dict[str, Any], tmp_path: Path
) -> None:
    """Our file wins, so a value there would void one of a v1 file below ``nvidiaConfig``,
    or named by a label.
    """
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap"]["data"]["config.yaml"])
    origins = load.load({"--config": str(file)}, {}).origins
    assert {path for path, origin in origins.items() if origin != "default"} == set()


def test_the_selector_finds_the_pods(objects: dict[str, Any]) -> None:
    """An API server refuses a DaemonSet whose selector does not match its own template."""
    spec = objects["DaemonSet"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_an_upgrade_starts_the_new_agent_beside_the_old_one(objects: dict[str, Any]) -> None:
    """It takes over when it is ready to serve, through a directory that both have."""
    spec = objects["DaemonSet"]["spec"]
    assert spec["updateStrategy"]["type"] == "RollingUpdate"
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": "10%", "maxUnavailable": 0}
    pod = spec["template"]["spec"]
    assert not pod.get("hostNetwork")
    assert not any("hostPort" in port for port in pod["containers"][0].get("ports", ()))
    (state,) = [volume for volume in pod["volumes"] if volume["name"] == "state"]
    assert state["hostPath"]["path"] == "/var/lib/vgpu-agent"
