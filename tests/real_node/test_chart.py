"""The Helm chart: the same objects as kustomize builds of the same components, values that are
checked, and names that follow release and namespace.

The installed chart is in test_chart_installed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.test_old_schedulers import OLD as OLD_SCHEDULERS
from tests.real_node.helm import CHART, MANIFESTS, HelmError, compared, helm, kustomized, template
from vgpu_agent import __version__

COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# Components that patch what another one brings.
NEEDS = {
    **{name: ["scheduler"] for name in OLD_SCHEDULERS},
    "region-slots": ["hami-core"],
    "hami-core-library": ["hami-core"],
    "vgpu-control-slots": ["vgpu-control"],
    "vgpu-control-library": ["vgpu-control"],
}
# Under `images` of a kustomization, and the same as values of the chart.
IMAGES = [
    {"name": "hami-core-library", "newName": "registry.example/hami", "newTag": "1"},
    {"name": "vgpu-control-library", "newName": "registry.example/control", "newTag": "2"},
    {"name": "mig-parted", "newName": "registry.example/mig", "newTag": "3"},
    {"name": "kube-scheduler", "newName": "registry.k8s.io/kube-scheduler", "newTag": "v1.36.3"},
    {"name": "vgpu-agent", "newName": "localhost/vgpu-agent", "newTag": __version__},
]
PICKS = [
    *([name] for name in ["own-node-only"] if name in COMPONENTS),
    *([*NEEDS.get(name, []), name] for name in COMPONENTS if name != "own-node-only"),
    ["hami-core", "region-slots", "hami-core-library", "cdi", "eviction"],
    ["mps", "hami-core", "vgpu-control"],
    [
        name
        for name in COMPONENTS
        if name not in {"own-node-only", "mps-host", "mig-monitor", *OLD_SCHEDULERS}
    ],
]
# What the chart knows by the version of kube-scheduler, and not by a component.
BY_VERSION = {
    "scheduler-1.24": "v1.22.17",
    "scheduler-1.21": "v1.21.14",
    "scheduler-1.20": "1.20.0",
}


def _in_order(components: list[str]) -> list[str]:
    """The components in the order in which the kustomization offers them."""
    text = (MANIFESTS / "kustomization.yaml").read_text()
    offered = re.findall(r"^  (?:# )?- components/(\S+)", text, flags=re.MULTILINE)
    return sorted(components, key=offered.index)


def _kustomization(folder: Path, components: list[str], **more: Any) -> Path:
    base = os.path.relpath(MANIFESTS, folder.resolve())
    text = {
        "resources": [base],
        "components": [
            f"{base}/components/{name}" for name in _in_order(components) if name != "own-node-only"
        ],
        "images": _images(components),
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


def _images(components: list[str]) -> list[dict[str, str]]:
    """The images, with a kube-scheduler of the version that the components are for."""
    older = [{"newTag": BY_VERSION[name]} for name in components if name in BY_VERSION]
    return [
        {**image, **older[0]} if older and image["name"] == "kube-scheduler" else image
        for image in IMAGES
    ]


def _values(folder: Path, values: dict[str, Any]) -> list[str]:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--values", str(path)]


def _of_components(components: list[str]) -> dict[str, Any]:
    (tag,) = [image["newTag"] for image in _images(components) if image["name"] == "kube-scheduler"]
    return {
        "components": {name: True for name in components if name not in BY_VERSION},
        "scheduler": {"kubeScheduler": {"imageTag": tag}},
        "images": {
            image["name"]: {"repository": image["newName"], "tag": image["newTag"]}
            for image in IMAGES[:3]
        },
    }


@pytest.mark.parametrize("components", PICKS, ids="+".join)
def test_the_chart_has_the_objects_that_kustomize_builds(
    components: list[str], tmp_path: Path
) -> None:
    """Object by object, whatever their text: two ways to install must not drift apart. The
    namespace is not part of a chart: `helm --create-namespace` makes it.
    """
    built = kustomized(_kustomization(tmp_path, components))
    del built[("Namespace", "", "vgpu-agent")]
    rendered = template(*_values(tmp_path, _of_components(components)))
    assert rendered.keys() == built.keys()
    for identity, one in built.items():
        assert compared(rendered[identity]) == compared(one), identity


def test_every_component_is_a_value_under_its_name() -> None:
    """In the values, in the schema, and with the same one on by default. Those for old versions of
    kube-scheduler are chosen by its version.
    """
    values = [name for name in COMPONENTS if name not in BY_VERSION]
    assert sorted(VALUES["components"]) == values
    assert sorted(SCHEMA["properties"]["components"]["properties"]) == values
    assert set(BY_VERSION) == set(OLD_SCHEDULERS)
    assert [name for name, on in VALUES["components"].items() if on] == ["own-node-only"]


def test_the_chart_has_the_agents_version() -> None:
    """Without a tag the image is that of the chart's version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    """Its linter, strictly: a warning is an error."""
    command = [helm(), "lint", "--strict", "--quiet", str(CHART)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_package_is_the_chart(tmp_path: Path) -> None:
    """The published package renders as the folder does, dashboards included."""
    subprocess.run(
        [helm(), "package", str(CHART), "--destination", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    values = _values(tmp_path, {"components": {"monitoring": True}})
    package = tmp_path / f"vgpu-agent-{__version__}.tgz"
    assert template(*values, chart=package) == template(*values)


def _unclosed(schema: Any, path: str = "") -> list[str]:
    """Objects of the schema that name their properties and still take others."""
    found = []
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("additionalProperties", True) is not False:
            found.append(path)
        for name, part in schema.items():
            found += _unclosed(part, f"{path}/{name}")
    return found


def test_no_object_of_the_schema_takes_an_unknown_name() -> None:
    """Helm would take a mistyped value and change nothing."""
    assert _unclosed(SCHEMA) == []


def _paths(values: Any, schema: Any, path: str = "") -> list[str]:
    """Values that the schema does not know."""
    found = []
    for name, value in values.items():
        known = schema.get("properties")
        if known is None:
            continue
        if name not in known:
            found.append(f"{path}{name}")
        elif isinstance(value, dict):
            found += _paths(value, known[name], f"{path}{name}.")
    return found


def test_every_value_is_in_the_schema() -> None:
    """And every name of the schema is in values.yaml, so that a reader finds it there."""
    assert _paths(VALUES, SCHEMA) == []
    text = (CHART / "values.yaml").read_text()
    # Helm's own, and what is accepted only to say no more than the default does.
    left_out = {"global", "gfd"}
    assert [name for name in SCHEMA["properties"] if name not in VALUES] == sorted(
        left_out, key=list(SCHEMA["properties"]).index
    )
    of_the_plugin = SCHEMA["properties"]["devicePlugin"]["properties"]
    older = {"kubeletRootDir", "vgpuManagerDir", "containers"}
    assert [name for name in of_the_plugin if name not in text and name not in older] == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"migStratgy": "single"}, "migStratgy"),
        ({"components": {"hamicore": True}}, "hamicore"),
        ({"migStrategy": "double"}, "migStrategy"),
        ({"gfd": {"enabled": True}}, "gfd"),
        ({"devicePlugin": {"devicePlugin": {"commands": {"deviceSplitCount": 0}}}}, "SplitCount"),
        ({"components": {"region-slots": True}}, "components.region-slots needs"),
        (
            {"components": {"hami-core": True, "hami-core-library": True}},
            "images.hami-core-library",
        ),
        ({"config": {"map": {"a": "version: v1"}, "name": "mine"}}, "set one of them"),
        (
            {"scheduler": {"enabled": True, "kubeScheduler": {"imageTag": "v1.19.16"}}},
            "name a kube-scheduler 1.20 or newer",
        ),
        ({"podState": {"accounts": ['a:b" || true || "']}}, "podState/accounts/0"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Before anything reaches the cluster."""
    with pytest.raises(HelmError, match=re.escape(named)):
        template(*_values(tmp_path, values))


def _agent(values: dict[str, Any], folder: Path) -> tuple[dict[str, str], Any, Any]:
    """The variables of the agent's container, the container, and its pod."""
    rendered = template(*_values(folder, values))
    pod = rendered[("DaemonSet", "vgpu-agent", "vgpu-agent")]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return {each["name"]: each.get("value", "") for each in container["env"]}, container, pod


def test_values_of_nvidias_chart_mean_the_same(tmp_path: Path) -> None:
    """They become the variables that the plugin had, and bring the component that they need."""
    values = {
        "config": {
            "map": {"default": "version: v1\n", "big": "version: v1\n"},
            "default": "big",
            "fallbackStrategies": ["named", "single"],
        },
        "compatWithCPUManager": True,
        "migStrategy": "mixed",
        "failOnInitError": False,
        "deviceListStrategy": "envvar,cdi-cri",
        "deviceIDStrategy": "index",
        "nvidiaDriverRoot": "/run/nvidia/driver",
        "gdsEnabled": True,
        "mofedEnabled": False,
        "cdi": {"nvidiaHookPath": "/usr/bin/nvidia-ctk"},
        "gfd": {"enabled": False},
        "runtimeClassName": "nvidia",
        "podAnnotations": {"team": "gpu"},
    }
    variables, container, pod = _agent(values, tmp_path)
    assert (
        variables.items()
        >= {
            "PASS_DEVICE_SPECS": "true",
            "MIG_STRATEGY": "mixed",
            "FAIL_ON_INIT_ERROR": "false",
            "DEVICE_LIST_STRATEGY": "envvar,cdi-cri",
            "DEVICE_ID_STRATEGY": "index",
            "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
            "GDS_ENABLED": "true",
            "MOFED_ENABLED": "false",
            "NVIDIA_CDI_HOOK_PATH": "/usr/bin/nvidia-ctk",
            "CONFIG_FILE_SRCDIR": "/available-configs",
            "DEFAULT_CONFIG": "big",
            "FALLBACK_STRATEGIES": "named,single",
            "NVIDIA_MIG_MONITOR_DEVICES": "all",
        }.items()
    )
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]
    assert pod["runtimeClassName"] == "nvidia"
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["nvidia-config"]["configMap"]["name"] == "vgpu-agent-configs"
    for volume in ("driver-root", "node-root"):
        assert volumes[volume]["hostPath"]["path"] == "/run/nvidia/driver"


def test_values_that_say_nothing_set_no_variable(tmp_path: Path) -> None:
    """A variable beats the configuration file, so a default must not become one."""
    variables, _, _ = _agent({}, tmp_path)
    assert variables.keys() == {"NODE_NAME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}


def test_values_of_vgpu_managers_chart_mean_the_same(tmp_path: Path) -> None:
    """The plugin's flags, the node configuration, the domain in every place that has it."""
    values = {
        "globalDomain": "gpu.example.com",
        "settings": {"families": {"vgpuManager": True}},
        "devicePlugin": {
            "enabled": True,
            "kubeletRootDir": "/var/lib/k0s/kubelet",
            "managerRoot": "/opt/vgpu-manager",
            "nodeSelector": {"vgpu-manager": "device-plugin"},
            "nodeConfig": {"yaml": "version: v1\nconfigs: []\n"},
            "devicePlugin": {
                "commands": {
                    "deviceSplitCount": 5,
                    "deviceMemoryScaling": 1.5,
                    "deviceMemoryFactor": 4194304,
                    "featureGates": "Reschedule=true",
                }
            },
        },
        "components": {"vgpu-control": True},
        "scheduler": {"enabled": True, "schedulerName": "shares"},
        "webhook": {
            "enabled": True,
            "failurePolicy": "Fail",
            "excludeNamespaces": ["istio-system"],
        },
    }
    variables, container, pod = _agent(values, tmp_path)
    assert (
        variables.items()
        >= {
            "VGPU_AGENT_DOMAIN": "gpu.example.com",
            "VGPU_AGENT_DEVICE_SPLIT_COUNT": "5",
            "VGPU_AGENT_DEVICE_MEMORY_SCALING": "1.5",
            "VGPU_AGENT_DEVICE_MEMORY_FACTOR": "4194304",
            "VGPU_AGENT_FEATURE_GATES": "Reschedule=true",
            "VGPU_AGENT_KUBELET_DIR": "/var/lib/k0s/kubelet",
            "HOST_MANAGER_DIR": "/opt/vgpu-manager",
            "VGPU_AGENT_NODE_CONFIG_PATH": "/vgpu-manager-config/nodeConfig.yaml",
        }.items()
    )
    assert pod["nodeSelector"] == {"vgpu-manager": "device-plugin"}
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert mounts >= {"/var/lib/k0s/kubelet/device-plugins", "/opt/vgpu-manager"}

    rendered = template(*_values(tmp_path, values))
    policy = rendered[("ValidatingAdmissionPolicy", "", "vgpu-agent-own-node-only")]
    assert '"gpu.example.com/real-allocated"' in json.dumps(policy).replace('\\"', '"')
    scheduler = rendered[("Deployment", "vgpu-agent", "shares")]
    (extender,) = [
        each
        for each in scheduler["spec"]["template"]["spec"]["containers"]
        if each["name"] == "extender"
    ]
    assert {
        "--domain=gpu.example.com",
        "--scheduler-name=shares",
        "--leader-elect-resource-name=shares",
    } < set(extender["args"])
    (webhook,) = rendered[("Deployment", "vgpu-agent", "vgpu-agent-webhook")]["spec"]["template"][
        "spec"
    ]["containers"]
    assert {"--domain=gpu.example.com", "--scheduler-name=shares"} < set(webhook["args"])
    mutating = rendered[("MutatingWebhookConfiguration", "", "vgpu-agent-webhook")]["webhooks"][0]
    assert mutating["failurePolicy"] == "Fail"
    assert mutating["namespaceSelector"]["matchExpressions"][0]["values"] == [
        "istio-system",
        "vgpu-agent",
    ]
    assert "nvidia.com" not in mutating["matchConditions"][0]["expression"]


def test_values_of_volcanos_chart_mean_the_same(tmp_path: Path) -> None:
    """Both ConfigMaps, in the places where the agent reads them."""
    values = {
        "components": {"hami-core": True},
        "deviceConfig": {"nvidia": {"deviceSplitCount": 7}},
        "nodeConfig": {"enabled": True, "configs": [{"name": "a", "devicesplitcount": 3}]},
        "hostPaths": {"vgpuLib": "/opt/vgpu"},
        "cdi": {"enabled": True, "deviceListStrategy": "cdi-annotations"},
    }
    variables, _, pod = _agent(values, tmp_path)
    assert (variables["HOOK_PATH"], variables["DEVICE_LIST_STRATEGY"]) == (
        "/opt/vgpu",
        "cdi-annotations",
    )
    assert {"node-root", "hami-core"} <= {each["name"] for each in pod["volumes"]}
    rendered = template(*_values(tmp_path, values))
    node_config = rendered[("ConfigMap", "vgpu-agent", "volcano-vgpu-node-config")]["data"]
    assert json.loads(node_config["config.json"])["nodeconfig"][0]["devicesplitcount"] == 3
    device_config = rendered[("ConfigMap", "kube-system", "volcano-vgpu-device-config")]["data"]
    assert yaml.safe_load(device_config["device-config.yaml"])["nvidia"]["deviceSplitCount"] == 7


@pytest.mark.parametrize(
    ("tag", "cluster", "version"),
    [
        ("", "1.36.3", "v1"),
        ("", "1.24.17", "v1beta2"),
        ("v1.25.0", "1.24.17", "v1"),
        ("v1.24.17@sha256:00", "1.36.3", "v1beta2"),
        ("ours", "1.24.17", "v1beta2"),
        ("ours", "1.36.3", "v1"),
    ],
)
def test_the_configuration_is_that_of_the_version_of_kube_scheduler(
    tag: str, cluster: str, version: str, tmp_path: Path
) -> None:
    """By the tag of the image, and otherwise by the API server, whose version it should have."""
    values = {"scheduler": {"enabled": True, "kubeScheduler": {"imageTag": tag}}}
    rendered = template(*_values(tmp_path, values), "--kube-version", cluster)
    text = rendered[("ConfigMap", "vgpu-agent", "vgpu-scheduler")]["data"]["config.yaml"]
    assert yaml.safe_load(text)["apiVersion"] == f"kubescheduler.config.k8s.io/{version}"
    pod = rendered[("Deployment", "vgpu-agent", "vgpu-scheduler")]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"].split(":", 1)[1] == (tag or f"v{cluster}")


def test_the_claims_of_pods_are_for_the_accounts_of_the_release_and_those_that_are_named(
    tmp_path: Path,
) -> None:
    """An agent that may not write them would keep its pods from starting."""
    values = {
        "components": {"pod-state": True, "scheduler": True},
        "globalDomain": "gpu.example.com",
        "scheduler": {"schedulerName": "shares"},
        "podState": {"accounts": ["gpu-system:pool-b-vgpu-agent"]},
    }
    rendered = template(*_values(tmp_path, values), name="pool-a", namespace="gpu-system")
    spec = rendered[("ValidatingAdmissionPolicy", "", "pool-a-vgpu-agent-pod-state")]["spec"]
    names = [each["name"] for each in spec["matchConditions"]]
    assert len(set(names)) == len(names)
    assert [each["expression"].split('"')[1] for each in spec["matchConditions"]] == [
        f"system:serviceaccount:{account}"
        for account in (
            "gpu-system:shares",
            "gpu-system:pool-a-vgpu-agent",
            "kube-system:vgpu-manager-scheduler",
            "kube-system:vgpu-manager-device-plugin",
            "gpu-system:pool-b-vgpu-agent",
        )
    ]
    (keys,) = [each["expression"] for each in spec["variables"] if each["name"] == "keys"]
    assert "nvidia.com/" not in keys
    assert keys.count('"gpu.example.com/') == 6


@pytest.mark.parametrize(
    ("values", "version"), [({"devicePlugin": {"hostNetwork": True}}, "1.36.3"), ({}, "1.21.14")]
)
def test_no_second_agent_is_started_where_it_could_not_run(
    values: dict[str, Any], version: str, tmp_path: Path
) -> None:
    """On the host's network two agents would need the same port, and DaemonSets before Kubernetes
    1.22 have no maxSurge.
    """
    rendered = template(*_values(tmp_path, values), "--kube-version", version)
    spec = rendered[("DaemonSet", "vgpu-agent", "vgpu-agent")]["spec"]
    assert spec["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": "10%"},
    }


@pytest.mark.parametrize(("version", "has_conditions"), [("1.26.15", False), ("1.27.0", True)])
def test_the_webhook_has_no_field_that_an_old_api_server_refuses(
    version: str, has_conditions: bool, tmp_path: Path
) -> None:
    """Without the conditions it is sent every pod."""
    rendered = template(*_values(tmp_path, _of_components(["webhook"])), "--kube-version", version)
    webhooks = [
        webhook
        for (kind, _, _), each in rendered.items()
        if kind.endswith("WebhookConfiguration")
        for webhook in each["webhooks"]
    ]
    assert len(webhooks) == 2
    assert all(("matchConditions" in webhook) == has_conditions for webhook in webhooks)


def test_another_update_strategy_replaces_that_of_the_manifests(tmp_path: Path) -> None:
    """It replaces it as a whole: with maxUnavailable of the values and maxSurge of the manifests,
    two agents could run on every node.
    """
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    for components in ([], ["mps"]):
        values = {**_of_components(components), "updateStrategy": strategy}
        rendered = template(*_values(tmp_path, values))
        spec = rendered[("DaemonSet", "vgpu-agent", "vgpu-agent")]["spec"]
        assert spec["updateStrategy"] == strategy


def _confined(policies: list[Any], namespace: str, account: str) -> bool:
    """Tell whether every policy matches that service account."""
    prefix, suffix = 'request.userInfo.username.matches("', '")'
    patterns = [
        policy["spec"]["matchConditions"][0]["expression"].removeprefix(prefix).removesuffix(suffix)
        for policy in policies
    ]
    user = f"system:serviceaccount:{namespace}:{account}"
    return len(patterns) == 3 and all(re.search(pattern, user) for pattern in patterns)


@pytest.mark.parametrize(
    ("release", "account"), [("vgpu-agent", "vgpu-agent"), ("pool-b", "pool-b-vgpu-agent")]
)
def test_names_follow_release_and_namespace(release: str, account: str, tmp_path: Path) -> None:
    """Two releases, one for each pool of nodes, have no object in common, and the policy of each
    confines the account of its own pods.
    """
    components = [
        name
        for name in COMPONENTS
        if name not in {"own-node-only", "scheduler", "mps-host", *OLD_SCHEDULERS}
    ]
    values = _values(tmp_path, _of_components(components))
    rendered = template(*values, name=release, namespace="gpu-system")
    daemon_set = rendered[("DaemonSet", "gpu-system", account)]
    assert daemon_set["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert ("ServiceAccount", "gpu-system", account) in rendered
    policies = [
        one
        for (kind, _, name), one in rendered.items()
        if kind.endswith("AdmissionPolicy") and not name.endswith("pod-state")
    ]
    assert _confined(policies, "gpu-system", account)
    subjects = [subject for one in rendered.values() for subject in one.get("subjects", [])]
    assert {subject["namespace"] for subject in subjects} == {"gpu-system"}
    other = template(*values, name="another", namespace="gpu-system")
    assert set(other) & set(rendered) == {
        ("ConfigMap", "gpu-system", "volcano-vgpu-node-config")
    } & set(other)


def test_another_namespace_of_kustomize_is_confined_as_well(tmp_path: Path) -> None:
    """`namespace:` of an overlay changes accounts and bindings. It does not reach into the policy,
    which therefore names no namespace.
    """
    folder = _kustomization(tmp_path, ["reschedule"], namespace="gpu-system")
    built = kustomized(folder)
    (account,) = [name for kind, _, name in built if kind == "ServiceAccount"]
    assert ("DaemonSet", "gpu-system", account) in built
    policies = [one for (kind, _, _), one in built.items() if kind.endswith("AdmissionPolicy")]
    assert _confined(policies, "gpu-system", account)
    for (kind, _, name), one in built.items():
        if kind.endswith("Binding") and "subjects" in one:
            assert [subject["namespace"] for subject in one["subjects"]] == ["gpu-system"], name


def test_nothing_immutable_depends_on_version_or_values(tmp_path: Path) -> None:
    """The API server refuses an upgrade that changes a selector or the role of a binding."""
    values: list[dict[str, Any]] = [
        {"components": {"scheduler": True, "webhook": True}},
        {
            "components": {"scheduler": True, "webhook": True, "mps": True, "hami-core": True},
            "image": {"tag": "9.9.9"},
            "podAnnotations": {"a": "b"},
            "devicePlugin": {"labels": {"c": "d"}},
            "scheduler": {"labels": {"e": "f"}, "replicas": 3},
        },
    ]
    before, after = (template(*_values(tmp_path, each)) for each in values)
    for identity in before.keys() & after.keys():
        old, new = before[identity], after[identity]
        assert old.get("roleRef") == new.get("roleRef"), identity
        if identity[0] in {"DaemonSet", "Deployment"}:
            assert old["spec"]["selector"] == new["spec"]["selector"], identity
            labels = new["spec"]["template"]["metadata"]["labels"].items()
            assert new["spec"]["selector"]["matchLabels"].items() <= labels, identity


def test_a_change_of_kube_schedulers_configuration_starts_its_pods_anew(tmp_path: Path) -> None:
    """kube-scheduler reads its file once. The agent follows its own, so its pods stay."""
    values: list[dict[str, Any]] = [
        {"components": {"scheduler": True}},
        {"components": {"scheduler": True}, "globalDomain": "gpu.example.com"},
        {"components": {"scheduler": True}, "settings": {"version": "v1", "cluster": {}}},
    ]
    first, domain, settings = (template(*_values(tmp_path, each)) for each in values)

    def templates(rendered: Any) -> tuple[Any, Any]:
        return (
            rendered[("Deployment", "vgpu-agent", "vgpu-scheduler")]["spec"]["template"],
            rendered[("DaemonSet", "vgpu-agent", "vgpu-agent")]["spec"]["template"],
        )

    assert templates(first)[0]["metadata"] != templates(domain)[0]["metadata"]
    assert templates(first) == templates(settings)


@pytest.mark.parametrize(("version", "policy"), [("1.20.15", "v1beta1"), ("1.21.0", "v1")])
def test_the_webhooks_budget_is_of_a_version_that_the_cluster_has(
    version: str, policy: str, tmp_path: Path
) -> None:
    """policy/v1 is there from 1.21 on; an unknown kind fails the whole installation."""
    values = {"components": {"webhook": True, "own-node-only": False}}
    rendered = template(*_values(tmp_path, values), "--kube-version", version)
    budget = rendered[("PodDisruptionBudget", "vgpu-agent", "vgpu-agent-webhook")]
    assert budget["apiVersion"] == f"policy/{policy}"


# They change the same fields: privileges, host PIDs, variables, the same folder.
_OVERLAPPING = ["mig-monitor", "mig", "mps", "mps-host", "vgpu-control"]


@pytest.mark.parametrize("pair", list(itertools.combinations(_OVERLAPPING, 2)), ids="+".join)
def test_components_that_change_the_same_fields_agree(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    """In the order in which the kustomization offers them, the last patch wins there."""
    if pair == ("mps", "mps-host"):
        assert compared(template(*_values(tmp_path, _of_components(["mps"])))) == compared(
            template(*_values(tmp_path, _of_components(list(pair))))
        )
        return
    agent = ("DaemonSet", "vgpu-agent", "vgpu-agent")
    built = kustomized(_kustomization(tmp_path, list(pair)))[agent]
    rendered = template(*_values(tmp_path, _of_components(list(pair))))[agent]
    assert compared(rendered) == compared(built)
