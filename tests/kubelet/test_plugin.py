"""The device plugin service by itself, without sockets:
kubelet's rules of the game on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.kubelet.backend import U0, U1, FakeBackend, shared_resource
from tests.patience import quickest
from vgpu_agent.concurrency import Revision
from vgpu_agent.errors import CapacityError, KubeletError, RequestRefusedError, UnknownDeviceError
from vgpu_agent.kubelet.plugin import PluginService
from vgpu_agent.model import Resource
from vgpu_agent.sim.protocol import deviceplugin_pb2 as google
from vgpu_agent.status import PluginStatus

COALESCE_SECONDS = 1.0
DeviceList = dict[str, str]


class Asked:
    """A service and a caller that plays kubelet."""

    def __init__(self, resource: Resource) -> None:
        self.backend = FakeBackend(resource)
        self.status = PluginStatus(resource.name, resource.family)
        self.lists = Revision()
        self.service = PluginService(
            resource,
            self.backend,
            self.status,
            coalesce_seconds=COALESCE_SECONDS,
            lists_revision=self.lists,
        )

    async def call(self, method: str, request: Any, response: Callable[[bytes], Any]) -> Any:
        encoded = request if isinstance(request, bytes) else request.SerializeToString()
        return response(
            await self.service.unary_methods[f"/v1beta1.DevicePlugin/{method}"](encoded)
        )

    async def allocate(self, *ids: str) -> Any:
        request = google.AllocateRequest(
            container_requests=[google.ContainerAllocateRequest(device_ids=ids)]
        )
        return await self.call("Allocate", request, google.AllocateResponse.FromString)

    async def prefer(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        request = google.PreferredAllocationRequest()
        request.container_requests.add(
            available_device_ids=available,
            must_include_device_ids=must_include,
            allocation_size=size,
        )
        response = await self.call(
            "GetPreferredAllocation", request, google.PreferredAllocationResponse.FromString
        )
        (container,) = response.container_responses
        return list(container.device_ids)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[list[DeviceList]]:
        """Messages of one ListAndWatch call so far: health by id."""
        received: list[DeviceList] = []

        async def send(message: bytes) -> None:
            received.append(
                {
                    device.id: device.health
                    for device in google.ListAndWatchResponse.FromString(message).devices
                }
            )

        task = asyncio.ensure_future(
            self.service.stream_methods["/v1beta1.DevicePlugin/ListAndWatch"](b"", send)
        )
        await asyncio.sleep(0)
        yield received
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def asked() -> Asked:
    """The service of a shared resource."""
    return Asked(shared_resource())


def _health(received: DeviceList, uuid: str) -> set[str]:
    return {health for device, health in received.items() if device.startswith(uuid)}


@pytest.mark.looptime
async def test_a_stream_begins_with_the_complete_list(asked: Asked) -> None:
    """Every id of the resource, at once."""
    async with asked.stream() as received:
        await asyncio.sleep(0.01)

        assert received == [
            dict.fromkeys([device.id for device in shared_resource().ids], "Healthy")
        ]
        assert (asked.status.ids_sent, asked.status.healthy_sent, asked.status.messages_sent) == (
            8,
            8,
            1,
        )


@pytest.mark.looptime
async def test_a_failing_gpu_is_exactly_one_message_with_all_its_ids(asked: Asked) -> None:
    """kubelet V7, kubelet side: one message, four ids Unhealthy, the other GPU's untouched."""
    async with asked.stream() as received:
        asked.backend.lose(U1)
        await asyncio.sleep(60)

        assert len(received) == 2
        assert (_health(received[1], U0), _health(received[1], U1)) == ({"Healthy"}, {"Unhealthy"})


@pytest.mark.looptime
async def test_whoever_follows_the_lists_hears_of_each_and_of_the_end(asked: Asked) -> None:
    """Counts of healthy ids are written for schedulers when kubelet has them,
    and no longer when the stream has ended.
    """
    async with asked.stream():
        await asyncio.sleep(0.01)
        assert asked.lists.value == 1
        asked.backend.lose(U1)
        await asyncio.sleep(60)
        assert (asked.lists.value, asked.status.healthy_sent) == (2, 4)
    assert asked.lists.value == 3


@pytest.mark.looptime
async def test_a_lost_gpu_stays_in_the_list(asked: Asked) -> None:
    """kubelet V16, kubelet side: no id disappears.
    An absent id would be shown as Healthy in the pod's status.
    """
    async with asked.stream() as received:
        asked.backend.lose(U1)
        await asyncio.sleep(60)

        assert received[1].keys() == received[0].keys()


