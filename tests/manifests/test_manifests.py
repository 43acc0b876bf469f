"""The manifests against the code they deploy: names, ports, paths and times must agree, and nothing may be granted that is not used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpu_agent import __version__
from vgpu_agent.cli import main as command_line
from vgpu_agent.config import load
from vgpu_agent.config.settings import Settings, split_address

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
DEFAULTS = Settings()
NAME = "vgpu-agent"


def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


@pytest.fixture(scope="module")
def kustomization() -> Any:
    """What ``kubectl apply -k`` reads first."""
    return _documents("kustomization.yaml")[0]


@pytest.fixture(scope="module")
def objects(kustomization: Any) -> dict[str, Any]:
    """Every object of the base, by kind."""
    found = [document for name in kustomization["resources"] for document in _documents(name)]
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Any]) -> Any:
    """The pod spec of the DaemonSet."""
    return objects["DaemonSet"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    """Its only container."""
    (only,) = pod["containers"]
    return only


def _folder(pod: Any, container: Any, mount_path: str) -> Any:
    """The volume behind a mount path, with the mount's own fields."""
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == mount_path]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    return mount | volume


def test_the_kustomization_names_every_manifest_once(kustomization: Any) -> None:
    """A file that nobody lists would look deployed and not be."""
    files = {path.name for path in MANIFESTS.glob("*.yaml")} - {"kustomization.yaml"}
    assert sorted(kustomization["resources"]) == sorted(files)


def test_everything_lies_in_the_one_namespace(kustomization: Any, objects: dict[str, Any]) -> None:
    """Namespaced objects name it themselves, so that a file can also be applied alone."""
    assert kustomization["namespace"] == objects["Namespace"]["metadata"]["name"] == NAME
    assert {objects[kind]["metadata"]["namespace"] for kind in ("ServiceAccount", "ConfigMap", "DaemonSet")} == {NAME}


def test_the_image_is_the_one_the_kustomization_sets_to_this_version(kustomization: Any, container: Any) -> None:
    """A placeholder that kustomize does not know would reach the nodes as it is."""
    assert [image["name"] for image in kustomization["images"]] == [container["image"]]
    assert kustomization["images"][0]["newTag"] == __version__
    assert kustomization["images"][0]["newName"].startswith("localhost/")  # nobody else can publish under it


def test_the_config_map_holds_a_configuration_that_the_agent_accepts(objects: dict[str, Any], container: Any, tmp_path: Path) -> None:
    """The file that the arguments name, read with the container's and the image's variables: no error and no warning."""
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap"]["data"]["config.yaml"])
    environment = {entry["name"]: entry.get("value", "node-1") for entry in container["env"]}
    environment["VGPU_AGENT_COMMIT"] = "0123abc"  # from the image

    loaded = load.load({"--config": str(file)}, environment)

    assert loaded.warnings == ()
    assert loaded.settings.node_name == "node-1"
    assert loaded.settings.sharing == DEFAULTS.sharing


def test_the_commented_sharing_is_accepted_once_the_hashes_are_gone(objects: dict[str, Any], tmp_path: Path) -> None:
    """The ConfigMap tells its reader to take the ``#`` away; that must be all there is to do."""
    text = objects["ConfigMap"]["data"]["config.yaml"]
    opened = re.sub(r"^# (sharing:|  .*)$", r"\1", text, flags=re.MULTILINE)
    file = tmp_path / "config.yaml"
    file.write_text(opened)

    (shared,) = load.load({"--config": str(file)}, {}).settings.sharing.time_slicing.resources

    assert (shared.name, shared.replicas) == ("nvidia.com/gpu", 4)


