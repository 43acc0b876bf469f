"""The bytes that kubelet reads and writes:
golden vectors of kubelet §17, and agreement with Google's encoder.
"""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import constants
from tests.kubelet.backend import U0, U1, shared_resource
from vgpu_agent.device_ids import DeviceId, ListedDevice, list_size_bytes
from vgpu_agent.errors import ConfigError, KubeletError, RequestRefusedError
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.held_ids import decode_allocatable, decode_pod_resources
from vgpu_agent.model import Holding, Owner, Resource
from vgpu_agent.protocol import v1beta1
from vgpu_agent.sim.protocol import deviceplugin_pb2 as google
from vgpu_agent.sim.protocol import podresources_pb2 as google_resources

GOLDEN_REGISTER = (
    "0a0776316265746131120f6e76696469612d6770752e736f636b1a0e6e76696469612e636f6d2f67707522021001"
)
GOLDEN_LIST = (
    "0a370a284750552d61616161616161612d303030302d343030302d383030302d30303030303030303030303012074865616c7468791a020a00"
    "0a390a284750552d62626262626262622d303030302d343030302d383030302d30303030303030303030303112074865616c7468791a040a020801"
)
GOLDEN_ENVVAR = (
    "CkIKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSKEdQVS1hYWFhYWFhYS0wMDAwLTQwMDAtODAwMC0wMDAwMDAwMDAwMDA="
)
GOLDEN_CDI = (
    "KksKSWs4cy5kZXZpY2UtcGx1Z2luLm52aWRpYS5jb20vZ3B1PUdQVS1hYWFhYWFhYS0w"
    "MDAwLTQwMDAtODAwMC0wMDAwMDAwMDAwMDA="
)
GOLDEN_MPS = (
    "CjMKF0NVREFfTVBTX1BJUEVfRElSRUNUT1JZEhgvbXBzL252aWRpYS5jb20vZ3B1L3BpcGUKQgoWTlZJRElBX1ZJU0lCTEVfREVWSUNFUxIoR1BVLWFhYWFhYWFh"
    "LTAwMDAtNDAwMC04MDAwLTAwMDAwMDAwMDAwMBI/"
    "ChgvbXBzL252aWRpYS5jb20vZ3B1L3BpcGUSIy9ydW4vbnZpZGlhL21wcy9udmlkaWEuY29tL2dwdS9waXBl"
    "Eh8KCC9kZXYvc2htEhMvcnVuL252aWRpYS9tcHMvc2ht"
)

GPUS = (DeviceId(U0, U0, 0), DeviceId(U1, U1, 1))


def _list_of(*devices: ListedDevice) -> bytes:
    return codec.DeviceListEncoder().encode(devices)


def _ids_of_65_bytes(replicas: int) -> tuple[DeviceId, ...]:
    """Ids of eight GPUs; 65 bytes each while they are Healthy, 67 when not."""
    return tuple(
        DeviceId(f"{U0}::{1000 + replica}", f"GPU {gpu}", 1)
        for gpu in range(8)
        for replica in range(replicas)
    )


def _google_answer(encoded: bytes) -> google.ContainerAllocateResponse:
    (answer,) = google.AllocateResponse.FromString(encoded).container_responses
    return answer


def test_register_is_the_golden_bytes() -> None:
    """kubelet §17, Register (46 bytes)."""
    encoded = codec.encode_register(
        endpoint="nvidia-gpu.sock", resource="nvidia.com/gpu", pre_start_required=False
    )

    assert (len(encoded), encoded.hex()) == (46, GOLDEN_REGISTER)


def test_a_healthy_list_is_the_golden_bytes() -> None:
    """kubelet §17, ListAndWatch (116 bytes):
    NUMA node 0 is an empty element ``1a 02 0a 00``, not a missing one.
    """
    encoded = _list_of(*(ListedDevice(device, healthy=True) for device in GPUS))

    assert (len(encoded), encoded.hex()) == (116, GOLDEN_LIST)


def test_an_environment_answer_is_the_golden_bytes() -> None:
    """kubelet §17, ContainerAllocateResponse envvar [U0],
    as kubelet stores it in its checkpoint.
    """
    answer = _google_answer(
        codec.encode_allocate([Edits(environment={"NVIDIA_VISIBLE_DEVICES": U0})])
    )

    assert base64.b64encode(answer.SerializeToString()).decode() == GOLDEN_ENVVAR


