"""Paths and options of a rig: the contract between the processes outside and inside its namespaces.

A rig is a folder and a cgroup, both named after it; nothing else of it outlives its processes. The
folder is short on purpose: a unix socket's path has at most 107 bytes, and device plugins put
theirs five levels deeper.

Used by every other module of this package.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real_node.rig.errors import RigError

PREFIX = "vg-"  # of run folders and cgroups; leftovers.py collects by it
RUNS = Path("/tmp")
"""Parent of all run folders. Not a setting:
`leftovers.py` of a later session must find what an earlier one left.
"""

# Addresses inside the rig's own network namespace, so they can never collide with the host's or
# another rig's.
SERVICE_ADDRESS = "10.96.0.1"
API_SERVER = f"https://{SERVICE_ADDRESS}:443"


def node_address(index: int) -> str:
    """The address of Kubernetes node ``index`` (from 1) on the rig's bridge."""
    return f"10.99.0.{index}"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a rig.

    Attributes:
        nodes: Kubernetes nodes, 1 or 2: each has its own kubelet, containerd and /var/lib/kubelet.
            0 is a control plane for thousands of Nodes that are only objects: nothing looks after
            them, so they stay as they were made.
        numa_nodes: NUMA nodes that every kubelet sees; 2 needs two CPUs.
        topology_manager_policy: of the kubelets, e.g. ``single-numa-node``.
        cpu_manager_policy: of the kubelets; ``static`` reserves CPU 0 for the system.
        feature_gates: of the kubelets.
        kubelet: fields of KubeletConfiguration that override whatever the rig writes.
    """

    nodes: int = 1
    numa_nodes: int = 1
    topology_manager_policy: str = "none"
    cpu_manager_policy: str = "none"
    feature_gates: dict[str, bool] = field(default_factory=dict)
    kubelet: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 0), ("numa_nodes", 1)):
            if getattr(self, name) not in range(least, 3):
                raise RigError(f"{name}: expected {least} to 2, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Layout:
    """The folder of one rig. Paths are the same inside and outside,
    because the rig sees the host's /tmp.
    """

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,19}", self.name):
            raise RigError(
                f"rig name {self.name!r}: expected at most 20 of a-z, 0-9 and -, not starting with "
                "-"
            )

    @classmethod
    def fresh(cls) -> Layout:
        """A layout under a name that no other rig has."""
        return cls(secrets.token_hex(3))

    @property
    def run(self) -> Path:
        return RUNS / f"{PREFIX}{self.name}"

    @property
    def cgroup(self) -> str:
        """Name of the rig's cgroup below the root of every hierarchy;
        each node's kubelet has a child of it.
        """
        return f"{PREFIX}{self.name}"

    # What the keeper says about itself, what the rig is to be, and how its start ended.
    @property
    def keeper(self) -> Path:
        return self.run / "keeper.json"

    @property
    def plan(self) -> Path:
        return self.run / "plan.json"

    @property
    def ready(self) -> Path:
        return self.run / "ready.json"

    @property
    def failed(self) -> Path:
        return self.run / "failed"

    @property
    def logs(self) -> Path:
        return self.run / "logs"

    def log(self, component: str) -> Path:
        return self.logs / f"{component}.log"

    @property
    def pki(self) -> Path:
        return self.run / "pki"

    def kubeconfig(self, user: str = "admin") -> Path:
        return self.pki / f"{user}.kubeconfig"

    @property
    def control(self) -> Path:
        """Socket of the supervisor of the control plane."""
        return self.run / "control.sock"

    def node(self, index: int) -> NodeLayout:
        return NodeLayout(rig=self, index=index)


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The folder of one Kubernetes node of a rig; ``index`` counts from 1."""

    rig: Layout
    index: int

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def folder(self) -> Path:
        return self.rig.run / f"n{self.index}"

    @property
    def var_lib(self) -> Path:
        """Lies over /var/lib inside: the device manager's folder is fixed at /var/lib/kubelet,
        whatever --root-dir says.
        """
        return self.folder / "lib"

    @property
    def kubelet_dir(self) -> Path:
        return self.var_lib / "kubelet"

    @property
    def var_log(self) -> Path:
        """Lies over /var/log inside: container logs are below /var/log/pods."""
        return self.folder / "log"

    @property
    def cdi_dir(self) -> Path:
        """Lies over /run/cdi inside."""
        return self.folder / "cdi"

    @property
    def static_pods(self) -> Path:
        return self.folder / "static"

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def containerd_root(self) -> Path:
        return self.folder / "containerd"

    @property
    def control(self) -> Path:
        """Socket of the supervisor of this node's containerd and kubelet."""
        return self.folder / "control.sock"

    @property
    def process_id(self) -> Path:
        """Holds the id, in the rig's pid namespace,
        of the process that owns this node's mount namespace.
        """
        return self.folder / "pid"

    @property
    def cgroup(self) -> str:
        return f"{self.rig.cgroup}/n{self.index}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the processes inside need to know,
    written once by the owner and read by each of them.
    """

    options: Options
    kubernetes: Path
    """Folder of the binary that is etcd, control plane, kubelet and kubectl."""
    containerd: Path
    """Folder of containerd, its runc shim and ctr."""
    images: Path
    """Folder of OCI archives that every node's containerd imports."""

    def save(self, layout: Layout) -> None:
        layout.plan.write_text(json.dumps(dataclasses.asdict(self), default=str, indent=1))

    @classmethod
    def load(cls, layout: Layout) -> Plan:
        """Read the plan of an existing rig.

        Raises:
            RigError: there is no rig of that name.
        """
        try:
            raw = json.loads(layout.plan.read_text())
        except FileNotFoundError as err:
            raise RigError(
                f"no rig named {layout.name!r}: {layout.plan} does not exist; `scripts/cluster "
                "status` lists the rigs"
            ) from err
        return cls(
            options=Options(**raw["options"]),
            kubernetes=Path(raw["kubernetes"]),
            containerd=Path(raw["containerd"]),
            images=Path(raw["images"]),
        )
