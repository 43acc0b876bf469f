"""Settings for the reports about GPUs in Kubernetes objects: the section ``nodeStatus``.

Part of the schema in `settings`.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import OptionalSeconds


class NodeStatus(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The health of the GPUs in Kubernetes objects. Each switch here makes the agent use the API
    server, even where no family needs it.
    """

    events: Annotated[
        Literal["auto", "always"],
        Meta(
            description=(
                "Events on the Node when a GPU is lost, fails, flaps or recovers, when the driver "
                "hangs, and when an isolation library is missing; and on the pods that hold such a "
                "GPU. auto: where a family or another setting makes the agent use the API server. "
                "always: also on nodes whose families do not need it."
            )
        ),
    ] = "auto"

    condition: Annotated[
        bool,
        Meta(
            description=(
                "Set the condition `GPUHealthy` of the Node, in the form of node-problem-detector. "
                "It is written only when it changes. If false, the agent removes it."
            )
        ),
    ] = False

    taint: Annotated[
        Literal["none", "PreferNoSchedule", "NoSchedule", "NoExecute"],
        Meta(
            description=(
                "The effect of the taint `vgpu-agent.internal/no-usable-gpu`, which the Node has "
                "while none of its GPUs has been usable for a minute. NoExecute also ends pods "
                "that use no GPU. none: no taint."
            )
        ),
    ] = "none"
    pod_label: Annotated[
        bool,
        Meta(
            description=(
                "Give pods that hold a dead GPU the label `vgpu-agent.internal/gpu-health`, with "
                "the value `lost` or `unhealthy`, until the GPU recovers."
            )
        ),
    ] = False
    evict_seconds: Annotated[
        OptionalSeconds,
        Meta(
            description=(
                "How long a pod must have held a dead GPU before it is evicted, so that its "
                "controller makes another. PodDisruptionBudgets are respected. It needs the right "
                "in `manifests/components/eviction`. 0: no pod is evicted, because an eviction "
                "ends the pod, and one without a controller does not come back. Use more than "
                "gpu.recovery.quietSeconds, or pods end whose GPU would have recovered."
            )
        ),
    ] = 0.0
    feature_labels: Annotated[
        bool,
        Meta(
            description=(
                "Write the labels of GPU Feature Discovery that follow from the GPUs and from the "
                "settings, such as `nvidia.com/gpu.product`. Where GPU Feature Discovery runs, the "
                "agent leaves them to it. If false, the agent removes its own."
            )
        ),
    ] = False

    @property
    def needs_api_server(self) -> bool:
        """Tell whether a setting asks for reports that only the API server can show."""
        return (
            self.events == "always"
            or self.condition
            or self.taint != "none"
            or self.pod_label
            or self.evict_seconds > 0
            or self.feature_labels
        )