def test_a_cdi_answer_is_the_golden_bytes() -> None:
    """kubelet §17, cdi-cri [U0]."""
    answer = _google_answer(
        codec.encode_allocate([Edits(cdi_names=(f"k8s.device-plugin.nvidia.com/gpu={U0}",))])
    )

    assert base64.b64encode(answer.SerializeToString()).decode() == GOLDEN_CDI


def test_an_answer_with_mounts_says_what_the_golden_one_says() -> None:
    """kubelet §17, MPS [U0] (219 bytes); compared as messages,
    because the order in a map is not fixed.
    """
    edits = Edits(
        environment={
            "NVIDIA_VISIBLE_DEVICES": U0,
            "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe",
        },
        mounts=(
            Mount("/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu/pipe"),
            Mount("/dev/shm", "/run/nvidia/mps/shm"),
        ),
    )
    golden = base64.b64decode(GOLDEN_MPS)

    assert len(golden) == 219
    assert _google_answer(
        codec.encode_allocate([edits])
    ) == google.ContainerAllocateResponse.FromString(golden)


def test_every_edit_reaches_kubelet() -> None:
    """No field of `Edits` is lost on the way;
    empty values stay values (conformance table, "map entry with empty value").
    """
    edits = Edits(
        environment={"A": "", "B": "x"},
        mounts=(Mount("/a", "/b", read_only=True),),
        device_nodes=(DeviceNode("/dev/nvidia0", "/host/dev/nvidia0", "rwm"),),
        annotations={"k": "v"},
        cdi_names=("nvidia.com/gpu=0",),
    )

    assert _google_answer(codec.encode_allocate([edits])) == google.ContainerAllocateResponse(
        envs={"A": "", "B": "x"},
        mounts=[google.Mount(container_path="/a", host_path="/b", read_only=True)],
        devices=[
            google.DeviceSpec(
                container_path="/dev/nvidia0", host_path="/host/dev/nvidia0", permissions="rwm"
            )
        ],
        annotations={"k": "v"},
        cdi_devices=[google.CdiDevice(name="nvidia.com/gpu=0")],
    )


def test_empty_edits_are_an_element_each() -> None:
    """The kubelet reads the first element, so nothing to add is still one empty element
    (conformance table, "two empty responses").
    """
    assert codec.encode_allocate([Edits(), Edits()]).hex() == "0a000a00"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            v1beta1.Device(id="g", topology=v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=0)])),
            google.Device(id="g", topology=google.TopologyInfo(nodes=[google.NumaNode(id=0)])),
        ),
        (
            v1beta1.Device(
                id="g",
                topology=v1beta1.TopologyInfo(
                    nodes=[v1beta1.NumaNode(id=0), v1beta1.NumaNode(id=1)]
                ),
            ),
            google.Device(
                id="g",
                topology=google.TopologyInfo(nodes=[google.NumaNode(id=0), google.NumaNode(id=1)]),
            ),
        ),
        (
            v1beta1.Device(id="g", topology=v1beta1.TopologyInfo()),
            google.Device(id="g", topology=google.TopologyInfo()),
        ),
        (v1beta1.Device(id="g"), google.Device(id="g")),
        (
            v1beta1.Device(id="g", topology=v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=-1)])),
            google.Device(id="g", topology=google.TopologyInfo(nodes=[google.NumaNode(id=-1)])),
        ),
        (v1beta1.ListAndWatchResponse(), google.ListAndWatchResponse()),
        (
            v1beta1.ListAndWatchResponse(devices=[v1beta1.Device(), v1beta1.Device()]),
            google.ListAndWatchResponse(devices=[google.Device(), google.Device()]),
        ),
        (
            v1beta1.AllocateResponse(container_responses=[v1beta1.ContainerAllocateResponse()]),
            google.AllocateResponse(container_responses=[google.ContainerAllocateResponse()]),
        ),
        (
            v1beta1.RegisterRequest(
                version="v1beta1",
                endpoint="x.sock",
                resource_name="a/b",
                options=v1beta1.DevicePluginOptions(),
            ),
            google.RegisterRequest(
                version="v1beta1",
                endpoint="x.sock",
                resource_name="a/b",
                options=google.DevicePluginOptions(),
            ),
        ),
        (v1beta1.Device(id="gé\U0001f600"), google.Device(id="gé\U0001f600")),
        (
            v1beta1.ContainerAllocateResponse(envs={"": "y"}),
            google.ContainerAllocateResponse(envs={"": "y"}),
        ),
    ],
    ids=[
        "NUMA node 0",
        "NUMA nodes 0 and 1",
        "topology present and empty",
        "no topology",
        "negative NUMA node",
        "empty list",
        "two empty devices",
        "empty answer",
        "options present and empty",
        "unicode",
        "empty map key",
    ],
)
def test_the_generated_encoder_agrees_with_google(ours: object, theirs: object) -> None:
    """The conformance table that other versions of our protobuf library failed;
    Google's parser must see the same message.
    """
    assert type(theirs).FromString(bytes(ours)) == theirs  # type: ignore[attr-defined,call-overload]  # generated classes without types
    assert bytes(ours) == theirs.SerializeToString(deterministic=True)  # type: ignore[attr-defined,call-overload]  # generated classes without types


