"""From JSON to pods and nodes: what is read, what is forgiven, and that junk is one clear error."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.cluster import decode
from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.errors import ClusterError, RequestRefusedError
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, ContainerKind, PodContainer


def _pod(spec: Any = None, status: Any = None, **metadata: Any) -> bytes:
    known = {"name": "train", "namespace": "team", "uid": "u1", "resourceVersion": "5"}
    return msgspec.json.encode({"metadata": {**known, **metadata}, "spec": spec, "status": status})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2", 2), ("0", 0), ("10k", 10_000), ("3Gi", 3 * 1024**3), ("1e3", 1000), ("1E3", 1000),
        ("1E", 10**18), ("2000m", 2), ("0.5Ki", 512), ("+7", 7), ("5.", 5), (".5k", 500),
        ("9223372036854775807", 2**63 - 1), ("1000.0", 1000), ("1000000u", 1),
    ],
)  # fmt: skip
def test_a_quantity_in_any_spelling_is_its_number(text: str, number: int) -> None:
    """Kubernetes keeps the user's spelling."""
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "1500m", "-1", "-0.5", "1.5", "9223372036854775808", "8Ei", "1e999", "1e99999999999",
     "9" * 100, "two", "2 ", " 2", "1KiB", "1K", "0x10", "1e", "1e3k",
     "٣", "1_000", "∞", "NaN", "--1", "+-1"],
)  # fmt: skip
def test_what_is_no_whole_number_is_none(text: str) -> None:
    """Fractions, negative and huge numbers, and words; at once, however large the exponent."""
    assert whole_number(text) is None


@given(st.text(max_size=80))
def test_no_text_breaks_the_reader_of_quantities(text: str) -> None:
    """A number in range, or None."""
    number = whole_number(text)
    assert number is None or 0 <= number < 2**63


def test_a_pod_has_what_families_and_allocation_need() -> None:
    """Limits of extended resources only, variables by name,
    containers in kubelet's order with their kinds.
    """
    pod = decode.pod(
        _pod(
            {
                "nodeName": "n1",
                "schedulerName": "volcano",
                "initContainers": [
                    {"name": "prepare"},
                    {"name": "proxy", "restartPolicy": "Always"},
                ],
                "containers": [
                    {
                        "name": "main",
                        "env": [
                            {"name": "HOME", "value": "/root"},
                            {"name": "CUDA_DISABLE_CONTROL", "value": "true"},
                        ],
                        "resources": {
                            "limits": {
                                "cpu": "2",
                                "volcano.sh/vgpu-number": "2",
                                "volcano.sh/vgpu-memory": "1500m",
                            }
                        },
                    }
                ],
            },
            {"phase": "Running"},
            annotations={"volcano.sh/vgpu-node": "n1", "of/others": "x" * 1000},
            labels={"app": "x"},
            creationTimestamp="2026-11-21T12:00:00Z",
            deletionTimestamp="2026-11-21T12:01:00Z",
        )
    )
    assert (pod.full_name, pod.uid, pod.node, pod.phase, pod.scheduler, pod.resource_version) == (
        "team/train",
        "u1",
        "n1",
        "Running",
        "volcano",
        "5",
    )
    assert pod.annotations == {"volcano.sh/vgpu-node": "n1"}
    assert (pod.deleting, pod.created_at) == (True, 1795262400.0)
    assert [(one.name, one.kind) for one in pod.containers] == [
        ("prepare", ContainerKind.INIT),
        ("proxy", ContainerKind.SIDECAR),
        ("main", ContainerKind.MAIN),
    ]
    assert pod.containers[2] == PodContainer(
        "main",
        limits={"volcano.sh/vgpu-number": 2},
        unreadable_limits={"volcano.sh/vgpu-memory": "1500m"},
        environment=frozenset({"CUDA_DISABLE_CONTROL"}),
    )


def test_limits_count_and_requests_only_where_there_is_no_limit() -> None:
    """For each resource by itself."""
    resources = {
        "requests": {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "30"},
        "limits": {"volcano.sh/vgpu-number": "2"},
    }
    pod = decode.pod(_pod({"containers": [{"name": "main", "resources": resources}]}))
    assert pod.containers[0].limits == {"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-cores": 30}


