"""Settings for the match of Allocate and pod, and for the API server: the sections ``families``,
``binding`` and ``cluster``.

Part of the schema in `settings`. The three are in one file because they have one subject: the
agent's knowledge of pods.
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.types import AbsolutePath, OptionalSeconds


class Families(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The resource names that this node offers. While a GPU serves one family, the others see it
    Unhealthy.
    """

    # `schema.root` adds a switch for each family.


class Binding(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The match of a container with its pod before it starts."""

    mode: Annotated[
        Literal["auto", "late", "early"],
        Meta(
            description=(
                "late: Allocate answers with a CDI name; PreStartContainer identifies the pod and "
                "writes that CDI spec. early: Allocate answers in full for the likeliest pod, and "
                "PreStartContainer refuses a wrong guess. auto: late where the Node's status names "
                "a kubelet and a runtime that resolve CDI names (containerd ≥ 2.0, CRI-O ≥ 1.23), "
                "else early. Choose late yourself for containerd 1.7 with enable_cdi = true."
            )
        ),
    ] = "auto"
    cdi_directory: Annotated[
        AbsolutePath,
        Meta(
            description=(
                "Where the container runtime looks for CDI specs; one file for each grant is "
                "written into it."
            )
        ),
    ] = "/var/run/cdi"
    refused_evict_seconds: Annotated[
        OptionalSeconds,
        Meta(
            description=(
                "How long a start must have been refused before the pod is evicted, so that it is "
                "scheduled anew. Until then the pod waits, and its scheduler counts it as placed. "
                "A pod that trying again cannot help (a wrong early guess, or another pod has its "
                "ids as well) is evicted at once. 0: no pod is evicted, because an eviction ends "
                "the pod, and one without a controller does not come back. 120 suits clusters "
                "whose GPU pods have controllers."
            )
        ),
    ] = 0.0
    reschedule_failed: Annotated[
        bool,
        Meta(
            description=(
                "Replace pods that the kubelet has failed at admission "
                "(`UnexpectedAdmissionError`), or whose start can never succeed here: a pod with a "
                "controller is evicted, a bare one is deleted and recreated, a critical one is "
                "left alone. A pod that fails again waits for longer each time, and is left alone "
                "after five times. It needs the rights in `manifests/components/reschedule`. A "
                "family may have a switch of its own for it, such as a feature gate."
            )
        ),
    ] = False
    pod_variables: Annotated[
        Literal["refuse", "allow"],
        Meta(
            description=(
                "Early binding: a container whose pod sets NVIDIA_VISIBLE_DEVICES or a variable of "
                "the library that enforces limits, which the kubelet prefers to the agent's. "
                "refuse: it does not start, because it could take another GPU or leave its limit. "
                "allow: it starts, as with the replaced plugins. With late binding the agent's "
                "value wins, and nobody is refused."
            )
        ),
    ] = "refuse"
    scheduler_overcommit: Annotated[
        Literal["serve", "refuse"],
        Meta(
            description=(
                "What becomes of a container whose scheduler has given out more compute of a GPU "
                "than it has, or its shares to more containers than it takes: Volcano's forgets a "
                "second container of a pod on the same GPU. serve: it starts, an event tells its "
                "pod, and `vgpu_agent_scheduler_overcommitted` shows the GPU. refuse: it waits "
                "until there is room. Memory is never overcommitted, and the agent's own placement "
                "never overcommits."
            )
        ),
    ] = "serve"
    policy: Annotated[
        Literal["binpack", "spread"],
        Meta(
            description=(
                "Where the agent places a pod that no GPU scheduler has placed: the fullest GPU "
                "that fits, or the emptiest."
            )
        ),
    ] = "binpack"


class Cluster(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Communication with the API server. The agent watches its own Node and pods, and writes only
    what has changed.
    """

    enabled: Annotated[
        Literal["auto", "never"],
        Meta(
            description=(
                "auto: when there are credentials (`kubeconfig`, or a service account). never: not "
                "at all; then only families work whose device ids name GPUs."
            )
        ),
    ] = "auto"
    withdraw_at_stop: Annotated[
        bool,
        Meta(
            description=(
                "Take back, at an orderly stop, what tells schedulers that this node shares GPUs, "
                "and the agent's labels. For the removal of the agent, not for an update."
            )
        ),
    ] = False