def test_unknown_fields_do_not_disturb() -> None:
    """A newer kubelet may say more than we know."""
    request = google.PreStartContainerRequest(device_ids=["a"]).SerializeToString()

    assert codec.decode_pre_start(request + bytes.fromhex("fa0703616263")) == ("a",)


def test_a_negative_numa_node_is_no_topology() -> None:
    """The kernel says -1 for "I do not know", which kubelet would take for a node."""
    (device,) = google.ListAndWatchResponse.FromString(
        _list_of(ListedDevice(DeviceId("g", "g", -1), healthy=True))
    ).devices

    assert not device.HasField("topology")


@given(
    st.lists(
        st.builds(
            DeviceId,
            st.text(min_size=1, max_size=70),
            st.just("d"),
            st.none() | st.integers(0, 300),
        ),
        max_size=12,
    )
)
def test_the_size_of_the_worst_list_is_known_without_encoding_it(ids: list[DeviceId]) -> None:
    """`list_size_bytes` is exactly the length of the list in which every id is Unhealthy,
    and no list is longer.
    """
    worst = _list_of(*(ListedDevice(device, healthy=False) for device in ids))

    assert list_size_bytes(ids) == len(worst)
    assert len(_list_of(*(ListedDevice(device, healthy=True) for device in ids))) <= len(worst)


def test_a_flipped_device_changes_one_piece_of_the_list() -> None:
    """Lists made from cached pieces are the same bytes as lists made at once,
    also after a flip there and back.
    """
    encoder = codec.DeviceListEncoder()
    healthy = [ListedDevice(device, healthy=True) for device in GPUS]
    flipped = [healthy[0], ListedDevice(GPUS[1], healthy=False)]

    assert encoder.encode(healthy) == _list_of(*healthy)
    assert encoder.encode(flipped) == _list_of(*flipped)
    assert encoder.encode(healthy) == _list_of(*healthy)


def test_a_list_above_the_budget_is_refused_with_the_factor_that_fits() -> None:
    """kubelet V13: 70,000 ids of 65 bytes are refused with clear text.
    The number that it names does fit.
    """
    resource = Resource("nvidia.com/gpu", "nvidia", _ids_of_65_bytes(8750))

    with pytest.raises(ConfigError) as refusal:
        codec.check_budget(resource)

    assert str(refusal.value) == (
        "nvidia.com/gpu: 70000 ids of up to 67 bytes make a device list of 4.47 MiB, and the agent "
        "sends at most 3.50 MiB, because the kubelet refuses 4 MiB; replicas: at most 6847 for "
        "each of the 8 devices would fit, 8750 are configured"
    )
    codec.check_budget(Resource("nvidia.com/gpu", "nvidia", _ids_of_65_bytes(6847)))