@pytest.mark.parametrize(
    "init",
    [
        [
            {
                "name": "noise",
                "resources": {"limits": {f"a.b/x{place}": "0" for place in range(200)}},
            }
        ],
        [{"name": f"c{place}", "resources": {"limits": {"a.b/x": "0"}}} for place in range(70)],
        [
            {"name": f"c{place}", "resources": {"limits": {"volcano.sh/vgpu-cores": "0"}}}
            for place in range(60)
        ],
    ],
    ids=["names", "containers", "own-names"],
)
def test_no_other_container_hides_what_a_container_asks_for(init: list[dict[str, Any]]) -> None:
    """Amounts of 0 cost a tenant nothing. A hidden limit of memory would mean the whole card, of
    which no scheduler would know.
    """
    limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "5"}
    main = {"name": "main", "resources": {"limits": limits}}
    pod = decode.pod(_pod({"initContainers": init, "containers": [main]}))
    assert pod.containers[-1].name == "main"
    assert pod.containers[-1].limits == {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 5}
    assert not pod.has_more_requests
    assert sum(len(one.limits) for one in pod.containers) < 200


def test_all_limits_of_a_pod_with_many_containers_are_kept() -> None:
    """The memory of the last ones would count as all of a card."""
    limits = {f"volcano.sh/vgpu-{name}": "1" for name in ("number", "memory", "cores")}
    many = [{"name": f"c{place}", "resources": {"limits": limits}} for place in range(60)]
    pod = decode.pod(_pod({"containers": many}))
    assert not pod.has_more_requests
    assert {len(one.limits) for one in pod.containers} == {3}


def test_a_renamed_resource_is_not_hidden_either() -> None:
    """Volcano's ConfigMap may give its resources other names in its domain."""
    noise = {"limits": {f"a.b/x{place}": "0" for place in range(200)}}
    limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/share-memory": "5"}
    pod = decode.pod(
        _pod(
            {
                "initContainers": [{"name": "noise", "resources": noise}],
                "containers": [{"name": "main", "resources": {"limits": limits}}],
            }
        )
    )
    assert pod.containers[-1].limits == {"volcano.sh/vgpu-number": 1, "volcano.sh/share-memory": 5}


@pytest.mark.parametrize(
    "init",
    [
        [{"limits": {f"volcano.sh/vgpu-{place}": "0" for place in range(300)}}],
        [{"limits": {"volcano.sh/vgpu-cores": "0"}}] * 64,
    ],
    ids=["names", "containers"],
)
def test_a_pod_with_more_requests_than_are_kept_says_so(init: list[dict[str, Any]]) -> None:
    """Memory is bounded, so something is left out. Then no family may serve the pod."""
    inits = [{"name": f"c{place}", "resources": each} for place, each in enumerate(init)]
    main = {"name": "main", "resources": {"limits": {"volcano.sh/vgpu-number": "1"}}}
    pod = decode.pod(_pod({"initContainers": inits, "containers": [main]}))
    assert pod.has_more_requests
    assert len(pod.containers) <= 64
    assert sum(len(one.limits) for one in pod.containers) <= 256
    with pytest.raises(RequestRefusedError, match="names more GPU resources"):
        pod.refuse_more_requests()


def test_a_container_has_started_when_it_runs_or_ran() -> None:
    """Waiting for its image it has not; between two tries of a crash loop it has."""
    statuses = [
        {
            "name": "waiting",
            "restartCount": 0,
            "state": {"waiting": {"reason": "ContainerCreating"}},
        },
        {
            "name": "running",
            "restartCount": 0,
            "state": {"running": {"startedAt": "2026-11-21T12:00:00Z"}},
        },
        {
            "name": "crashing",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1}},
        },
    ]
    spec = {
        "initContainers": [{"name": "init"}],
        "containers": [{"name": one["name"]} for one in statuses],
    }
    init = [{"name": "init", "state": {"terminated": {"exitCode": 0}}}]
    pod = decode.pod(_pod(spec, {"containerStatuses": statuses, "initContainerStatuses": init}))
    assert {one.name: one.started for one in pod.containers} == {
        "init": True,
        "waiting": False,
        "running": True,
        "crashing": True,
    }
    assert [one.name for one in pod.containers if one.running] == ["running"]


def test_a_mirror_pod_claims_the_hash_of_its_file() -> None:
    """A pod cannot prove that itself, so it is known by the API server's UID
    until something else does.
    """
    pod = decode.pod(_pod(annotations={MIRROR_POD: "h1", STATIC_POD_HASH: "h1"}))
    assert (pod.uid, pod.kubelet_uid, pod.alleged_static_uid) == ("u1", "u1", "h1")
    assert decode.pod(_pod(annotations={STATIC_POD_HASH: "h1"})).alleged_static_uid == ""


def test_a_pod_is_reported_once_kubelet_has_written_when_it_accepted_it() -> None:
    """A Binding sets the condition PodScheduled.
    A pod made with spec.nodeName has no condition before the kubelet's.
    """
    scheduled, refused = (
        {"type": "PodScheduled", "status": status} for status in ("True", "False")
    )
    pods = [
        decode.pod(_pod(status=status))
        for status in (None, {"conditions": [refused]}, {"conditions": [scheduled]})
    ]
    assert [(pod.reported, pod.scheduled) for pod in pods] == [
        (False, False),
        (False, False),
        (False, True),
    ]
    pod = decode.pod(_pod(status={"startTime": "2026-01-01T00:00:00Z"}))
    assert (pod.reported, pod.scheduled) == (True, True)


