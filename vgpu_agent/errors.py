"""The exceptions that this agent raises on purpose, so that a caller can attribute a failure.

Adapters (`gpu`, `kubelet`, `web`, `sim`) translate their library's exceptions into these at the
edge, chained; nothing above an adapter catches a library's exception. A message names the thing,
the value and the remedy, because it ends up in a pod's status or a log line.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Self

from vgpu_agent.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MAX_QUOTED = 200  # characters of a foreign value in one message


def quoted(value: str, most: int = MAX_QUOTED) -> str:
    """Quote ``value`` for a message, on one line and in ASCII;
    longer ones are cut and their length given.

    Every value that a pod, the API server or the kubelet wrote is quoted by this: an annotation may
    have 256 KiB, and a message goes into the log, the journal, an event and a pod's status.
    """
    return ascii(value) if len(value) <= most else f"{value[:most]!a}… ({len(value)} characters)"


def shortened(text: str, most: int) -> str:
    """``text`` with at most ``most`` characters of it, and its length when that is not all."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def listed(values: Collection[str], most: int = 16) -> str:
    """List the first ``most`` of ``values`` for a message, each cut like `quoted`, and how many
    there are when that is not all.
    """
    shown = ", ".join(shortened(value, MAX_QUOTED) for value in itertools.islice(values, most))
    return shown if len(values) <= most else f"{shown}, … ({len(values)} in all)"


def shown_ids(ids: Sequence[str], most: int = 16) -> list[str]:
    """Shorten ids for a log line; thousands of them add nothing to the first."""
    return list(ids) if len(ids) <= most else [*ids[:most], f"… {len(ids)} in all"]


def with_advice(text: str, advice: str) -> str:
    """``text``, and after it the sentences of ``advice``."""
    return f"{text.rstrip('.')}. {advice}" if advice else text


class AgentError(Exception):
    """Raised by this agent on purpose; the message is written for an operator."""


class ConfigError(AgentError):
    """The configuration cannot be used.

    Attributes:
        problems: one full sentence each, in the order of the file
            (``config.yaml:12: sharing.…: expected …, got …``).
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class OfferError(ConfigError):
    """Resources that cannot be offered as configured.

    Attributes:
        reasons: why not, by resource. Each problem is a resource's name and its reason.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons
        super().__init__([f"{name}: {reason}" for name, reason in reasons.items()])


class NvmlError(AgentError):
    """An NVML call failed.

    Attributes:
        code: NVML's return code (nvmlReturn_t), e.g. 15 for "GPU is lost".
        call: the NVML function's name.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call, self.code = call, code
        super().__init__(f"{call}: {text} (NVML code {code})")


class DriverMissingError(AgentError):
    """There is no usable NVIDIA driver; the message names what was looked for and where."""


class NvmlHungError(AgentError):
    """An NVML call did not return within its time; the owner thread is still inside it."""


class LedgerError(AgentError):
    """The ledger refuses a change that would break one of its invariants.

    Attributes:
        text: the message without the advice. It stays the same while the reason does.
        device: the UUID of the device that the refusal is about; empty when it is about no single
            one.
        advice: the remedies and the state of the node at this moment, in sentences; part of the
            message.
    """

    def __init__(self, text: str, *, device: str = "", advice: str = "") -> None:
        self.text, self.device, self.advice = text, device, advice
        super().__init__(with_advice(text, advice))

    def advised(self, advice: str, *, more: str = "") -> Self:
        """The same refusal with ``advice``; ``more`` is added to its text."""
        return type(self)(self.text + more, device=self.device, advice=advice)


class UnknownDeviceError(LedgerError):
    """A device id that this node does not offer."""


class UnhealthyDeviceError(LedgerError):
    """A device id whose device must not be given to any container now."""


class CapacityError(LedgerError):
    """More memory, cores or holders than a device has."""


class OvercommitError(CapacityError):
    """More compute or more holders than a device has, while memory suffices:
    only a scheduler may decide so.
    """


class RequestRefusedError(AgentError):
    """A container's request is final nonsense (kubelet §8: it fails the pod);
    the message is shown in the pod's status.
    """


class NotItsOwnError(AgentError):
    """A process asks for something that belongs to another container."""


class UnusableNameError(RequestRefusedError):
    """A UID or a container's name that is not what Kubernetes allows,
    and so must not become part of a path.
    """


class KubeletError(AgentError):
    """The kubelet did not do what its contract says, or could not be reached."""


class RegistrationRefusedError(KubeletError):
    """The kubelet refused a registration for good (version or resource name);
    trying again cannot help.
    """


class CheckpointError(KubeletError):
    """The kubelet's checkpoint exists but cannot be understood."""


class ListenError(AgentError):
    """An address or a socket path cannot be listened on."""


class SimulationError(AgentError):
    """The simulated GPUs cannot be built, created or changed as asked."""


class CarrierError(AgentError):
    """A file that a container needs before it starts could not be put into place."""


class MpsError(AgentError):
    """An MPS control daemon, or a tool that it needs, is missing,
    does not answer or does not obey.
    """


class MpsDaemonGoneError(MpsError):
    """There is no MPS control daemon where there should be one."""


class MigError(AgentError):
    """A GPU could not be divided into MIG instances as a container needs it;
    the container may try again.
    """


class ClusterError(AgentError):
    """The API server did not answer, or not with what was requested;
    the text never holds credentials.

    Attributes:
        status: the HTTP status; 0 when there was no answer.
        retry_after_seconds: how long it asked us to wait; 0 without a request.
    """

    def __init__(self, text: str, *, status: int = 0, retry_after_seconds: float = 0.0) -> None:
        self.status, self.retry_after_seconds = status, retry_after_seconds
        super().__init__(redacted(text))


class CdiError(AgentError):
    """There is no usable CDI spec of a node's devices:
    it cannot be made, is refused, or cannot be written.
    """
