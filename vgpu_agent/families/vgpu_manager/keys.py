"""The names that vgpu-manager uses in a cluster: resources, annotations and labels of pods and
Nodes.

Almost all of them are in one domain, which the operator may replace (``--domain``, vgpu-manager
§1.2). Two kinds keep theirs: the version labels of the Node (``nvidia.com/``) and the keys below
``vgpu-manager.io/``.
"""

from __future__ import annotations

import msgspec

DEFAULT_DOMAIN = "nvidia.com"

# Keys whose domain ``--domain`` does not replace (vgpu-manager §1.2, §3, §4.1). The last one
# exempts a pod, or all pods of a namespace, from the webhook.
DRIVER_VERSION_LABEL = "nvidia.com/node-driver-version"
CUDA_VERSION_LABEL = "nvidia.com/node-cuda-version"
CUDA_MAJOR_LABEL = "nvidia.com/node-cuda-major"
CUDA_MINOR_LABEL = "nvidia.com/node-cuda-minor"
IGNORE_WEBHOOK_LABEL = "vgpu-manager.io/ignore-webhook"


class Keys(msgspec.Struct, frozen=True):
    """All keys in one domain."""

    domain: str = DEFAULT_DOMAIN

    def _key(self, name: str) -> str:
        return f"{self.domain}/{name}"

    # -- resources (vgpu-manager §2) ---------------------------------------------------------------

    @property
    def number(self) -> str:
        """Slots: each card has one id for each container that may share it. Only these are
        booked.
        """
        return self._key("vgpu-number")

    @property
    def cores(self) -> str:
        """Percent of each card's compute."""
        return self._key("vgpu-cores")

    @property
    def memory(self) -> str:
        """Units of ``deviceMemoryFactor`` MiB of each card."""
        return self._key("vgpu-memory")

    def mig(self, profile: str) -> str:
        """The resource of MIG instances of a profile, e.g. ``1g.10gb``."""
        return self._key(f"mig-{profile.replace('+', '.')}")

    # -- annotations of the Node (vgpu-manager §3) -------------------------------------------------

    @property
    def node_config(self) -> str:
        """A JSON text: how many times the node offers its cards' memory and compute (scaling), and
        how many containers may share a card (split count).
        """
        return self._key("node-config-info")

    @property
    def node_register(self) -> str:
        """The node's GPUs, as JSON."""
        return self._key("node-device-register")

    @property
    def node_topology(self) -> str:
        """The links between the node's GPUs, as JSON."""
        return self._key("node-device-topology")

    @property
    def node_heartbeat(self) -> str:
        """Deprecated: the agent only removes it."""
        return self._key("node-device-heartbeat")

    @property
    def node_gpu_domain(self) -> str:
        """The network rail of each GPU (the network that its network card is on), by UUID; written
        by the operator.
        """
        return self._key("node-gpu-domain")

    # -- what users write on pods, and operators on Nodes (vgpu-manager §4.1) ----------------------

    @property
    def compute_policy(self) -> str:
        """The limit of compute: ``fixed`` (a container never gets more than its share), ``balance``
        (it gets more while the card is idle) or ``none``; the pod's annotation overrides the
        Node's.
        """
        return self._key("vgpu-compute-policy")

    @property
    def node_policy(self) -> str:
        """The policy over nodes: ``binpack``, ``spread`` or ``none``; only for schedulers."""
        return self._key("node-scheduler-policy")

    @property
    def device_policy(self) -> str:
        """The policy over the cards of a node: ``binpack``, ``spread`` or ``none``."""
        return self._key("device-scheduler-policy")

    @property
    def memory_policy(self) -> str:
        """The kind of nodes: ``virtual`` (only those that offer more memory than their cards have)
        or ``physical`` (only the others).
        """
        return self._key("memory-scheduler-policy")

    @property
    def topology_mode(self) -> str:
        """The place of a container's cards: with ``numa`` or ``link`` they should be on one NUMA
        node, or linked to each other; with ``numa-strict`` or ``link-strict`` they must; with
        ``none`` it does not matter.
        """
        return self._key("device-topology-mode")

    @property
    def cross_pod(self) -> str:
        """A switch: with ``true`` the links to the cards of the pod's peers (the other pods of its
        gang or of its controller) count, too; only for schedulers.
        """
        return self._key("cross-pod-topology")

    @property
    def stuck_grace(self) -> str:
        """The time for which cards are kept for the pod before it is bound; only for schedulers."""
        return self._key("stuck-grace-period")

    @property
    def include_uuid(self) -> str:
        """Texts, separated by commas, of which the card's UUID must contain one."""
        return self._key("include-gpu-uuid")

    @property
    def exclude_uuid(self) -> str:
        """Texts, separated by commas, of which the card's UUID must contain none."""
        return self._key("exclude-gpu-uuid")

    @property
    def include_type(self) -> str:
        """Texts, separated by commas, of which the card's product name must contain one."""
        return self._key("include-gpu-type")

    @property
    def exclude_type(self) -> str:
        """Texts, separated by commas, of which the card's product name must contain none."""
        return self._key("exclude-gpu-type")

    # -- state of pods (vgpu-manager §4.2) ---------------------------------------------------------

    @property
    def predicate_node(self) -> str:
        """The node that the extender has chosen."""
        return self._key("predicate-node")

    @property
    def predicate_time(self) -> str:
        """The time when the extender last chose the node or bound the pod, in unix nanoseconds; or
        `pod_state.FINISHED` (the largest signed 64-bit number) once the pod has its shares or has
        failed.
        """
        return self._key("predicate-time")

    @property
    def pre_allocated(self) -> str:
        """The claims of the pod's containers, as the extender wrote them."""
        return self._key("pre-allocated")

    @property
    def real_allocated(self) -> str:
        """The claims of those containers that have their shares."""
        return self._key("real-allocated")

    @property
    def phase(self) -> str:
        """A label: how far the allocation is. ``filtering`` (the extender has chosen a node),
        ``allocating`` (the pod is bound, or some containers have their shares), ``succeed`` (all
        have) or ``failed``.
        """
        return self._key("assigned-phase")

    @property
    def metrics_node(self) -> str:
        """A label: the node on which the pod's use is measured."""
        return self._key("metrics-node")

    @property
    def user_annotations(self) -> tuple[str, ...]:
        """The annotations of pods that users write and the agent or a scheduler reads."""
        return (
            self.compute_policy,
            self.node_policy,
            self.device_policy,
            self.memory_policy,
            self.topology_mode,
            self.cross_pod,
            self.stuck_grace,
            self.include_uuid,
            self.exclude_uuid,
            self.include_type,
            self.exclude_type,
        )

    @property
    def state_annotations(self) -> tuple[str, ...]:
        """The annotations of pods that schedulers and the agent write, the most important first:
        of a pod with too much text the agent does not keep the last ones whole.
        """
        return (self.pre_allocated, self.real_allocated, self.predicate_node, self.predicate_time)

    @property
    def state_labels(self) -> tuple[str, ...]:
        """The labels of pods that schedulers and the agent write."""
        return (self.phase, self.metrics_node)
