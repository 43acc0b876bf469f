"""The manifests against the code they deploy: names, ports, paths and times must agree, and nothing may be granted that is not used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpu_agent import __version__
from vgpu_agent.cdi.toolkit_specs import STATIC_DIRECTORY
from vgpu_agent.cli import main as command_line
from vgpu_agent.cluster import config_map
from vgpu_agent.config import load
from vgpu_agent.config.settings import Settings, split_address
from vgpu_agent.families.aws import PIPE_DIRECTORY
from vgpu_agent.isolation.mps import SHARED_MEMORY, MpsOptions

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
DEFAULTS = Settings()
NAME = "vgpu-agent"


COMPONENTS = MANIFESTS / "components"
# Why each folder of the node is there: the setting whose default it is. (path, type, may be written) per component, "" for the base.
HOST_FOLDERS = {
    "": {
        (str(DEFAULTS.kubelet.device_plugin_directory), "Directory", True),
        (str(DEFAULTS.kubelet.pod_resources_socket.parent), "Directory", False),
        (DEFAULTS.binding.cdi_directory, "DirectoryOrCreate", True),
        (DEFAULTS.state_directory, "DirectoryOrCreate", True),
    },
    "hami-core": {
        (DEFAULTS.hami_core.host_directory, "DirectoryOrCreate", True),
        (DEFAULTS.hami_core.lock_directory, "DirectoryOrCreate", True),
    },
}
READ_ONE = {("configmaps", "get"), ("configmaps", "list"), ("configmaps", "watch")}


def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def _rights(role: Any) -> set[tuple[str, str]]:
    """(resource, verb) of every rule; the core group only, and never a wildcard."""
    assert all(rule["apiGroups"] == [""] for rule in role["rules"])
    return {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}


def _host_folders(pod: Any) -> set[tuple[str, str, bool]]:
    """(path, type, may be written) of the pod's hostPath volumes, each mounted once and under its own path."""
    folders = set()
    (container,) = pod["containers"]
    for volume in pod["volumes"]:
        if "hostPath" in volume:
            (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
            assert mount["mountPath"] == volume["hostPath"]["path"]
            folders.add((volume["hostPath"]["path"], volume["hostPath"]["type"], not mount.get("readOnly", False)))
    return folders


@pytest.fixture(scope="module")
def kustomization() -> Any:
    """What ``kubectl apply -k`` reads first."""
    return _documents("kustomization.yaml")[0]


@pytest.fixture(scope="module")
def objects(kustomization: Any) -> dict[str, Any]:
    """Every object of the base, by kind; there is one of each."""
    found = [document for name in kustomization["resources"] for document in _documents(name)]
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def library_component() -> Any:
    """The pod spec that the init container is patched into."""
    return _documents("components/hami-core-library/daemonset.yaml")[0]["spec"]["template"]["spec"]


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


def test_everything_but_one_role_lies_in_the_one_namespace(kustomization: Any, objects: dict[str, Any]) -> None:
    """Namespaced objects name it themselves, so that a file can also be applied alone."""
    assert objects["Namespace"]["metadata"]["name"] == NAME
    assert {objects[kind]["metadata"]["namespace"] for kind in ("ServiceAccount", "ConfigMap", "DaemonSet")} == {NAME}
    assert "namespace" not in kustomization  # it would move the role for kube-system along


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


@pytest.mark.parametrize("key", ["nvidia.com/gpu", "k8s.amazonaws.com/vgpu", "volcano.sh/gpu-memory"])
def test_the_pod_tolerates_the_taints_that_the_replaced_plugins_tolerate(pod: Any, key: str) -> None:
    """Whoever keeps other pods off the GPU nodes in the usual way must not have to change the manifest."""
    assert {"key": key, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


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


def test_every_folder_of_the_node_is_there_for_a_setting(pod: Any) -> None:
    """Whole folders, since the kubelet makes its sockets anew; under the node's own path; the kubelet's must exist, ours are made."""
    assert _host_folders(pod) == HOST_FOLDERS[""]
    patched = _documents("components/hami-core/daemonset.yaml")[0]["spec"]["template"]["spec"]
    assert _host_folders(patched) == HOST_FOLDERS["hami-core"]


def test_nothing_else_can_be_written(pod: Any, container: Any) -> None:
    """The ConfigMaps are read-only, so is the image; and the pod has a network of its own."""
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {path for path, _, may_be_written in HOST_FOLDERS[""] if may_be_written}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))


