"""Configuration files and command lines of everything that runs in a rig,
as plain functions of the plan.

Why each unusual setting: so that a test waits for what it tests, not for a default of ten seconds;
and so that nothing is written to the host. Sources: the components' own flag references and
KubeletConfiguration (kubelet.config.k8s.io/v1beta1).

Called by inside.py (control plane) and node.py (containerd, kubelet).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.real_node.rig import host, images
from tests.real_node.rig.layout import (
    SERVICE_ADDRESS,
    Layout,
    NodeLayout,
    Options,
    Plan,
    node_address,
)

if TYPE_CHECKING:
    from pathlib import Path

# the same in every node: each has a /run of its own
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CDI_DIR = "/run/cdi"
BRIDGE = "rig0"
RESOLV_CONF = "/run/rig-resolv.conf"
# Others would take Nodes without a kubelet for dead.
_WITHOUT_NODES = "serviceaccount-controller,root-ca-certificate-publisher-controller"
_ETCD = "http://127.0.0.1:2379"
_ETCD_PEER = "http://127.0.0.1:2380"


def etcd(plan: Plan, layout: Layout) -> list[str]:
    """One member, without fsync: what a rig stores is worth nothing after its end."""
    return [
        *_part(plan, "etcd"),
        *("--data-dir", str(layout.run / "etcd"), "--unsafe-no-fsync", "--log-level", "warn"),
        *("--listen-client-urls", _ETCD, "--advertise-client-urls", _ETCD),
        *(
            "--listen-peer-urls",
            _ETCD_PEER,
            "--initial-advertise-peer-urls",
            _ETCD_PEER,
            "--initial-cluster",
            f"default={_ETCD_PEER}",
        ),
    ]


def apiserver(plan: Plan, layout: Layout) -> list[str]:
    """With the node authoriser, RBAC and service accounts as in any cluster."""
    pki = layout.pki
    return [
        *_part(plan, "apiserver"),
        *("--etcd-servers", _ETCD, "--bind-address", "0.0.0.0", "--secure-port", "443"),
        # The service address lies on the bridge, so in-cluster clients reach the API server without
        # a kube-proxy.
        *(
            "--advertise-address",
            node_address(1),
            "--service-cluster-ip-range",
            f"{SERVICE_ADDRESS.rpartition('.')[0]}.0/24",
        ),
        *("--client-ca-file", f"{pki}/ca.crt", "--token-auth-file", f"{pki}/tokens.csv"),
        *(
            "--tls-cert-file",
            f"{pki}/apiserver.crt",
            "--tls-private-key-file",
            f"{pki}/apiserver.key",
        ),
        # Without these two the control plane's parts complain every second that they cannot tell a
        # front proxy; there is none.
        *(
            "--requestheader-client-ca-file",
            f"{pki}/ca.crt",
            "--requestheader-allowed-names",
            "front-proxy",
        ),
        *(
            "--authorization-mode",
            "Node,RBAC",
            "--enable-admission-plugins",
            "NodeRestriction",
            "--allow-privileged=true",
        ),
        # It marks each new Node as not ready, and only a controller takes that away.
        *(() if plan.options.nodes else ("--disable-admission-plugins", "TaintNodesByCondition")),
        *(
            "--kubelet-client-certificate",
            f"{pki}/apiserver-kubelet.crt",
            "--kubelet-client-key",
            f"{pki}/apiserver-kubelet.key",
        ),
        # node names do not resolve; `kubectl logs` and `exec` need this
        *("--kubelet-preferred-address-types", "InternalIP"),
        *(
            "--service-account-issuer",
            "https://kubernetes.default.svc",
            "--service-account-key-file",
            f"{pki}/sa.pub",
        ),
        *("--service-account-signing-key-file", f"{pki}/sa.key", "--shutdown-delay-duration", "0s"),
    ]


def controller_manager(plan: Plan, layout: Layout) -> list[str]:
    """All of its controllers, quick to act; without kubelets, those that a namespace needs."""
    return [
        *_part(plan, "controller-manager"),
        *_leader(layout, "controllers"),
        # the default of 20 makes the first service account take 8 s
        *("--kube-api-qps", "500", "--kube-api-burst", "1000"),
        *("--node-monitor-period", "1s"),
        *(() if plan.options.nodes else ("--controllers", _WITHOUT_NODES)),
        *(
            "--use-service-account-credentials",
            "--service-account-private-key-file",
            f"{layout.pki}/sa.key",
        ),
        *("--root-ca-file", f"{layout.pki}/ca.crt"),
    ]


def scheduler(plan: Plan, layout: Layout) -> list[str]:
    """The default scheduler."""
    return [*_part(plan, "scheduler"), *_leader(layout, "scheduler")]


def kubelet(plan: Plan, node: NodeLayout) -> list[str]:
    """With its configuration in a file; --root-dir stays at its default,
    as a node's documentation has it.
    """
    return [
        *_part(plan, "kubelet"),
        *(
            "--config",
            str(node.etc / "kubelet.json"),
            "--kubeconfig",
            str(node.rig.kubeconfig(node.name)),
        ),
        *("--hostname-override", node.name, "--node-ip", node_address(node.index), "-v", "2"),
    ]


def containerd(plan: Plan, node: NodeLayout) -> list[str]:
    """Finds its shim and runc through PATH (see `environment`)."""
    return [str(plan.containerd / "containerd"), "-c", str(node.etc / "containerd.toml")]


def ctr(plan: Plan) -> list[str]:
    """`ctr` in the namespace of Kubernetes' containers;
    only meaningful in a node's mount namespace.
    """
    return [str(plan.containerd / "ctr"), "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"]


def kubelet_configuration(options: Options, node: NodeLayout) -> dict[str, Any]:
    """A KubeletConfiguration; the caller's own fields win."""
    pressure = dict.fromkeys(
        ("nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"), "1%"
    )
    static = {"reservedSystemCPUs": "0"} if options.cpu_manager_policy == "static" else {}
    return (
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,  # since 1.35 the kubelet refuses a cgroup v1 host otherwise
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{node.cgroup}",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "address": node_address(node.index),
            "healthzPort": 0,  # two kubelets share one network namespace
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(node.rig.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "failSwapOn": False,
            "resolvConf": RESOLV_CONF,
            "staticPodPath": str(node.static_pods),
            "fileCheckFrequency": "1s",
            # the default of 10 s is how late a new resource would show in the node's status
            "nodeStatusUpdateFrequency": "1s",
            "kubeAPIQPS": 500,
            "kubeAPIBurst": 1000,
            "enableControllerAttachDetach": False,
            # a developer's full disk must not make the kubelet throw images away
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "50Mi"} | pressure,
            "shutdownGracePeriod": "0s",
            "cpuManagerPolicy": options.cpu_manager_policy,
            "topologyManagerPolicy": options.topology_manager_policy,
            "featureGates": options.feature_gates,
        }
        | static
        | options.kubelet
    )


