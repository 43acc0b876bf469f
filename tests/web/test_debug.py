"""The answers and refusals of ``/debug``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from vgpu_agent.status import CdiSpecStatus, CdiStatus, NvmlState, NvmlStatus, Problem, ProblemKind
from vgpu_agent.web import debug

if TYPE_CHECKING:
    from vgpu_agent.status import AgentStatus

NOW = 1_800_000_000.0
NO_NAME = "(not named yet)"


def answer(node: AgentStatus, path: str, **query: str) -> Any:
    """The JSON of ``/debug/<path>?<query>``."""
    entry = next(entry for entry in debug.PATHS if entry.path == f"/debug/{path}")
    parsed = debug.parse_request(node, NOW, query.items(), entry.parameters, entry.path)
    return json.loads(debug.to_json(entry.answer(parsed)))


def test_a_device_says_its_health_its_use_and_its_holders(node: AgentStatus) -> None:
    """Everything an operator asks about a card is in one object."""
    first, second = answer(node, "devices")["gpus"]
    assert (first["health"], first["holders"], first["max_holders"]) == (
        "Healthy",
        ["ml/train-0/main"],
        10,
    )
    assert first["usage"]["processes"] == [{"pid": 4711, "memory_mib": 512}]
    assert first["links"] == {"GPU-1": {"pci": 20, "nvlinks": 12, "switch_links": 0}}
    assert (second["health"], second["health_reason"]) == (
        "Unhealthy",
        "XID 79: the GPU has fallen off the bus",
    )
    assert second["health_changed"] == {"at": "2027-01-15T07:59:30.000Z", "seconds_ago": 30.0}
    assert (second["holders"], second["mig_instances"][0]["uuid"]) == ([NO_NAME], "MIG-1")


def test_devices_and_tasks_name_the_nvml_call_that_hangs(node: AgentStatus) -> None:
    """A hung call is named, with its GPU and since when."""
    node.nvml = NvmlStatus(NvmlState.HUNG, "nvmlDeviceGetMemoryInfo", "GPU-1", since=NOW - 9)
    nvml = answer(node, "tasks")["nvml"]
    assert (nvml["state"], nvml["call"], nvml["gpu"], nvml["hung"]["seconds_ago"]) == (
        "hung",
        "nvmlDeviceGetMemoryInfo",
        "GPU-1",
        9.0,
    )
    assert answer(node, "devices")["nvml"] == nvml


def test_a_call_that_returned_is_not_shown_as_hanging(node: AgentStatus) -> None:
    """An earlier note about a call means nothing while the driver answers."""
    node.nvml = NvmlStatus(NvmlState.ANSWERING, "nvmlDeviceGetMemoryInfo", "GPU-1", since=NOW - 9)
    assert answer(node, "tasks")["nvml"]["call"] == ""


def test_the_ledger_shows_its_grants_and_its_last_verification(node: AgentStatus) -> None:
    """The book, and whether it can be believed."""
    ledger = answer(node, "ledger")
    assert (ledger["revision"], ledger["drift_total"], ledger["unknown_ids"]) == (
        9,
        4,
        ["GPU-9::0"],
    )
    assert ledger["verified"]["seconds_ago"] == 12.0
    assert ledger["grants"][0] == {
        "number": 1,
        "family": "nvidia",
        "resource": "nvidia.com/gpu",
        "state": "granted",
        "namespace": "ml",
        "pod": "train-0",
        "pod_uid": "uid-train-0",
        "container": "main",
        "ids": ["GPU-0::1"],
        "ids_total": 1,
        "shares": [
            {
                "device": "GPU-0",
                "gpu": "GPU-0",
                "gpu_index": 0,
                "memory_mib": 0,
                "cores_percent": 0,
                "exclusive": False,
            }
        ],
        "reserved": {"at": "2027-01-15T07:59:00.000Z", "seconds_ago": 60.0},
        "limit": "no limit",
        "limit_reason": "the containers on the GPU take turns without limits",
    }


@pytest.mark.parametrize(
    ("query", "numbers"), [({}, [1, 2]), ({"pod": "ml/train-0"}, [1]), ({"pod": "ml/train"}, [])]
)
def test_allocations_can_be_asked_for_one_pod(
    node: AgentStatus, query: dict[str, str], numbers: list[int]
) -> None:
    """By its whole name. A pod that holds nothing here has an empty list."""
    assert [
        grant["number"] for grant in answer(node, "allocations", **query)["allocations"]
    ] == numbers


@pytest.mark.parametrize(
    "pod", ["", "train-0", "ml/", "/train-0", "ml/train/0", "ML/Train", "ml/train-0\n", "x" * 9000]
)
def test_a_pod_filter_that_makes_no_sense_is_told_the_right_form(
    node: AgentStatus, pod: str
) -> None:
    """An empty list would be read as "holds nothing"."""
    with pytest.raises(
        debug.BadRequestError, match=r"is not understood; write \?pod=NAMESPACE/NAME, for example"
    ) as refused:
        answer(node, "allocations", pod=pod)
    assert len(str(refused.value)) < 250


def test_pods_say_who_holds_which_gpu(node: AgentStatus) -> None:
    """A holder whose pod is not known yet is shown all the same."""
    pods = answer(node, "pods")["pods"]
    assert [
        (pod["pod"], pod["uid"], [grant["shares"][0]["gpu"] for grant in pod["grants"]])
        for pod in pods
    ] == [
        (NO_NAME, "", ["GPU-1"]),
        ("ml/train-0", "uid-train-0", ["GPU-0"]),
    ]


def test_resources_show_each_plugin_server_and_the_kubelet(node: AgentStatus) -> None:
    """Registered, stream open, ids sent, held and free;
    and how a GPU is shared, so that a replica is not taken for a limit.
    """
    found = answer(node, "resources")
    assert found["kubelet"]["socket_present"] is True
    (resource,) = found["resources"]
    assert (
        resource["state"],
        resource["ready"],
        resource["ids"],
        resource["ids_held"],
        resource["ids_free"],
    ) == (
        "registered",
        True,
        20,
        2,
        9,
    )
    assert resource["sharing"] == "time-slicing"


def test_what_is_left_out_is_told_beside_what_is_served(node: AgentStatus) -> None:
    """A GPU that cannot be offered withholds nothing, so that only the caution speaks of it."""
    node.binding.cautions = ("GPU 1: nothing of it is offered",)
    assert answer(node, "resources")["cautions"] == ["GPU 1: nothing of it is offered"]


@pytest.mark.parametrize(
    ("query", "events"),
    [
        ({}, ["gpu.recovered", "gpu.unhealthy", "allocate.granted"]),
        ({"since": "1m"}, ["gpu.unhealthy", "allocate.granted"]),
        ({"since": "2027-01-15T07:59:35Z"}, ["allocate.granted"]),
        ({"since": "2027-01-15T07:59:35"}, ["allocate.granted"]),
        ({"since": "2027-01-15 07:59:35"}, ["allocate.granted"]),
        # what a query makes of +01:00
        ({"since": "2027-01-15T08:59:35 01:00"}, ["allocate.granted"]),
        ({"since": str(NOW - 25)}, ["allocate.granted"]),
        ({"event": "gpu"}, ["gpu.recovered", "gpu.unhealthy"]),
        ({"event": "gpu.unhealthy"}, ["gpu.unhealthy"]),
        ({"event": "gp"}, []),
        ({"limit": "1"}, ["allocate.granted"]),
        ({"event": "gpu", "limit": "1", "since": "1d"}, ["gpu.unhealthy"]),
    ],
)
def test_events_are_filtered_by_time_name_and_number(
    node: AgentStatus, query: dict[str, str], events: list[str]
) -> None:
    """Times are as people write them. A name also stands for all below it.
    The limit keeps the newest.
    """
    assert [entry["event"] for entry in answer(node, "events", **query)["events"]] == events


def test_an_event_shows_facts_that_json_does_not_know(node: AgentStatus) -> None:
    """One odd fact must not make the whole list unreadable."""
    last = answer(node, "events", limit="1")["events"][0]
    assert last == {
        "at": "2027-01-15T07:59:40.000Z",
        "seconds_ago": 20.0,
        "event": "allocate.granted",
        "facts": {"ids": ["GPU-0::1"], "odd": "<class 'object'>"},
    }


@pytest.mark.parametrize("since", ["", "yesterday", "10 m", "-1x", "2027-13-01", "nan", "inf"])
def test_a_since_that_makes_no_sense_is_told_the_right_forms(node: AgentStatus, since: str) -> None:
    """Not silently everything, and not silently nothing."""
    with pytest.raises(
        debug.BadRequestError,
        match=r"since .* is not understood; write an age \(30s, 10m, 2h, 1d\)",
    ):
        answer(node, "events", since=since)


@pytest.mark.parametrize("limit", ["", "0", "-1", "many", "9" * 40, "²"])
def test_a_limit_that_makes_no_sense_is_refused(node: AgentStatus, limit: str) -> None:
    """It is a number of events, 1 or more."""
    with pytest.raises(debug.BadRequestError, match=r"limit .* is not understood"):
        answer(node, "events", limit=limit)


def test_config_says_where_each_value_came_from(node: AgentStatus) -> None:
    """By key, so that two nodes can be compared."""
    assert answer(node, "config")["values"] == {
        "gpu.usageSeconds": {"value": 5.0, "from": "config.yaml:3"},
        "listen": {"value": ":9394", "from": "default"},
    }


def test_config_says_how_containers_are_told_of_devices(node: AgentStatus) -> None:
    """Strategies, each CDI spec with its devices and when it was made,
    and why one is not as it should be.
    """
    good = CdiSpecStatus(
        "k8s.device-plugin.nvidia.com/gpu",
        "/var/run/cdi/a.json",
        ("GPU-0", "all"),
        made_at=NOW - 20,
    )
    bad = CdiSpecStatus(
        "k8s.device-plugin.nvidia.com/gds", "/var/run/cdi/b.json", error="cannot run nvidia-ctk"
    )
    found = answer(
        msgspec.structs.replace(node, cdi=CdiStatus("generated", ("cdi-cri",), (good, bad))),
        "config",
    )["cdi"]
    assert (found["source"], found["strategies"]) == ("generated", ["cdi-cri"])
    first, second = found["specs"]
    assert (first["path"], first["devices"], first["made"]["seconds_ago"]) == (
        "/var/run/cdi/a.json",
        ["GPU-0", "all"],
        20.0,
    )
    assert (second["error"], second["made"]) == (
        "cannot run nvidia-ctk",
        {"at": None, "seconds_ago": None},
    )


def test_tasks_say_how_late_they_are(node: AgentStatus) -> None:
    """State, restarts, last error and signs of life."""
    (task,) = answer(node, "tasks")["tasks"]
    assert (task["name"], task["state"], task["restarts"], task["last_error"]) == (
        "health",
        "running",
        3,
        "OSError: gone",
    )
    assert (task["last_heartbeat"]["seconds_ago"], task["stuck_seconds"]) == (1.0, 0.0)


def test_an_unknown_parameter_is_told_the_known_ones(node: AgentStatus) -> None:
    """A misspelt filter would otherwise show everything as if it matched."""
    with pytest.raises(
        debug.BadRequestError,
        match="query parameter 'pods' is not known to /debug/allocations; known: pod, pretty",
    ):
        answer(node, "allocations", pods="ml/train-0")


def test_a_parameter_given_twice_is_refused(node: AgentStatus) -> None:
    """Choosing one of the two would be a guess."""
    with pytest.raises(debug.BadRequestError, match="'pod' is given twice"):
        debug.parse_request(
            node, NOW, [("pod", "a/b"), ("pod", "c/d")], ("pod",), "/debug/allocations"
        )


def test_a_problem_has_a_kind_and_a_subject_beside_the_words_for_people(node: AgentStatus) -> None:
    """Scripts select by them; text and remedy are one sentence for who reads ``reason``."""
    remedy = "see dmesg"
    node.not_ready = (
        Problem(ProblemKind.NVML, "", "nvmlInit has not returned for 7 s", remedy),
        Problem(ProblemKind.RESOURCE, "a/b", "x"),
        Problem(ProblemKind.RESOURCE, "a/c", "x"),
    )
    assert answer(node, "status")["problems"][:2] == [
        {
            "part": "nvml",
            "reason": f"nvmlInit has not returned for 7 s; {remedy}",
            "kind": "nvml",
            "subject": "",
            "remedy": remedy,
            "also": [],
        },
        {
            "part": "resource a/b, a/c",
            "reason": "x",
            "kind": "resource",
            "subject": "a/b",
            "remedy": "",
            "also": ["a/c"],
        },
    ]


WATCH = "name synced failing last_event lists watches events errors unreadable last_error"
DAEMON = (
    "resource state trouble adopted running limits_seen thread_percentage memory_limit_mib clients "
    "restarts clients_lost in_use_by_others not_given_back"
)


@pytest.mark.parametrize(
    ("path", "part", "keys"),
    [
        (
            "resources",
            "kubelet",
            "directory directory_trouble socket_present restarts_seen records_read records_trouble",
        ),
        (
            "tasks",
            "tasks",
            (
                "name state restarts last_error started last_heartbeat stuck_after_seconds "
                "stuck_seconds"
            ),
        ),
        ("cluster", "watches", WATCH),
        ("cluster", "writers", "name written failed dropped pending oldest_pending_seconds"),
        ("mps", "daemons", DAEMON),
    ],
)
def test_what_is_shown_of_a_status_is_a_promise(
    volcano_node: AgentStatus, path: str, part: str, keys: str
) -> None:
    """These answers have every field of a status of ours.
    One more there is one more for scripts, and none may go.
    """
    found = answer(volcano_node, path)[part]
    first = found if isinstance(found, dict) else found[0]
    assert sorted(first) == sorted(keys.split())


def test_a_node_that_just_started_can_be_asked_everything() -> None:
    """Before the first inventory every path has an answer, and "never" is null."""
    from vgpu_agent.status import AgentStatus as Status

    answers = {
        entry.path: answer(Status(), entry.path.removeprefix("/debug/")) for entry in debug.PATHS
    }
    assert answers["/debug/ledger"]["verified"] == {"at": None, "seconds_ago": None}
    assert len(answers) == len(debug.PATHS)