def test_the_node_configuration_may_be_missing(pod: Any, container: Any) -> None:
    """Mounted where the setting looks, and a pod without that ConfigMap starts all the same."""
    assert DEFAULTS.volcano_vgpu.node_config_file is not None
    volume = _folder(pod, container, str(Path(DEFAULTS.volcano_vgpu.node_config_file).parent))
    assert volume["configMap"] == {"name": "volcano-vgpu-node-config", "optional": True}


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


def test_nothing_is_granted_that_is_not_used(objects: dict[str, Any]) -> None:
    """Own Node and pods are read and patched, events written, one ConfigMap read; no creation, no deletion, no secret, no wildcard."""
    assert _rights(objects["ClusterRole"]) == {
        *(("nodes", verb) for verb in ("get", "list", "watch", "patch")),
        ("nodes/status", "patch"),
        *(("pods", verb) for verb in ("get", "list", "watch", "patch")),
        *(("events", verb) for verb in ("create", "patch")),
    }
    assert not any("resourceNames" in rule for rule in objects["ClusterRole"]["rules"])


def test_one_config_map_is_readable_in_each_namespace_the_agent_looks_at(objects: dict[str, Any]) -> None:
    """The base grants it in kube-system and the component in volcano-system; that is where `cluster.config_map` looks, and by this name."""
    component = {document["kind"]: document for document in _documents("components/volcano/rbac.yaml")}
    roles = [objects["Role"], component["Role"]]
    assert tuple(role["metadata"]["namespace"] for role in roles) == config_map.NAMESPACES
    for role in roles:
        assert _rights(role) == READ_ONE
        assert [rule["resourceNames"] for rule in role["rules"]] == [[config_map.NAME]]


def test_evicting_must_be_asked_for() -> None:
    """Because no policy can confine it, the component grants it and the base does not."""
    (role, _) = _documents("components/eviction/rbac.yaml")
    assert _rights(role) == {("pods/eviction", "create")}
    assert DEFAULTS.binding.refused_evict_seconds == 0


def test_only_the_agents_pod_gets_the_token(objects: dict[str, Any], pod: Any) -> None:
    """The pod asks for it; another pod under the same account would have to ask, too."""
    assert pod["automountServiceAccountToken"] is True
    assert objects["ServiceAccount"]["automountServiceAccountToken"] is False


def test_every_role_is_bound_to_the_pods_account(objects: dict[str, Any], pod: Any) -> None:
    """So that the rules reach the agent and nobody else."""
    account = {"kind": "ServiceAccount", "name": objects["ServiceAccount"]["metadata"]["name"], "namespace": NAME}
    assert pod["serviceAccountName"] == account["name"]
    files = [path.relative_to(MANIFESTS) for path in MANIFESTS.rglob("rbac.yaml")]
    assert len(files) == 3
    for file in files:
        documents = _documents(str(file))
        for role, binding in zip(documents[::2], documents[1::2], strict=True):
            assert binding["kind"] == role["kind"] + "Binding"
            assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": role["kind"], "name": role["metadata"]["name"]}
            assert binding["metadata"].get("namespace") == role["metadata"].get("namespace")
            assert binding["subjects"] == [account]


def test_the_policy_speaks_of_the_account_that_the_pod_uses(objects: dict[str, Any]) -> None:
    """Another name would match nobody, and confine nothing; and it covers every resource whose patch is granted, but for events."""
    policy, binding = _documents("components/own-node-only/policy.yaml")
    account = objects["ServiceAccount"]["metadata"]
    assert f'"system:serviceaccount:{account["namespace"]}:{account["name"]}"' in policy["spec"]["matchConditions"][0]["expression"]
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    patched = {resource for resource, verb in _rights(objects["ClusterRole"]) if verb == "patch"}
    assert set(rule["resources"]) == patched - {"events"}
    assert policy["spec"]["failurePolicy"] == "Fail"