def containerd_configuration(node: NodeLayout) -> str:
    """containerd's config.toml, version 3."""
    return f"""\
version = 3
root = "{node.containerd_root}"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.erofs", "io.containerd.differ.v1.erofs",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{images.PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ["{CDI_DIR}"]
  # root in a container or a small virtual machine often lacks CAP_SYS_RESOURCE
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{host.CNI_PLUGINS}"]
    conf_dir = "{node.etc / "cni"}"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "runc"
        SystemdCgroup = false
"""


def cni_configuration(node: NodeLayout) -> dict[str, Any]:
    """One bridge for all nodes; each node hands out its own hundred addresses of it."""
    first = node.index * 100 - 90
    pod_addresses = {
        "subnet": f"{node_address(0)}/24",
        "rangeStart": node_address(first),
        "rangeEnd": node_address(first + 99),
        "gateway": node_address(1),
    }
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[pod_addresses]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {"cniVersion": "1.0.0", "name": "rig", "plugins": [bridge]}


def _part(plan: Plan, part: str) -> list[str]:
    return [str(plan.kubernetes / "kubernetes"), part]


def _leader(layout: Layout, user: str) -> list[str]:
    kubeconfig = str(layout.kubeconfig(user))
    return [
        *(
            "--kubeconfig",
            kubeconfig,
            "--authentication-kubeconfig",
            kubeconfig,
            "--authorization-kubeconfig",
            kubeconfig,
        ),
        *("--leader-elect=false", "--bind-address", "127.0.0.1"),
    ]


def environment(plan: Plan) -> dict[str, str]:
    """Environment of everything inside: the shim is found through PATH,
    and a proxy of the host would only be in the way.
    """
    return {"PATH": host.program_path(plan.containerd), "HOME": "/root", "LANG": "C.UTF-8"}


def wrapper_scripts(plan: Plan, layout: Layout) -> dict[str, str]:
    """Short commands for people in `scripts/cluster shell`: file name → content."""
    kubectl = " ".join([*_part(plan, "kubectl"), "--kubeconfig", str(layout.kubeconfig())])
    return {
        "kubectl": f'#!/bin/sh\nexec {kubectl} "$@"\n',
        "ctr": f'#!/bin/sh\nexec {" ".join(ctr(plan))} "$@"\n',
    }


def tools_dir(layout: Layout) -> Path:
    """Return the folder of the wrapper scripts."""
    return layout.run / "tools"
