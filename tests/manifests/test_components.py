"""The components against the base they patch and the settings they serve:
files, folders, variables and rights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.manifests.documents import COMPONENTS, DEFAULTS, MANIFESTS, NAME, ROOT, documents_of
from tests.manifests.test_old_schedulers import OLD as OLD_SCHEDULERS
from vgpu_agent.cdi.toolkit_specs import STATIC_DIRECTORY
from vgpu_agent.cli import main as command_line
from vgpu_agent.config import load
from vgpu_agent.families.nvidia.named import NamedConfig
from vgpu_agent.families.vgpu_manager.settings import VgpuManager
from vgpu_agent.isolation.mps import (
    CONTAINER_ROOT,
    DEFAULT_PIPE_DIRECTORY,
    SHARED_MEMORY,
    MpsOptions,
)


def test_the_kustomization_offers_every_component(kustomization: Any) -> None:
    """The policy is on. Each of the others is there as a comment,
    so that using it means taking a ``#`` away.
    """
    text = (MANIFESTS / "kustomization.yaml").read_text()
    offered = set(re.findall(r"^  (?:# )?- components/(\S+)", text, flags=re.MULTILINE))
    assert offered == {path.name for path in COMPONENTS.iterdir()}
    assert kustomization["components"] == ["components/own-node-only"]


@pytest.mark.parametrize("folder", sorted(COMPONENTS.iterdir()), ids=lambda folder: folder.name)
def test_a_component_lists_its_files_and_patches_what_exists(
    folder: Path, objects: dict[str, Any]
) -> None:
    """A file that is not listed would look deployed. A patch for an object or container that is not
    there fails only at the user's.
    """
    component = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    patches = [patch["path"] for patch in component.get("patches", []) if "path" in patch]
    generated = [file for one in component.get("configMapGenerator", []) for file in one["files"]]
    assert sorted([*component.get("resources", []), *patches, *generated]) == sorted(
        {str(path.relative_to(folder)) for path in folder.rglob("*.*")} - {"kustomization.yaml"}
    )
    if folder.name in OLD_SCHEDULERS:  # they patch components/scheduler, and are compared with it
        return
    base = objects["DaemonSet"]
    names = {container["name"] for container in base["spec"]["template"]["spec"]["containers"]}
    for patch in patches:
        (document,) = documents_of(str((folder / patch).relative_to(MANIFESTS)))
        assert {key: document["metadata"][key] for key in ("name", "namespace")} == {
            "name": NAME,
            "namespace": NAME,
        }
        assert document["kind"] == "DaemonSet"
        assert {
            container["name"]
            for container in document["spec"]["template"]["spec"].get("containers", [])
        } <= names


def test_the_init_container_has_no_more_rights_than_the_agent(
    library_component: Any, container: Any
) -> None:
    """It sees one folder: the one from which the library is then installed."""
    (delivering,) = library_component["initContainers"]
    assert delivering["securityContext"] == container["securityContext"]
    (mount,) = delivering["volumeMounts"]
    assert mount["mountPath"] == DEFAULTS.hami_core.host_directory
    assert f"{mount['mountPath']}/incoming/libvgpu.so" in delivering["command"][-1]


def test_what_vgpu_control_needs_lies_where_the_agent_looks() -> None:
    """The folder under its own path; the host's processes and cgroups, only to be read; and no
    right besides.
    """
    patched = documents_of("components/vgpu-control/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,) = patched["containers"]
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in patched["volumes"]}
    places = {
        folders[mount["name"]]: (mount["mountPath"], mount.get("readOnly", False))
        for mount in agent["volumeMounts"]
    }
    host_directory = DEFAULTS.vgpu_control.host_directory
    cgroups = f"{DEFAULTS.sysfs_root}/fs/cgroup"
    assert places == {host_directory: (host_directory, False), cgroups: (cgroups, True)}
    assert (patched["hostPID"], DEFAULTS.vgpu_control.processes) == (True, "client")
    assert "securityContext" not in agent


def test_what_delivers_vgpu_control_s_files_has_no_more_rights_than_the_agent(
    container: Any,
) -> None:
    """It sees one folder, and leaves both files where the comment has the setting point."""
    component = COMPONENTS / "vgpu-control-library"
    patched = documents_of("components/vgpu-control-library/daemonset.yaml")[0]
    (delivering,) = patched["spec"]["template"]["spec"]["initContainers"]
    assert delivering["securityContext"] == container["securityContext"]
    (mount,) = delivering["volumeMounts"]
    assert mount["mountPath"] == DEFAULTS.vgpu_control.host_directory
    script = delivering["command"][-1]
    assert f"cd {mount['mountPath']}; mkdir -p incoming; cd incoming;" in script
    assert script.count("mv -f") == script.count("cp ") == 2
    library = f"{mount['mountPath']}/incoming/libvgpu-control.so"
    assert f"library: {library}" in (component / "kustomization.yaml").read_text()


def test_what_cdi_needs_lies_where_the_agent_looks() -> None:
    """The node's tree under the path that the settings have for it,
    and the other directory of specs, both only to be read.
    """
    patched = documents_of("components/cdi/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,) = patched["containers"]
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in patched["volumes"]}
    places = {folders[mount["name"]]: mount["mountPath"] for mount in agent["volumeMounts"]}
    assert places == {
        DEFAULTS.gpu.driver_root: DEFAULTS.cdi.container_driver_root,
        STATIC_DIRECTORY: STATIC_DIRECTORY,
    }
    assert all(mount["readOnly"] for mount in agent["volumeMounts"])
    assert "securityContext" not in agent


def test_what_mps_needs_lies_where_daemons_and_containers_look(container: Any) -> None:
    """Pipes and shared memory under the paths that answers name,
    each way of propagation as it is needed; aws:D2, aws:D10.
    """
    document = documents_of("components/mps/daemonset.yaml")[0]
    assert document["apiVersion"] == "apps/v1"
    patched = document["spec"]["template"]["spec"]
    (agent,) = patched["containers"]
    places = {
        mount["name"]: (mount["mountPath"], mount.get("mountPropagation"))
        for mount in agent["volumeMounts"]
    }
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in patched["volumes"]}
    mps = MpsOptions(DEFAULTS.mps.root)
    assert {folders[name]: place for name, place in places.items()} == {
        mps.root: (CONTAINER_ROOT, "Bidirectional"),
        mps.host_shared_memory: (SHARED_MEMORY, "HostToContainer"),
        DEFAULT_PIPE_DIRECTORY: (DEFAULT_PIPE_DIRECTORY, None),
    }
    assert (patched["hostPID"], agent["securityContext"]["privileged"]) == (True, True)
    capabilities = next(
        entry["value"]
        for entry in container["env"]
        if entry["name"] == "NVIDIA_DRIVER_CAPABILITIES"
    )
    # which bring nvidia-cuda-mps-control and nvidia-smi
    assert set(capabilities.split(",")) == {"compute", "utility"}


def test_the_pipe_of_a_daemon_of_the_host_is_seen_and_nothing_else_changes() -> None:
    """aws.mps: host. Named as in components/mps, so that both can be taken:
    one path can be mounted once.
    """
    patched = documents_of("components/mps-host/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,), volumes = patched["containers"], patched["volumes"]
    mps = documents_of("components/mps/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (mount,) = agent["volumeMounts"]
    assert mount in mps["containers"][0]["volumeMounts"]
    assert (mount["mountPath"], volumes) == (
        DEFAULT_PIPE_DIRECTORY,
        [one for one in mps["volumes"] if one["name"] == mount["name"]],
    )
    assert set(agent) == {"name", "volumeMounts"}


def test_what_divides_gpus_lies_where_the_settings_say_and_nothing_else_has_more_rights(
    container: Any,
) -> None:
    """The program is delivered by a container without rights. The agent may divide GPUs, and the
    setting in the comment names its path.
    """
    patched = documents_of("components/mig/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (delivering,), (agent,) = patched["initContainers"], patched["containers"]
    assert delivering["securityContext"] == container["securityContext"]
    assert agent["securityContext"]["privileged"] is True
    ((folder,), (delivered,)) = agent["volumeMounts"], delivering["volumeMounts"]
    assert (folder["mountPath"], folder["readOnly"], folder["name"]) == (
        delivered["mountPath"],
        True,
        delivered["name"],
    )
    program = f"{folder['mountPath']}/nvidia-mig-parted"
    assert delivering["command"][-1].endswith(program)
    assert f"migParted: {program}" in (COMPONENTS / "mig" / "kustomization.yaml").read_text()


def test_what_reads_mig_instances_has_what_nvidias_chart_has_for_it_and_no_more() -> None:
    """nvidia §14: the variable and the capability.
    The API server refuses SYS_ADMIN without the escalation.
    """
    (agent,) = documents_of("components/mig-monitor/daemonset.yaml")[0]["spec"]["template"]["spec"][
        "containers"
    ]
    assert agent["env"] == [{"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"}]
    assert agent["securityContext"] == {
        "allowPrivilegeEscalation": True,
        "capabilities": {"add": ["SYS_ADMIN"]},
    }


def test_named_configurations_are_mounted_whole_where_the_agent_looks() -> None:
    """The variable is NVIDIA's word for namedConfig.directory.
    A key mounted alone would never change under the agent.
    """
    patched = documents_of("components/nvidia-config/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,), (volume,) = patched["containers"], patched["volumes"]
    (variable,), (mount,) = agent["env"], agent["volumeMounts"]
    assert (
        load.load({}, {variable["name"]: variable["value"]}).settings.section(NamedConfig).directory
        == mount["mountPath"]
    )
    assert mount == {"name": volume["name"], "mountPath": mount["mountPath"], "readOnly": True}
    assert set(volume["configMap"]) == {"name"}
    guide = (ROOT / "docs" / "coming-from-nvidia-device-plugin.md").read_text()
    assert volume["configMap"]["name"] in guide


def test_the_node_configuration_is_mounted_whole_where_the_guide_says() -> None:
    """vgpuManager.nodeConfigFile. A key mounted alone would never change under the agent."""
    folder = "components/vgpu-manager-config"
    patched = documents_of(f"{folder}/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (agent,), (volume,) = patched["containers"], patched["volumes"]
    (mount,) = agent["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": mount["mountPath"], "readOnly": True}
    assert set(volume["configMap"]) == {"name"}
    guide = (ROOT / "docs" / "coming-from-vgpu-manager.md").read_text()
    assert f"create configmap {volume['configMap']['name']} --from-file=nodeConfig.yaml" in guide
    assert f"vgpuManager.nodeConfigFile: {mount['mountPath']}/nodeConfig.yaml" in guide


def test_only_the_monitoring_reaches_the_metrics_port(
    objects: dict[str, Any], pod: Any, container: Any
) -> None:
    """The policy selects the DaemonSet's pods and opens their ports by their names: that of the
    agent's metrics, and that of the exporter where its component names one. A pod on the host's
    network would be beyond it.
    """
    (policy,) = documents_of("components/network-policy/networkpolicy.yaml")
    template = objects["DaemonSet"]["spec"]["template"]
    assert policy["metadata"]["namespace"] == objects["DaemonSet"]["metadata"]["namespace"]
    assert policy["spec"]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    (rule,) = policy["spec"]["ingress"]
    patched = documents_of("components/vgpu-manager-exporter/daemonset.yaml")[0]["spec"]
    (agent,) = patched["template"]["spec"]["containers"]
    assert [port["name"] for port in container["ports"]] == ["metrics"]
    assert rule["ports"] == [
        {"protocol": "TCP", "port": port["name"]} for port in (*container["ports"], *agent["ports"])
    ]
    assert rule["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    assert not pod.get("hostNetwork")


def test_the_exporter_s_port_is_the_one_that_its_comments_set(container: Any) -> None:
    """A Service for a port on which nothing listens would be silent."""
    folder = COMPONENTS / "vgpu-manager-exporter"
    patched = documents_of("components/vgpu-manager-exporter/daemonset.yaml")[0]["spec"]
    (agent,) = patched["template"]["spec"]["containers"]
    (port,) = agent["ports"]
    assert agent.keys() == {"name", "ports"}
    assert port["containerPort"] not in {each["containerPort"] for each in container["ports"]}
    address = f":{port['containerPort']}"
    # raises for what is no address
    msgspec.convert({"exporter": {"address": address}}, VgpuManager)
    for text in (folder / "kustomization.yaml", MANIFESTS / "kustomization.yaml"):
        assert f'"{address}"' in text.read_text()


@pytest.mark.parametrize(
    ("component", "backend", "host_directory"),
    [
        ("region-slots", "hami-core", DEFAULTS.hami_core.host_directory),
        ("vgpu-control-slots", "vgpu-control", DEFAULTS.vgpu_control.host_directory),
    ],
)
def test_slots_for_regions_are_mounted_before_the_agent_and_reach_the_node(
    component: str, backend: str, host_directory: str
) -> None:
    """Only the init container is privileged. What it mounts is seen by node and agent: else a
    region would lie where it is not found. It mounts for the one backend whose folder it has.
    """
    patched = documents_of(f"components/{component}/daemonset.yaml")[0]["spec"]["template"]["spec"]
    (slots,), (agent,) = patched["initContainers"], patched["containers"]
    assert slots["securityContext"]["privileged"] is True
    assert "securityContext" not in agent
    base = documents_of(f"components/{backend}/daemonset.yaml")[0]["spec"]["template"]["spec"]
    folder = base["containers"][0]["volumeMounts"][0]
    assert slots["args"][-2:] == ["--backend", backend]
    shared = {mount["name"]: mount for mount in slots["volumeMounts"]}
    assert shared[folder["name"]] == {**folder, "mountPropagation": "Bidirectional"}
    assert agent["volumeMounts"] == [{**folder, "mountPropagation": "HostToContainer"}]
    assert folder["mountPath"] == host_directory
    with pytest.raises(SystemExit) as ended:
        command_line.main([*slots["args"], "--help"])
    assert ended.value.code == 0