def test_the_kustomization_offers_every_component(kustomization: Any) -> None:
    """The policy is on; each of the others stands there as a comment, so that using it means taking a ``#`` away."""
    text = (MANIFESTS / "kustomization.yaml").read_text()
    offered = set(re.findall(r"^  (?:# )?- components/(\S+)", text, flags=re.MULTILINE))
    assert offered == {path.name for path in COMPONENTS.iterdir()}
    assert kustomization["components"] == ["components/own-node-only"]


@pytest.mark.parametrize("folder", sorted(COMPONENTS.iterdir()), ids=lambda folder: folder.name)
def test_a_component_lists_its_files_and_patches_what_exists(folder: Path, objects: dict[str, Any]) -> None:
    """A file that is not listed would look deployed; a patch for an object or container that is not there fails only at the user's."""
    component = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    patches = [patch["path"] for patch in component.get("patches", [])]
    assert sorted([*component.get("resources", []), *patches]) == sorted({path.name for path in folder.iterdir()} - {"kustomization.yaml"})
    base = objects["DaemonSet"]
    names = {container["name"] for container in base["spec"]["template"]["spec"]["containers"]}
    for patch in patches:
        (document,) = _documents(str((folder / patch).relative_to(MANIFESTS)))
        assert {key: document["metadata"][key] for key in ("name", "namespace")} == {"name": NAME, "namespace": NAME}
        assert document["kind"] == "DaemonSet"
        assert {container["name"] for container in document["spec"]["template"]["spec"].get("containers", [])} <= names


def test_the_init_container_has_no_more_rights_than_the_agent(library_component: Any, container: Any) -> None:
    """And it sees one folder: the one from which the library is then installed."""
    (delivering,) = library_component["initContainers"]
    assert delivering["securityContext"] == container["securityContext"]
    (mount,) = delivering["volumeMounts"]
    assert mount["mountPath"] == DEFAULTS.hami_core.host_directory
    assert f"{mount['mountPath']}/incoming/libvgpu.so" in delivering["command"][-1]


def test_what_cdi_needs_lies_where_the_agent_looks() -> None:
    """The node's tree under the path that the settings have for it, and the other directory of specs, both only to be read."""
    patched = _documents("components/cdi/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,) = patched["containers"]
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in patched["volumes"]}
    places = {folders[mount["name"]]: mount["mountPath"] for mount in agent["volumeMounts"]}
    assert places == {DEFAULTS.gpu.driver_root: DEFAULTS.cdi.container_driver_root, STATIC_DIRECTORY: STATIC_DIRECTORY}
    assert all(mount["readOnly"] for mount in agent["volumeMounts"])
    assert "securityContext" not in agent


def test_what_mps_needs_lies_where_daemons_and_containers_look(container: Any) -> None:
    """Pipes and shared memory under the paths that answers name, each way of propagation as it is needed; aws:D2, aws:D10."""
    document = _documents("components/mps/daemonset.yaml")[0]
    assert document["apiVersion"] == "apps/v1"
    patched = document["spec"]["template"]["spec"]
    (agent,) = patched["containers"]
    places = {mount["name"]: (mount["mountPath"], mount.get("mountPropagation")) for mount in agent["volumeMounts"]}
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in patched["volumes"]}
    mps = MpsOptions(DEFAULTS.mps.root, DEFAULTS.mps.container_root)
    assert {folders[name]: place for name, place in places.items()} == {
        mps.root: (mps.container_root, "Bidirectional"),
        mps.host_shared_memory: (SHARED_MEMORY, "HostToContainer"),
        PIPE_DIRECTORY: (PIPE_DIRECTORY, None),
    }
    assert (patched["hostPID"], agent["securityContext"]["privileged"]) == (True, True)
    capabilities = next(entry["value"] for entry in container["env"] if entry["name"] == "NVIDIA_DRIVER_CAPABILITIES")
    assert set(capabilities.split(",")) == {"compute", "utility"}  # which bring nvidia-cuda-mps-control and nvidia-smi