def test_a_list_within_the_budget_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size itself is allowed, one byte less is not."""
    resource = shared_resource()
    size = list_size_bytes(resource.ids)

    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: size})
    codec.check_budget(resource)
    constants.use(monkeypatch, {constants.MESSAGE_BUDGET: size - 1})
    with pytest.raises(ConfigError):
        codec.check_budget(resource)


def test_an_allocate_request_is_one_tuple_of_ids_for_each_container() -> None:
    """Ids stay in kubelet's order."""
    request = google.AllocateRequest()
    request.container_requests.add(device_ids=["b", "a"])
    request.container_requests.add(device_ids=["c"])

    assert codec.decode_allocate(request.SerializeToString()) == [("b", "a"), ("c",)]


@pytest.mark.parametrize(
    ("request_hex", "complaint"),
    [
        ("", "names no container"),
        ("0a00", "without any device id"),
        ("0a020a00", "an empty device id"),
        ("0a05", "longer than the message"),
    ],
)
def test_an_allocate_request_without_sense_is_refused(request_hex: str, complaint: str) -> None:
    """The library's decoder would accept such a request.
    It is refused before the ledger sees it.
    """
    with pytest.raises(RequestRefusedError, match=complaint):
        codec.decode_allocate(bytes.fromhex(request_hex))


def test_a_preference_request_is_understood() -> None:
    """Available and required ids and the number wanted, for each container."""
    request = google.PreferredAllocationRequest()
    request.container_requests.add(
        available_device_ids=["a", "b"], must_include_device_ids=["b"], allocation_size=2
    )

    assert codec.decode_preference(request.SerializeToString()) == [
        codec.PreferenceRequest(("a", "b"), ("b",), 2)
    ]


def test_one_container_in_two_entries_is_united() -> None:
    """kubelet V11: one entry for each NUMA node becomes one holding.
    Other containers and resources stay apart.
    """
    response = google_resources.ListPodResourcesResponse()
    container = response.pod_resources.add(name="p", namespace="ns").containers.add(name="c")
    container.devices.add(resource_name="r", device_ids=["a", "b"]).topology.nodes.add(id=0)
    container.devices.add(resource_name="r", device_ids=["c"]).topology.nodes.add(id=1)
    container.devices.add(resource_name="other", device_ids=["x"])
    response.pod_resources.add(name="idle", namespace="ns").containers.add(name="c")

    assert decode_pod_resources(response.SerializeToString()) == (
        Holding("r", ("a", "b", "c"), Owner("c", namespace="ns", pod="p")),
        Holding("other", ("x",), Owner("c", namespace="ns", pod="p")),
    )


def test_what_can_be_allocated_is_united_by_resource() -> None:
    """The kubelet makes an entry of each id. A resource that it knows without ids has none."""
    response = google_resources.AllocatableResourcesResponse()
    response.devices.add(resource_name="r", device_ids=["a"]).topology.nodes.add(id=0)
    response.devices.add(resource_name="r", device_ids=["b", "a"])
    response.devices.add(resource_name="other", device_ids=["x"])

    assert decode_allocatable(response.SerializeToString(), {"r": (), "other": (), "none": ()}) == {
        "r": frozenset({"a", "b"}),
        "other": frozenset({"x"}),
    }


@given(st.binary(max_size=120))
def test_a_junk_answer_about_what_can_be_allocated_is_an_error_or_a_picture(answer: bytes) -> None:
    """Nothing that comes back from the socket leads to another exception."""
    try:
        listed = decode_allocatable(answer, {})
    except KubeletError:
        return
    assert all(isinstance(ids, frozenset) for ids in listed.values())


@given(st.binary(max_size=120))
def test_a_junk_answer_of_pod_resources_is_an_error_or_a_picture(answer: bytes) -> None:
    """Nothing that comes back from the socket leads to another exception."""
    try:
        holdings = decode_pod_resources(answer)
    except KubeletError:
        return
    assert all(holding.ids for holding in holdings)


# a CDI name is never empty
@given(st.lists(st.lists(st.text(min_size=1, max_size=200), max_size=3).map(tuple), max_size=3))
def test_the_answer_of_late_binding_is_what_google_would_write(
    names: list[tuple[str, ...]],
) -> None:
    """It is put together by hand, because it is needed for each resource of each container."""
    response = google.AllocateResponse()
    for each in names:
        container = response.container_responses.add()
        for name in each:
            container.cdi_devices.add(name=name)
    assert (
        codec.encode_allocate(Edits(cdi_names=each) for each in names)
        == response.SerializeToString()
    )