@pytest.mark.looptime
async def test_a_burst_of_changes_is_one_message(asked: Asked) -> None:
    """The kubelet rewrites its checkpoint at each list,
    so changes within the quiet time are sent together.
    """
    async with asked.stream() as received:
        await asyncio.sleep(COALESCE_SECONDS * 2)
        asked.backend.lose(U0)
        await asyncio.sleep(COALESCE_SECONDS / 2)
        asked.backend.lose(U1)
        await asyncio.sleep(60)

        assert len(received) == 2
        assert set(received[1].values()) == {"Unhealthy"}


@pytest.mark.looptime
async def test_a_list_that_says_the_same_is_not_sent_again(asked: Asked) -> None:
    """No heartbeats: a revision without a visible change,
    and a change that was taken back in the quiet time, send nothing.
    """
    async with asked.stream() as received:
        asked.backend.touch()
        await asyncio.sleep(60)
        asked.backend.lose(U0)
        asked.backend.heal(U0)
        await asyncio.sleep(60)

        assert len(received) == 1


@pytest.mark.looptime
async def test_two_streams_do_not_share_what_was_sent(asked: Asked) -> None:
    """kubelet §4: a second stream of the same endpoint gets its own complete list,
    and both get each change.
    """
    async with asked.stream() as first:
        await asyncio.sleep(60)
        async with asked.stream() as second:
            await asyncio.sleep(60)
            asked.backend.lose(U0)
            await asyncio.sleep(60)

            assert asked.service.open_streams == 2
            assert (len(first), len(second)) == (2, 2)
            assert first == second
        assert asked.status.stream_open
    assert not asked.status.stream_open


@pytest.mark.looptime
async def test_an_empty_list_is_sent(asked: Asked) -> None:
    """Legal, and the only way to say that nothing is left (kubelet §4)."""
    asked.backend.resources["nvidia.com/gpu.shared"] = Resource(
        "nvidia.com/gpu.shared", "nvidia", ()
    )

    async with asked.stream() as received:
        await asyncio.sleep(60)

        assert received == [{}]


@pytest.mark.looptime
async def test_streams_return_when_they_are_told_to_end(asked: Asked) -> None:
    """They return even in the middle of the quiet time."""
    async with asked.stream():
        asked.backend.lose(U0)
        await asyncio.sleep(COALESCE_SECONDS / 10)

        asked.service.end_streams()
        await asyncio.sleep(COALESCE_SECONDS / 10)

        assert asked.service.open_streams == 0


@pytest.mark.parametrize("pre_start_required", [True, False])
async def test_options_say_what_the_resource_needs(pre_start_required: bool) -> None:
    """The kubelet believes these options and not those of Register (kubelet §2)."""
    asked = Asked(shared_resource(pre_start_required=pre_start_required))

    options = await asked.call("GetDevicePluginOptions", b"", google.DevicePluginOptions.FromString)

    assert (options.pre_start_required, options.get_preferred_allocation_available) == (
        pre_start_required,
        True,
    )


async def test_allocate_answers_with_the_edits(asked: Asked) -> None:
    """One element for the one container."""
    response = await asked.allocate(f"{U0}::0", f"{U1}::3")

    (container,) = response.container_responses
    assert dict(container.envs) == {"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"}
    assert asked.backend.allocated == [("nvidia.com/gpu.shared", (f"{U0}::0", f"{U1}::3"))]
    assert (asked.status.allocations, asked.status.allocations_refused) == (1, 0)


async def test_the_same_ids_get_the_same_answer(asked: Asked) -> None:
    """kubelet V15, kubelet side: a pod that is admitted again is not a new pod."""
    assert await asked.allocate(f"{U0}::0") == await asked.allocate(f"{U0}::0")


async def test_a_refused_allocate_is_counted_and_passed_on(asked: Asked) -> None:
    """kubelet V8, kubelet side: the backend's error, its text unchanged."""
    asked.backend.failure = UnknownDeviceError("unknown id x")

    with pytest.raises(UnknownDeviceError, match="unknown id x"):
        await asked.allocate("x")

    assert (asked.status.allocations_refused, asked.status.last_error) == (
        1,
        "Allocate: unknown id x",
    )


