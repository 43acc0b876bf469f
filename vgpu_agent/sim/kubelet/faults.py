"""The simulated kubelet's record of its calls, and the faults that a test can switch on.

Used by `kubelet` and `pod_resources` in this package. Tests and the demo catch its exceptions.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """One thing that happened: a call received or made, a stream opened or ended.

    Attributes:
        what: ``Register``, ``GetDevicePluginOptions``, ``stream opened``, ``list`` (one has come
            through a stream), ``stream ended``, ``GetPreferredAllocation``, ``Allocate``,
            ``PreStartContainer``; of the pod-resources API ``List``, ``Get`` and
            ``GetAllocatableResources``; ``pod deleted``.
        resource: the resource it was about; empty for the last four.
        at: `time.monotonic` seconds.
        facts: e.g. ``endpoint``, ``ids``, ``error``, ``healthy``, ``seconds``.
    """

    what: str
    resource: str
    at: float = dataclasses.field(default_factory=time.monotonic)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Faults:
    """Switches that a test may set at any time; with the defaults the kubelet is healthy.

    Attributes:
        refuse_version: Register is refused as a kubelet does that knows only another API version.
        register_delay_seconds: Register is answered this much later.
        failing_registrations: the number of next Register calls answered with UNAVAILABLE.
        asks_no_options: the plugin is connected without GetDevicePluginOptions, as by a kubelet
            before 1.25.
        tells_clients_apart: the end of a stream concerns the client of that stream only, as in a
            kubelet from 1.37 on.
        open_no_stream: after Register no ListAndWatch is opened.
        exhausted_lists: the number of next pod-resources List calls answered with
            RESOURCE_EXHAUSTED.
        list_delay_seconds: pod-resources List is answered this much later.
        no_allocatable: pod-resources has no GetAllocatableResources, like a kubelet before 1.21.
        no_get: pod-resources has no Get, like a kubelet before 1.27.
        get_disabled: it has Get, but the feature KubeletPodResourcesGet is off, as it is by default
            before 1.34.
        exhausted_gets: the number of next pod-resources Get calls answered with
            RESOURCE_EXHAUSTED.
        limit_calls: all of pod-resources together answers 100 calls a second, 10 at once, and
            refuses the others.
    """

    refuse_version: bool = False
    register_delay_seconds: float = 0.0
    failing_registrations: int = 0
    asks_no_options: bool = False
    tells_clients_apart: bool = False
    open_no_stream: bool = False
    exhausted_lists: int = 0
    list_delay_seconds: float = 0.0
    no_allocatable: bool = False
    no_get: bool = False
    get_disabled: bool = False
    exhausted_gets: int = 0
    limit_calls: bool = True


class AdmissionError(Exception):
    """A pod was rejected, and has failed for good.

    Attributes:
        reason: ``UnexpectedAdmissionError``, as in the pod's status.
    """

    def __init__(self, message: str, reason: str = "UnexpectedAdmissionError") -> None:
        super().__init__(message)
        self.reason = reason


class ContainerStartError(Exception):
    """A container cannot start now (``CreateContainerConfigError``); the kubelet would retry."""
