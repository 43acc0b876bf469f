"""Telling kubelet about a resource: the Register call, and which of its failures are worth another try.

Called by `server` when the resource is already being served, because kubelet calls back *during* Register (kubelet contract §2, V1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import RegistrationRefusedError
from vgpu_agent.kubelet import codec, grpc

if TYPE_CHECKING:
    from pathlib import Path

_METHOD = "/v1beta1.Registration/Register"

# kubelet has no status codes for its refusals; these words are its own since the API exists
# (pkg/kubelet/cm/devicemanager: errUnsupportedVersion, errInvalidResourceName).
_FINAL_WORDS = ("is not supported by kubelet", "the resourcename")


async def register(
    kubelet_socket: Path, *, endpoint: str, resource: str, pre_start_required: bool, timeout_seconds: float, prefers: bool = True
) -> None:
    """Announce that ``resource`` is served on the socket ``endpoint``, a base name beside kubelet's socket.

    Raises:
        RegistrationRefusedError: kubelet does not want this API version or this resource name, and will not change its mind (V6).
        CallError: anything else; trying again later may help.
    """
    request = codec.encode_register(endpoint=endpoint, resource=resource, pre_start_required=pre_start_required, prefers=prefers)
    try:
        await grpc.call(kubelet_socket, _METHOD, request, timeout_seconds=timeout_seconds)
    except grpc.CallError as err:
        if err.status == "UNIMPLEMENTED" or any(words in err.text.lower() for words in _FINAL_WORDS):
            raise RegistrationRefusedError(
                f"kubelet refuses to register {resource}: {err.text or err}; it will not change its mind, so this resource stays away until"
                " another kubelet starts, or the agent with another configuration"
            ) from err
        raise


class Backoff:
    """Pauses in seconds that double from ``minimum`` to ``maximum`` with each failure in a row."""

    def __init__(self, minimum: float, maximum: float) -> None:
        self._minimum, self._maximum = minimum, maximum
        self._next = minimum

    def pause(self) -> float:
        """The pause after one more failure."""
        pause, self._next = self._next, min(self._next * 2, self._maximum)
        return pause

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._next = self._minimum