async def test_a_senseless_allocate_never_reaches_the_backend(asked: Asked) -> None:
    """No container, or a container without ids, is refused before anything is booked."""
    with pytest.raises(RequestRefusedError):
        await asked.allocate()
    with pytest.raises(RequestRefusedError):
        await asked.call("Allocate", b"", google.AllocateResponse.FromString)

    assert asked.backend.allocated == []
    assert asked.status.allocations_refused == 2


async def test_pre_start_passes_the_ids_on(asked: Asked) -> None:
    """The only hook at a container's start."""
    request = google.PreStartContainerRequest(device_ids=[f"{U0}::0"])

    await asked.call("PreStartContainer", request, google.PreStartContainerResponse.FromString)

    assert asked.backend.started == [("nvidia.com/gpu.shared", (f"{U0}::0",))]


async def test_a_refused_pre_start_is_counted_and_passed_on(asked: Asked) -> None:
    """The text ends in the pod's status, and kubelet asks again."""
    asked.backend.failure = KubeletError("no checkpoint yet")
    request = google.PreStartContainerRequest(device_ids=["a"])

    with pytest.raises(KubeletError, match="no checkpoint yet"):
        await asked.call("PreStartContainer", request, google.PreStartContainerResponse.FromString)

    assert (asked.status.pre_starts, asked.status.pre_starts_refused) == (1, 1)
    assert asked.status.last_error == "PreStartContainer: no checkpoint yet"


async def test_the_backends_preference_is_passed_on(asked: Asked) -> None:
    """The ids that it chose, in its order."""
    assert await asked.prefer(["a", "b", "c"], ["a"], 2) == ["a", "c"]


@pytest.mark.parametrize("failure", [CapacityError("no"), ValueError("a bug")])
async def test_a_preference_never_fails(asked: Asked, failure: Exception) -> None:
    """An error would fail the pod (kubelet §6);
    kubelet's own rule is answered instead, and the log knows.
    """
    asked.backend.failure = failure

    with capture_logs() as lines:
        assert await asked.prefer(["a", "b", "c"], ["c"], 2) == ["c", "a"]

    assert [line["event"] for line in lines] == ["preferred.failed"]


@pytest.mark.parametrize("choice", [["a"], ["a", "a"], ["a", "b"], ["c", "x"], ["c", "a", "b"]])
async def test_an_unsuitable_preference_is_replaced(asked: Asked, choice: list[str]) -> None:
    """Too few, too many, without what must be included, or with what is not available."""
    asked.backend.choice = choice

    assert await asked.prefer(["a", "b", "c"], ["c"], 2) == ["c", "a"]


@pytest.mark.parametrize(("size", "expected"), [(5, ["c", "a", "b"]), (0, []), (-1, [])])
async def test_a_preference_for_an_odd_number_is_answered(
    asked: Asked, size: int, expected: list[str]
) -> None:
    """More than there are, none, or fewer than none."""
    asked.backend.failure = CapacityError("no")

    assert await asked.prefer(["a", "b", "c"], ["c"], size) == expected


async def test_a_preference_waits_until_all_grants_are_known(asked: Asked) -> None:
    """Another agent may just have given the GPU to another family, and Allocate would refuse it."""
    asked.backend.ready.clear()
    choice = asyncio.ensure_future(asked.prefer(["a", "b", "c"], ["a"], 2))
    await asyncio.sleep(0.05)
    assert not choice.done()
    asked.backend.choice = ["a", "c"]
    asked.backend.ready.set()
    assert await choice == ["a", "c"]


async def test_a_malformed_preference_request_is_answered_with_nothing(asked: Asked) -> None:
    """Even then no error."""
    response = await asked.call(
        "GetPreferredAllocation", b"\x0a\xff", google.PreferredAllocationResponse.FromString
    )

    assert list(response.container_responses) == []


async def test_a_preference_among_100_000_ids_takes_less_than_a_second(asked: Asked) -> None:
    """kubelet V9: decoding, choosing and checking, without the socket."""
    available = [f"{U0}::{number}" for number in range(100_000)]
    request = google.PreferredAllocationRequest()
    request.container_requests.add(available_device_ids=available, allocation_size=2)
    encoded = request.SerializeToString()

    async def ask() -> float:
        began = time.process_time()
        await asked.call(
            "GetPreferredAllocation", encoded, google.PreferredAllocationResponse.FromString
        )
        return time.process_time() - began

    assert await quickest(ask, within_seconds=1.0) < 1.0
