"""Telling the kubelet about a resource: the Register call,
and which of its failures are worth another try.

Called by `server` when the resource is already being served, because the kubelet calls back
*during* Register (kubelet §2, V1).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.errors import KubeletError, RegistrationRefusedError
from vgpu_agent.grpc.client import CallError, call
from vgpu_agent.kubelet import codec
from vgpu_agent.status import START_KUBELET

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

_METHOD = "/v1beta1.Registration/Register"

_SHORTEST_PAUSE_SECONDS = 0.01
_PAUSE_FRACTION = 0.2

# Texts in errors of Register that mean a refusal for good. The kubelet has no status codes for
# them; it has used these words for as long as the API has existed (pkg/kubelet/cm/devicemanager:
# errUnsupportedVersion, errInvalidResourceName).
_FINAL_WORDS = ("is not supported by kubelet", "the resourcename")


class NotListeningError(KubeletError):
    """The kubelet's socket exists without a listener:
    it was made this very moment, or left behind by a dead kubelet.
    """


async def register(
    kubelet_socket: Path,
    *,
    endpoint: str,
    resource: str,
    pre_start_required: bool,
    timeout_seconds: float,
    offers_preference: bool = True,
    on_connected: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Announce that ``resource`` is served on the socket ``endpoint``,
    the name of a file in the directory of the kubelet's socket.

    ``on_connected`` is awaited once a kubelet has accepted the connection; `server` makes
    sure there that no kubelet has deleted the endpoint. If it raises, the resource is not
    registered. With ``pre_start_required`` the kubelet is to call PreStartContainer before each
    start, and with ``offers_preference`` to ask which ids suit best (GetPreferredAllocation).

    Raises:
        RegistrationRefusedError: the kubelet refuses this API version or this resource name for
            good (kubelet V6).
        NotListeningError: the kubelet's socket has no listener; the kubelet does not know the
            endpoint.
        KubeletError: anything else; trying again later may help.
    """
    request = codec.encode_register(
        endpoint=endpoint,
        resource=resource,
        pre_start_required=pre_start_required,
        offers_preference=offers_preference,
    )
    try:
        await call(
            kubelet_socket,
            _METHOD,
            request,
            timeout_seconds=timeout_seconds,
            on_connected=on_connected,
        )
    except CallError as err:
        if isinstance(err.__cause__, ConnectionRefusedError):
            raise NotListeningError(f"{err}; {START_KUBELET}") from err
        if err.status == "UNIMPLEMENTED" or any(
            words in err.text.lower() for words in _FINAL_WORDS
        ):
            raise RegistrationRefusedError(
                f"the kubelet refuses to register {resource}: {err.text or err}. The resource is "
                "not offered until the kubelet restarts; a changed configuration may offer it "
                "under another name"
            ) from err
        raise KubeletError(str(err)) from err


class ListenBackoff:
    """The pauses, in seconds, between checks whether a kubelet listens on a socket that exists.

    Between making its socket and listening on it a kubelet needs microseconds, or a second on a
    node that is busy booting. A dead one leaves a socket on which nothing will ever listen. So each
    pause is a fraction (`_PAUSE_FRACTION`) of the time waited so far: a kubelet that begins to
    listen is noticed after that fraction, and a dead one costs few checks.

    State: when the waiting began, on the event loop's clock.

    Args:
        maximum: the longest pause.
    """

    def __init__(self, maximum: float) -> None:
        self._maximum = maximum
        self._since: float | None = None

    def pause(self) -> float:
        """Return the pause after one more check."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        return min(
            max(_SHORTEST_PAUSE_SECONDS, (now - self._since) * _PAUSE_FRACTION), self._maximum
        )

    def reset(self) -> None:
        """Begin again with the shortest pause: there is another socket."""
        self._since = None
