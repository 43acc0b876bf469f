"""The exceptions of this package, and functions that shorten values for messages.

A package that wraps a library (such as `gpu`, `kubelet`, `cluster`, `web`) converts the library's
exceptions to these and chains them, so its callers catch only these. A message names the thing, the
value and the remedy, because it is shown in a pod's status or in a log line.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Self

from vgpu_agent.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MAX_QUOTED = 200  # characters, in one message, of a value that comes from outside the agent


def quoted(value: str, max_characters: int = MAX_QUOTED) -> str:
    """Quote ``value`` for a message, on one line and in ASCII. A value that is cut is followed by
    its length.

    Use this for every value from a pod, the API server or the kubelet: an annotation may have 256
    KiB, and a message goes into the log, the journal (``/debug/events``), a Kubernetes event and a
    pod's status.
    """
    if len(value) <= max_characters:
        return ascii(value)
    return f"{value[:max_characters]!a}… ({len(value)} characters)"


def shortened(text: str, max_characters: int) -> str:
    """Cut ``text`` after ``max_characters``. The length of a text that was cut is added."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}… ({len(text)} characters)"


def listed(values: Collection[str], max_values: int = 16) -> str:
    """Join the first ``max_values`` of ``values`` for a message, each cut after `MAX_QUOTED`
    characters. If there are more values, their number is added.
    """
    shown = ", ".join(
        shortened(value, MAX_QUOTED) for value in itertools.islice(values, max_values)
    )
    return shown if len(values) <= max_values else f"{shown}, … ({len(values)} in all)"


def shortened_ids(ids: Sequence[str], max_ids: int = 16) -> list[str]:
    """Keep the first ``max_ids`` of ``ids`` for a log line. If there are more, the last element of
    the result gives their number.
    """
    return list(ids) if len(ids) <= max_ids else [*ids[:max_ids], f"… {len(ids)} in all"]


def with_advice(text: str, advice: str) -> str:
    """Append the sentences of ``advice`` to ``text``; return ``text`` alone if there are none."""
    return f"{text.rstrip('.')}. {advice}" if advice else text


class AgentError(Exception):
    """The base class of all exceptions of this package. The message is for an operator."""


class ConfigError(AgentError):
    """The configuration cannot be used.

    Attributes:
        problems: a full sentence for each problem, in the order of the file
            (``config.yaml:12: sharing.…: expected …, got …``).
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class CheckFailedError(ConfigError):
    """The configuration that a command was asked to check is wrong. The command line is right, so
    the exit status is not that of a wrong call.
    """


class UnreachableError(AgentError):
    """The running agent cannot be reached or does not answer, or another program answers at its
    address.
    """


class OfferError(ConfigError):
    """Resources that cannot be offered as configured.

    Attributes:
        reasons: resource → the reason. Each of `problems` is a resource's name and its reason.
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
    """There is no usable NVIDIA driver. The message names the searched paths."""


class NvmlHungError(AgentError):
    """An NVML call did not return in time, and the thread that makes all NVML calls is still inside
    it; or that thread does not run.
    """


class LedgerError(AgentError):
    """The ledger refuses a change that would break one of its invariants.

    Attributes:
        text: the message without the advice. It stays the same as long as the reason is the same.
        device: the UUID of the device that was refused; empty if the refusal concerns several
            devices or none.
        advice: sentences about the remedies and the current state of the node. They are part of the
            message.
    """

    def __init__(self, text: str, *, device: str = "", advice: str = "") -> None:
        self.text, self.device, self.advice = text, device, advice
        super().__init__(with_advice(text, advice))

    def advised(self, advice: str, *, suffix: str = "") -> Self:
        """Return a copy with ``advice``, and with ``suffix`` at the end of `text`."""
        return type(self)(self.text + suffix, device=self.device, advice=advice)


class UnknownDeviceError(LedgerError):
    """A device id that this node does not offer."""


class UnhealthyDeviceError(LedgerError):
    """No container may get anything of a device now: it is unhealthy, missing or cordoned, its
    device nodes or its holders are not known, or it serves or is kept for others.
    """


class CapacityError(LedgerError):
    """A device has not enough memory or cores left, or too many holders already."""


class OvercommitError(CapacityError):
    """A device has enough memory left, but not enough cores, or too many holders already. The
    ledger accepts this only if a scheduler has decided it.
    """


class RequestRefusedError(AgentError):
    """A request can never be met. Where it is an Allocate, the kubelet fails the pod (kubelet §8),
    and shows the message in the pod's status.
    """


class PermissionDeniedError(AgentError):
    """A process asks for something that belongs to another container."""


class InvalidNameError(RequestRefusedError):
    """A pod's UID or a container's name has a form that Kubernetes forbids, and would be unsafe as
    part of a path.
    """


class KubeletError(AgentError):
    """The kubelet could not be reached, or violated the device plugin API."""


class RegistrationRefusedError(KubeletError):
    """The kubelet refused a registration because of its API version or resource name. Another try
    would be refused as well.
    """


class CheckpointError(KubeletError):
    """The kubelet's checkpoint exists but cannot be read or decoded."""


class ListenError(AgentError):
    """An address or a socket path cannot be listened on."""


class SimulationError(AgentError):
    """The simulated GPUs cannot be built, created or changed as requested."""


class HostFileError(AgentError):
    """A file that a container needs before its start is missing or wrong, or could not be read,
    written or removed.
    """


class MpsError(AgentError):
    """An MPS control daemon, or a tool for it, is missing, does not answer, or fails to carry out a
    command.
    """


class MpsDaemonGoneError(MpsError):
    """The expected MPS control daemon is not running."""


class MigError(AgentError):
    """A GPU could not be divided into the MIG instances that a container needs. A later start of
    the container may succeed.
    """


class ClusterError(AgentError):
    """The API server did not answer, or answered with an error or something unexpected. Credentials
    are removed from the message.

    Attributes:
        status: the HTTP status; 0 when there was no answer.
        retry_after_seconds: the pause that the API server asked for (``Retry-After``); 0 if none.
    """

    def __init__(self, text: str, *, status: int = 0, retry_after_seconds: float = 0.0) -> None:
        self.status, self.retry_after_seconds = status, retry_after_seconds
        super().__init__(redacted(text))


class CdiError(AgentError):
    """A CDI spec of the node's devices cannot be generated, decoded, written or removed, or is not
    valid.
    """


class CertificateError(AgentError):
    """A certificate or its key cannot be used. Neither is part of the message."""
