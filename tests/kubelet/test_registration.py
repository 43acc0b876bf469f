"""Register: which refusals are final, and how long the pauses between tries are."""

from __future__ import annotations

import pytest

from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.errors import KubeletError, RegistrationRefusedError
from vgpu_agent.kubelet.registration import register
from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet


async def _register(
    kubelet: SimulatedKubelet,
    resource: str = "nvidia.com/gpu",
    timeout_seconds: float = PATIENCE_SECONDS,
) -> None:
    await register(
        kubelet.plugins / "kubelet.sock",
        endpoint="none.sock",
        resource=resource,
        pre_start_required=False,
        timeout_seconds=timeout_seconds,
    )


async def test_a_refused_version_is_final(kubelet: SimulatedKubelet) -> None:
    """kubelet V6: a kubelet that knows other versions only. Its own words are in the message."""
    kubelet.faults.refuse_version = True

    with pytest.raises(
        RegistrationRefusedError,
        match='requested API version "v1beta1" is not supported by kubelet',
    ):
        await _register(kubelet)


@pytest.mark.parametrize("resource", ["gpu", "kubernetes.io/gpu", "nvidia.com/" + "x" * 64])
async def test_an_invalid_resource_name_is_final(kubelet: SimulatedKubelet, resource: str) -> None:
    """The kubelet takes extended resource names only (kubelet §2)."""
    with pytest.raises(RegistrationRefusedError, match="is invalid"):
        await _register(kubelet, resource)


async def test_a_failure_that_may_pass_is_not_final(kubelet: SimulatedKubelet) -> None:
    """A kubelet that is just starting or shutting down."""
    kubelet.faults.failing_registrations = 1

    with pytest.raises(KubeletError, match="UNAVAILABLE"):
        await _register(kubelet)


async def test_a_kubelet_that_does_not_answer_is_not_final(kubelet: SimulatedKubelet) -> None:
    """The time that the caller gives is the time it takes."""
    kubelet.faults.register_delay_seconds = FOR_EVER_SECONDS

    with pytest.raises(KubeletError, match=r"not answered within|DEADLINE_EXCEEDED"):
        await _register(kubelet, timeout_seconds=0.05)