def test_nulls_are_what_is_not_there() -> None:
    """Go writes null where it has an empty list or map."""
    spec = {
        "containers": [{"name": "main", "env": None, "resources": None}],
        "initContainers": None,
    }
    pod = decode.pod(_pod(spec, None, annotations=None, labels=None, creationTimestamp=None))
    assert (pod.phase, pod.annotations, pod.created_at) == ("Pending", {}, 0.0)
    assert decode.pod(_pod()).containers == ()


def test_a_node_has_versions_amounts_and_conditions() -> None:
    """Extended resources only; conditions by type."""
    node = decode.node(
        msgspec.json.encode(
            {
                "metadata": {
                    "name": "n1",
                    "uid": "u1",
                    "resourceVersion": "9",
                    "annotations": {"a": "1"},
                    "labels": {"b": "2"},
                },
                "spec": {
                    "podCIDR": "10.0.0.0/24",
                    "taints": [
                        {"key": "a", "effect": "NoSchedule"},
                        {"key": "b", "value": "1", "effect": "NoSchedule"},
                        {"key": "a", "effect": "NoExecute"},
                    ],
                },
                "status": {
                    "capacity": {"cpu": "8", "volcano.sh/gpu-number": "2"},
                    "allocatable": {"cpu": "8", "volcano.sh/gpu-number": "1"},
                    "nodeInfo": {
                        "kubeletVersion": "v1.31.2",
                        "containerRuntimeVersion": "containerd://2.0.1",
                    },
                    "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
                },
            }
        )
    )
    assert (node.name, node.uid, node.resource_version) == ("n1", "u1", "9")
    assert (node.kubelet_version, node.runtime_version) == ("v1.31.2", "containerd://2.0.1")
    assert (node.capacity, node.allocatable) == (
        {"volcano.sh/gpu-number": "2"},
        {"volcano.sh/gpu-number": "1"},
    )
    assert node.conditions == {"Ready": ("True", "KubeletReady", "")}
    assert node.taints == {"a": "NoExecute,NoSchedule", "b": "NoSchedule"}


def test_what_cannot_be_read_is_named() -> None:
    """A user can then look at the pod."""
    with pytest.raises(ClusterError, match=r"a pod team/train that cannot be read: .*annotations"):
        decode.pod(_pod(annotations={"volcano.sh/vgpu-node": 7}))
    with pytest.raises(ClusterError, match="without a name or a UID"):
        decode.pod(_pod(uid=""))


def test_a_nesting_without_end_is_an_error_like_any_other() -> None:
    """The parser's own limit must not reach us as its exception."""
    deep = (
        b'{"metadata":{"name":"a","uid":"u"},"spec":{"volumes":'
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}}"
    )
    with pytest.raises(ClusterError, match="cannot be read"):
        decode.pod(deep)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