def test_the_pipe_of_a_daemon_of_the_host_is_seen_and_nothing_else_changes() -> None:
    """aws.mps: host. Named as in components/mps, so that both can be taken: one path can be mounted once."""
    patched = _documents("components/mps-host/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,), volumes = patched["containers"], patched["volumes"]
    mps = _documents("components/mps/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (mount,) = agent["volumeMounts"]
    assert mount in mps["containers"][0]["volumeMounts"]
    assert (mount["mountPath"], volumes) == (PIPE_DIRECTORY, [one for one in mps["volumes"] if one["name"] == mount["name"]])
    assert set(agent) == {"name", "volumeMounts"}


def test_what_divides_gpus_lies_where_the_settings_say_and_nothing_else_has_more_rights(container: Any) -> None:
    """The program is delivered by a container without rights; the agent may divide GPUs, and the setting in the comment names its path."""
    patched = _documents("components/mig/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (delivering,), (agent,) = patched["initContainers"], patched["containers"]
    assert delivering["securityContext"] == container["securityContext"]
    assert agent["securityContext"]["privileged"] is True
    ((folder,), (delivered,)) = agent["volumeMounts"], delivering["volumeMounts"]
    assert (folder["mountPath"], folder["readOnly"], folder["name"]) == (delivered["mountPath"], True, delivered["name"])
    program = f"{folder['mountPath']}/nvidia-mig-parted"
    assert delivering["command"][-1].endswith(program)
    assert f"migParted: {program}" in (COMPONENTS / "mig" / "kustomization.yaml").read_text()


def test_what_reads_mig_instances_has_what_nvidias_chart_has_for_it_and_no_more() -> None:
    """nvidia contract §14: the variable and the capability; the API server refuses SYS_ADMIN without the escalation."""
    (agent,) = _documents("components/mig-monitor/daemonset.yaml")[0]["spec"]["template"]["spec"]["containers"]
    assert agent["env"] == [{"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"}]
    assert agent["securityContext"] == {"allowPrivilegeEscalation": True, "capabilities": {"add": ["SYS_ADMIN"]}}


def test_the_config_map_says_nothing_that_would_beat_a_configuration_of_nvidias(objects: dict[str, Any], tmp_path: Path) -> None:
    """What stands in our file wins, so a value there would make one of a v1 file below ``nvidiaConfig``, or named by a label, void."""
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap"]["data"]["config.yaml"])
    origins = load.load({"--config": str(file)}, {}).origins
    assert {path for path, origin in origins.items() if origin != "default"} == set()


def test_named_configurations_are_mounted_whole_where_the_agent_looks() -> None:
    """The variable is NVIDIA's word for namedConfig.directory; a key mounted alone would never change under the agent."""
    patched = _documents("components/nvidia-config/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,), (volume,) = patched["containers"], patched["volumes"]
    (variable,), (mount,) = agent["env"], agent["volumeMounts"]
    assert load.load({}, {variable["name"]: variable["value"]}).settings.named_config.directory == mount["mountPath"]
    assert mount == {"name": volume["name"], "mountPath": mount["mountPath"], "readOnly": True}
    assert set(volume["configMap"]) == {"name"}
    guide = (ROOT / "docs" / "coming-from-nvidia-device-plugin.md").read_text()
    assert volume["configMap"]["name"] in guide


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


def test_the_image_script_builds_what_the_manifests_deploy(kustomization: Any) -> None:
    """Under the name that the kustomization sets; from the files that the Containerfile takes, so that no change of one is overlooked."""
    script = (ROOT / "scripts" / "image").read_text()
    image = kustomization["images"][0]
    assert f'default="{image["newName"]}:{image["newTag"]}"' in script
    (names,) = re.findall(r"^SOURCES = \((.*)\)$", script, flags=re.MULTILINE)
    allowed = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    assert set(re.findall(r'"([^"]+)"', names)) == allowed | {"Containerfile", ".containerignore"}


def test_the_last_stage_of_the_image_needs_no_shell() -> None:
    """Its base may have none; each RUN there names a program, and the command is Python."""
    containerfile = (ROOT / "Containerfile").read_text()
    last = containerfile[containerfile.rindex("\nFROM ") :]
    assert [line for line in last.splitlines() if line.startswith("RUN ") and not line.startswith('RUN ["python3"')] == []
    assert "#!/bin/sh" not in containerfile