def test_the_arguments_are_a_call_that_the_command_line_understands(container: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` behind them, so that nothing is started; an unknown flag or command would end with status 2."""
    with pytest.raises(SystemExit) as ended:
        command_line.main([*container["args"], "--help"])
    assert ended.value.code == 0
    assert "--config" in capsys.readouterr().out


def test_the_configuration_lies_where_the_arguments_look(pod: Any, container: Any) -> None:
    """Mounted as a directory, because Kubernetes never updates a subPath mount and the agent follows changes."""
    path = Path(container["args"][container["args"].index("--config") + 1])
    volume = _folder(pod, container, str(path.parent))
    assert volume["configMap"]["name"] == NAME
    assert "subPath" not in volume


@pytest.mark.parametrize(
    "folder", [DEFAULTS.kubelet.device_plugin_directory, DEFAULTS.kubelet.pod_resources_socket.parent], ids=["plugins", "pod-resources"]
)
def test_the_kubelets_folders_are_mounted_where_the_agent_looks(pod: Any, container: Any, folder: Path) -> None:
    """As whole folders of the node, since the kubelet makes its sockets anew; a folder that is missing is an error and is not made."""
    assert _folder(pod, container, str(folder))["hostPath"] == {"path": str(folder), "type": "Directory"}


def test_only_the_plugin_folder_can_be_written(pod: Any, container: Any) -> None:
    """The agent creates its own sockets there and writes nowhere else."""
    assert [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")] == [
        str(DEFAULTS.kubelet.device_plugin_directory)
    ]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert not pod.get("hostNetwork")


def test_the_metrics_port_is_the_default_one_everywhere(objects: dict[str, Any], container: Any) -> None:
    """The container's port, the probes' and the scraper's annotation; the debug port is not published at all."""
    (port,) = container["ports"]
    _, listening = split_address(DEFAULTS.listen)
    annotations = objects["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
    assert port["containerPort"] == listening == int(annotations["prometheus.io/port"])
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {port["name"]}
    assert split_address(DEFAULTS.debug_listen)[0] == "127.0.0.1"


def test_readiness_can_never_restart_anything(container: Any) -> None:
    """A missing kubelet or a hung card makes the agent not ready; only a stuck loop may cost it its life."""
    paths = {probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}


def test_the_agent_has_time_to_stop_in_order(pod: Any) -> None:
    """Draining and the web server's last answers are each bounded by shutdownSeconds; both fit before SIGKILL."""
    assert pod["terminationGracePeriodSeconds"] > 2 * DEFAULTS.shutdown_seconds


def test_the_container_has_the_least_that_works(container: Any) -> None:
    """Root for the kubelet's sockets, and no capability, no privilege, no way to get one."""
    context = container["securityContext"]
    assert context["runAsUser"] == 0
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["privileged"] is context["allowPrivilegeEscalation"] is False
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_nothing_is_granted_that_is_not_used(objects: dict[str, Any], pod: Any) -> None:
    """No library for the API server is among the dependencies, so no rule and no token may be there."""
    assert "kubernetes" not in (ROOT / "requirements" / "runtime.txt").read_text()
    assert objects["ClusterRole"]["rules"] == []
    assert objects["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False


def test_the_empty_role_is_bound_to_the_pods_account(objects: dict[str, Any], pod: Any) -> None:
    """So that rules added later reach the agent and nobody else."""
    binding = objects["ClusterRoleBinding"]
    account = {"kind": "ServiceAccount", "name": objects["ServiceAccount"]["metadata"]["name"], "namespace": NAME}
    assert binding["subjects"] == [account]
    assert pod["serviceAccountName"] == account["name"]
    assert binding["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]


def test_the_selector_finds_the_pods(objects: dict[str, Any]) -> None:
    """An API server refuses a DaemonSet whose selector does not match its own template."""
    spec = objects["DaemonSet"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_no_second_agent_runs_beside_the_first(objects: dict[str, Any]) -> None:
    """Two agents on a node would register the same resource (kubelet contract §5)."""
    strategy = objects["DaemonSet"]["spec"]["updateStrategy"]
    assert strategy["type"] == "RollingUpdate"
    assert set(strategy["rollingUpdate"]) == {"maxUnavailable"}


def test_the_image_is_of_this_version_and_knows_its_commit() -> None:
    """The label and the variable that ``build_info`` shows; the build ignores what it does not copy."""
    containerfile = (ROOT / "Containerfile").read_text()
    assert f'org.opencontainers.image.version="{__version__}"' in containerfile
    assert "VGPU_AGENT_COMMIT=${COMMIT}" in containerfile
    allowed = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = set(re.findall(r"^COPY (?!--)(\S+)", containerfile, flags=re.MULTILINE))
    assert copied == allowed