_KEYS = [
    "name",
    "uid",
    "annotations",
    "resources",
    "limits",
    "requests",
    "env",
    "containers",
    "state",
    "restartCount",
    "capacity",
    "a/b",
]
_LIKELY = st.recursive(
    st.none() | st.text(max_size=5) | st.integers() | st.sampled_from(["2", "1e3", "-5", "3Gi"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
    ),
    max_leaves=15,
)
_DECODERS = (decode.pod, decode.node, decode.config_map, decode.page, decode.event, decode.version)


def _try_all(raw: bytes) -> None:
    for decoder in _DECODERS:
        with contextlib.suppress(ClusterError):
            decoder(raw)
    assert isinstance(decode.failure(raw), ClusterError)


@given(st.binary(max_size=200))
def test_no_bytes_break_a_decoder(raw: bytes) -> None:
    """An object or a ClusterError, never a library's exception."""
    _try_all(raw)


@given(
    _JSON,
    st.dictionaries(
        st.sampled_from(["metadata", "spec", "status", "type", "object", "items", "data"]),
        _LIKELY | _JSON,
        max_size=6,
    ),
)
def test_no_json_breaks_a_decoder(anything: Any, likely: Any) -> None:
    """Almost valid objects of Kubernetes do not break it either."""
    _try_all(msgspec.json.encode(anything))
    _try_all(msgspec.json.encode(likely))


@given(_LIKELY, _LIKELY)
def test_no_pod_with_a_name_breaks_the_decoder(spec: Any, status: Any) -> None:
    """Its specification and its status may hold anything."""
    _try_all(_pod(spec, status))
    _try_all(_pod({"containers": [spec], "initContainers": status}, {"containerStatuses": spec}))


def test_a_container_is_known_by_the_id_that_the_kubelet_has_written() -> None:
    """Without the runtime's name; what no runtime makes is left out, as is the id of the life
    before.
    """
    pod = decode.pod(
        msgspec.json.encode(
            {
                "metadata": {"name": "a", "namespace": "b", "uid": "c"},
                "spec": {"containers": [{"name": name} for name in ("one", "two", "three")]},
                "status": {
                    "containerStatuses": [
                        {"name": "one", "containerID": f"containerd://{'ab' * 32}"},
                        {"name": "two", "containerID": "cri-o://../../etc"},
                        {"name": "three", "containerID": None},
                    ]
                },
            }
        )
    )
    assert [one.container_id for one in pod.containers] == ["ab" * 32, "", ""]


def test_the_value_of_a_variable_is_kept_where_it_counts() -> None:
    """vgpu-manager §4.1: literal values only; of two with one name the kubelet takes the later.
    Long ones are dropped unread, since a tenant may write a megabyte.
    """
    variables: list[dict[str, Any]] = [
        {"name": "DISABLE_VGPU_CONTROL", "value": "true"},
        {"name": "CUDA_MEM_OVERSOLD", "value": "1"},
        {"name": "CUDA_MEM_OVERSOLD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "LD_PRELOAD", "value": "/x.so"},
    ]
    (container,) = decode.pod(_pod({"containers": [{"name": "main", "env": variables}]})).containers
    assert container.values == {"DISABLE_VGPU_CONTROL": "true"}
    assert "CUDA_MEM_OVERSOLD" in container.environment
    for value in ("x" * 63, "x" * 1_000_000, 7, None, {"a": 1}):
        variables = [{"name": "DISABLE_VGPU_CONTROL", "value": value}]
        pod = decode.pod(_pod({"containers": [{"name": "main", "env": variables}]}))
        assert pod.containers[0].values == {}
        assert pod.containers[0].environment == {"DISABLE_VGPU_CONTROL"}


MINUTE = "1970-01-01T00:01:00Z"


@pytest.mark.parametrize(
    ("status", "completed", "ended_at"),
    [
        ({}, False, 0.0),
        ({"state": {"running": {}}}, False, 0.0),
        ({"state": {"terminated": {"exitCode": 0, "finishedAt": MINUTE}}}, True, 60),
        ({"state": {"terminated": {"exitCode": 3, "finishedAt": MINUTE}}}, False, 60),
        ({"state": {"terminated": {"finishedAt": "never"}}}, False, 0.0),
        (
            {
                "state": {"waiting": {}},
                "lastState": {"terminated": {"exitCode": 0, "finishedAt": MINUTE}},
            },
            False,
            60,
        ),
    ],
)  # fmt: skip
def test_a_status_tells_how_and_when_a_container_has_ended(
    status: dict[str, Any], *, completed: bool, ended_at: float
) -> None:
    """An init container that has succeeded makes way for the next one."""
    spec = {"initContainers": [{"name": "prepare"}], "containers": [{"name": "main"}]}
    read = decode.pod(_pod(spec, {"initContainerStatuses": [{"name": "prepare", **status}]}))
    assert (read.containers[0].completed, read.containers[0].ended_at) == (completed, ended_at)


@pytest.mark.parametrize(
    ("status", "started_at"),
    [
        ({}, 0.0),
        ({"state": {"running": {"startedAt": MINUTE}}}, 60.0),
        ({"state": {"terminated": {"exitCode": 0, "startedAt": MINUTE}}}, 60.0),
        (
            {
                "state": {"running": {"startedAt": MINUTE}},
                "lastState": {"terminated": {"startedAt": "1970-01-01T00:00:30Z"}},
            },
            60.0,
        ),
        ({"state": {"running": {"startedAt": "never"}}}, 0.0),
    ],
)
def test_a_status_tells_when_a_container_has_started_last(
    status: dict[str, Any], started_at: float
) -> None:
    """A start of before an init container's was in an earlier sandbox."""
    read = decode.pod(
        _pod(
            {"containers": [{"name": "main"}]}, {"containerStatuses": [{"name": "main", **status}]}
        )
    )
    assert read.containers[0].started_at == started_at


@pytest.mark.parametrize(("status", "anew"), [("False", True), ("True", False), ("", False)])
def test_a_pod_without_a_sandbox_begins_anew(status: str, *, anew: bool) -> None:
    """The kubelet says so in a condition since 1.29."""
    conditions = [{"type": "PodReadyToStartContainers", "status": status}]
    assert decode.pod(_pod({}, {"conditions": conditions})).in_new_sandbox is anew
