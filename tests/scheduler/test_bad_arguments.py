"""Arguments, pods and Nodes of every shape: whatever comes, the answer is well-formed, a refused
call keeps nothing, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import string
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts, uuid
from tests.scheduler.strict_server import StrictCluster
from tests.scheduler.test_extender import GRACE_SECONDS, SMALL, a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError
from vgpu_agent.nodes import Node
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.scheduler.messages import MAX_NODES

Anything = st.SearchStrategy[Any]

EXAMPLES = hypothesis.settings(max_examples=60)
_NUMBERS = (-1, 0, 1, 2, 16, 17, 64, 100, 101, 2**31, 2**53, 2**63, 2**64, 10**30, -(10**30))

# -- what may stand anywhere in JSON --------------------------------------------------------------

scalars: Anything = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.floats(),  # NaN and Infinity, which Python writes and JSON forbids
    st.text(max_size=20),
    st.sampled_from(["n0", "n1", "", "../x", "GPU-0", "1e9", "2k", "0x10", "９", "\u0000"]),
)
anything: Anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
amounts: Anything = st.one_of(
    st.sampled_from([str(number) for number in _NUMBERS]),
    st.sampled_from(["1", "2", "1k", "1Ki", "0.5", "-1", "", "x", "1e3", "١", "9" * 5000]),
    scalars,
)
limits: Anything = st.dictionaries(
    st.sampled_from([KEYS.number, KEYS.cores, KEYS.memory, "nvidia.com/gpu", "cpu", "/"]),
    amounts,
    max_size=4,
)
names: Anything = st.one_of(
    st.text(string.ascii_lowercase + string.digits + "-.", max_size=70),
    st.sampled_from(["main", "side", "A", "a" * 300, "a_b", "../etc", ""]),
)
containers: Anything = st.lists(
    st.fixed_dictionaries(
        {"name": names, "resources": st.fixed_dictionaries({"limits": limits})},
        optional={"restartPolicy": st.sampled_from(["Always", "x", ""]), "env": anything},
    ),
    max_size=4,
)
words: Anything = st.one_of(
    st.sampled_from(
        ["binpack", "spread", "none", "link", "link-strict", "numa", "numa-strict", "virt", "phy"]
    ),
    st.sampled_from(["a10", "A10,,H100", "," * 3000, "x," * 100, "GPU-", "default[0_GPU-0_1_1]"]),
    st.text(max_size=30),
)
pod_texts: Anything = st.dictionaries(
    st.sampled_from([*KEYS.state_annotations, *KEYS.user_annotations, KEYS.node_policy, "x/y"]),
    words,
    max_size=5,
)
pods: Anything = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {
                "name": st.one_of(st.just("train"), names),
                "namespace": st.one_of(st.just("default"), names),
                "uid": st.one_of(st.sampled_from(["uid-1", "uid-2", "", "a/b"]), st.text()),
            },
            optional={"annotations": st.one_of(pod_texts, anything), "labels": anything},
        ),
        "spec": st.fixed_dictionaries(
            {"containers": containers},
            optional={
                "initContainers": containers,
                "nodeName": st.sampled_from(["", "n0", "elsewhere"]),
            },
        ),
    },
    optional={"status": anything},
)
node_names: Anything = st.one_of(
    st.none(),
    st.lists(st.sampled_from(["n0", "n1", "n0", "unknown", "", "../x"]), max_size=6),
    anything,
)
node_lists: Anything = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "items": st.one_of(
                st.none(),
                st.lists(
                    st.one_of(
                        st.fixed_dictionaries(
                            {
                                "metadata": st.fixed_dictionaries(
                                    {"name": st.sampled_from(["n0", "n1", "", "unknown"])}
                                )
                            }
                        ),
                        anything,
                    ),
                    max_size=4,
                ),
            )
        }
    ),
    anything,
)
filters: Anything = st.one_of(
    st.fixed_dictionaries(
        {"Pod": st.one_of(pods, pods, anything)},
        optional={"NodeNames": node_names, "Nodes": node_lists},
    ),
    anything,
)


def written(value: Any) -> bytes:
    """JSON as a careless program writes it, with NaN and lone surrogates."""
    return json.dumps(value).encode()


@st.composite
def spoiled(draw: st.DrawFn, values: Anything) -> bytes:
    """A body, now and then cut, or with bytes that are no UTF-8."""
    body = written(draw(values))
    match draw(st.integers(0, 5)):
        case 0:
            return body[: draw(st.integers(0, len(body)))]
        case 1:
            place = draw(st.integers(0, len(body)))
            return body[:place] + draw(st.binary(max_size=3)) + body[place:]
        case _:
            return body


def held(cluster: StrictCluster) -> Any:
    """All that the book has, to compare before with after."""
    return [cluster.book.taken(node) for node in cluster.nodes]


def check_filter(answer: bytes) -> dict[str, Any]:
    """A filter's answer: the right fields, and either one reason or the Nodes that remain."""
    found: dict[str, Any] = json.loads(answer.decode())
    assert list(found) == [
        "Nodes",
        "NodeNames",
        "FailedNodes",
        "FailedAndUnresolvableNodes",
        "Error",
    ]
    assert isinstance(found["Error"], str)
    assert len(found["Error"]) < 2000
    assert found["FailedAndUnresolvableNodes"] is None
    phrases = {reason.value for reason in Reason}
    assert all(text in phrases for text in found["FailedNodes"].values())
    if found["Error"]:
        assert (found["Nodes"], found["NodeNames"], found["FailedNodes"]) == (None, None, {})
    return found


# -- filter and bind ------------------------------------------------------------------------------


@EXAMPLES
@hypothesis.given(body=spoiled(filters))
def test_any_filter_is_answered_and_a_refused_one_keeps_nothing(body: bytes) -> None:
    """One reason, and no exception."""

    async def ask() -> None:
        cluster = StrictCluster()
        before = held(cluster)
        answer = check_filter(cluster.extender.filter(body))
        remaining = answer["NodeNames"] or (answer["Nodes"] or {}).get("items")
        if answer["Error"] or not remaining:
            assert held(cluster) == before
            assert cluster.extender._promises == {}
        assert cluster.strict.requests == []

    asyncio.run(ask())


@EXAMPLES
@hypothesis.given(pod=pods)
def test_a_pod_that_is_kept_cards_fits_its_node(pod: dict[str, Any]) -> None:
    """Whatever it asks for: no card gives more than it has, and a second filter says the same."""

    async def ask() -> None:
        cluster = StrictCluster()
        body = written({"Pod": pod, "NodeNames": ["n0", "n1"]})
        first = check_filter(cluster.extender.filter(body))
        for node in cluster.nodes:
            for slots, memory, cores in cluster.book.taken(node):
                assert 0 <= slots <= 10
                assert 0 <= memory <= 24576
                assert 0 <= cores <= 100
        second = check_filter(cluster.extender.filter(body))
        assert second["NodeNames"] == first["NodeNames"]
        assert second["Error"] == first["Error"]

    asyncio.run(ask())


bindings: Anything = st.one_of(
    st.fixed_dictionaries(
        {
            "PodName": st.one_of(st.sampled_from(["train", "stranger", "../x", ""]), scalars),
            "PodNamespace": st.one_of(st.sampled_from(["default", "kube-system"]), scalars),
            "Node": st.one_of(st.sampled_from(["n0", "n1", "unknown"]), scalars),
        },
        optional={"PodUID": st.one_of(st.sampled_from(["uid-train", "uid-x", ""]), scalars)},
    ),
    anything,
)


@EXAMPLES
@hypothesis.given(body=spoiled(bindings))
def test_any_bind_is_answered_and_binds_only_what_was_promised(body: bytes) -> None:
    """Strangers, wrong UIDs and other Nodes change nothing."""

    async def ask() -> None:
        cluster = StrictCluster()
        pod = cluster.create("train", **SMALL)
        cluster.create("stranger", **SMALL)
        cluster.filter(pod, "n0")
        before = held(cluster)
        answer = json.loads(await cluster.extender.bind(body))
        assert list(answer) == ["Error"]
        assert len(answer["Error"]) < 2000
        assert cluster.bound("stranger") == ""
        assert cluster.bound("train") == ("" if answer["Error"] else "n0")
        assert held(cluster) == before
        if answer["Error"]:
            assert [verb for verb, *_ in cluster.strict.requests if verb != "GET"] == []

    asyncio.run(ask())


async def test_the_uid_of_one_pod_with_the_name_of_another_binds_neither() -> None:
    """And the promise of the first one stays."""
    cluster = StrictCluster()
    pod, other = cluster.create("a", **SMALL), cluster.create("b", **SMALL)
    cluster.filter(pod, "n0")
    mixed = copy.deepcopy(other)
    mixed["metadata"]["uid"] = "uid-a"
    assert "UID uid-a is that of pod default/a, not of default/b" in await cluster.bind(mixed, "n0")
    assert cluster.strict.requests == []
    assert await cluster.bind(pod, "n0") == ""


@pytest.mark.parametrize(
    "names", [["n0"] * 5000, ["n0", "n1"] * 2000, ["x" * 253] * 3 + ["n0"], ["", "n0", ""]]
)
async def test_names_that_come_twice_are_one_node(names: list[str]) -> None:
    """And names that no Node has are missing from the cache."""
    cluster = StrictCluster()
    answer = cluster.filter(a_pod(**SMALL), *names)
    assert answer["NodeNames"] == ["n0"]
    answer = cluster.filter(a_pod("b", number="1", memory="999999"), *names)
    assert set(answer["FailedNodes"]) == set(names)


async def test_as_many_nodes_as_no_cluster_has_are_refused() -> None:
    """By name and as objects."""
    cluster = StrictCluster()
    many = [f"n{number}" for number in range(MAX_NODES + 1)]
    refused = f"{MAX_NODES + 1} Nodes; expected at most {MAX_NODES}"
    assert cluster.filter(a_pod(**SMALL), *many)["Error"] == refused
    items = [{"metadata": {"name": name}} for name in many]
    answer = cluster.filter(a_pod(**SMALL), NodeNames=None, Nodes={"items": items})
    assert answer["Error"] == refused
    assert cluster.filter(a_pod(**SMALL), *many[:-1])["NodeNames"] == ["n0"]


@pytest.mark.parametrize("depth", [10, 500, 100_000, 3_000_000])
async def test_deep_nesting_is_answered(depth: int) -> None:
    """In any part of the arguments."""
    cluster = StrictCluster()
    deep = b"[" * depth + b"]" * depth
    pod = written(a_pod(**SMALL))
    for body in (
        deep,
        b'{"Pod":' + deep + b',"NodeNames":["n0"]}',
        b'{"Pod":' + pod + b',"NodeNames":["n0"],"More":' + deep + b"}",
        b'{"Pod":' + pod + b',"NodeNames":' + deep + b"}",
        b'{"Pod":' + pod + b',"Nodes":{"items":' + deep + b"}}",
        b'{"Pod":' + pod[:-1] + b',"status":' + deep + b'},"NodeNames":["n0"]}',
    ):
        check_filter(cluster.extender.filter(body))
        assert json.loads(await cluster.extender.bind(body))["Error"].startswith("no ")


# -- what the watches show ------------------------------------------------------------------------

entries: Anything = st.one_of(
    anything,
    st.lists(
        st.builds(
            lambda number, changed: entry(number) | changed,
            st.integers(0, 3),
            st.dictionaries(
                st.sampled_from(["id", "uuid", "core", "memory", "number", "numa", "mig", "type"]),
                st.one_of(scalars, st.just(uuid(0, 0))),
                max_size=2,
            ),
        ),
        max_size=5,
    ),
)
configs: Anything = st.one_of(
    anything,
    st.fixed_dictionaries(
        {
            "deviceSplit": st.one_of(st.just(10), scalars),
            "memoryFactor": st.one_of(st.just(1), scalars),
            "memoryScaling": st.one_of(st.just(1), scalars),
        }
    ),
)
topologies: Anything = st.one_of(
    anything,
    st.lists(
        st.fixed_dictionaries(
            {
                "index": st.one_of(st.integers(-1, 5), scalars),
                "links": st.dictionaries(
                    st.sampled_from(["0", "1", "2", "9", "-1", "x", "9" * 50]),
                    st.lists(st.sampled_from([*range(25), *_NUMBERS]), max_size=3),
                ),
            }
        ),
        max_size=4,
    ),
)


@EXAMPLES
@hypothesis.given(
    register=entries,
    config=configs,
    topology=topologies,
    slots=amounts,
    mode=st.sampled_from(["none", "link", "link-strict", "numa"]),
    policy=st.sampled_from(["none", "binpack", "spread"]),
)
def test_any_node_is_fit_or_unfit_and_harms_no_other(
    register: Any, config: Any, topology: Any, slots: Any, mode: str, policy: str
) -> None:
    """Nonsense in one Node's annotations is that Node's reason and nothing else
    (vgpu-manager §12.3).
    """

    async def ask() -> None:
        cluster = StrictCluster(1)
        texts = {
            KEYS.node_register: json.dumps(register),
            KEYS.node_config: json.dumps(config),
            KEYS.node_topology: json.dumps(topology),
        }
        body = {
            "metadata": {"name": "bad", "annotations": texts},
            "status": {"allocatable": {KEYS.number: slots}},
        }
        with contextlib.suppress(ClusterError):  # the watch skips it
            cluster.extender.see_node(decode.node(written(body)))
        for pod in (a_pod("a", **SMALL), a_pod("b", **{**SMALL, "number": "2"})):
            pod["metadata"]["annotations"] = {
                KEYS.topology_mode: mode,
                KEYS.node_policy: policy,
                KEYS.device_policy: policy,
            }
            both = check_filter(
                cluster.extender.filter(written({"Pod": pod, "NodeNames": ["bad", "n0"]}))
            )
            assert both["Error"] == ""
            assert both["NodeNames"] or mode == "link-strict"
        cluster.extender.update_gauges()

    asyncio.run(ask())


@EXAMPLES
@hypothesis.given(pod=pods, text=st.one_of(words, st.text(max_size=200)), node=st.booleans())
def test_any_pod_of_the_watch_is_taken(pod: dict[str, Any], text: str, node: bool) -> None:
    """The claims of a pod are counted or recorded as unreadable. Nothing about it is kept after its
    end.
    """

    async def see() -> None:
        cluster = StrictCluster()
        before = held(cluster)
        shown = copy.deepcopy(pod)
        shown["metadata"]["annotations"] = {KEYS.pre_allocated: text, KEYS.real_allocated: text}
        if node:
            shown["spec"]["nodeName"] = "n0"
        try:
            decoded = decode.pod(written(shown))
        except ClusterError:
            return  # the watch skips it
        for _ in range(2):
            cluster.extender.see_pod(decoded)
        if not decoded.node:
            assert held(cluster) == before
        cluster.extender.forget_pod(decoded.uid)
        assert held(cluster) == before
        assert len(cluster.extender._unreadable) == 0

    asyncio.run(see())


def many_cards(mib: int) -> dict[str, str]:
    """The annotations of a Node; each ``mib`` gives others."""
    texts = node_texts([entry(card, memory=mib) for card in range(2)], {(0, 1): [1, 8]})
    return {**texts, "more": "x" * 1000}


@pytest.mark.looptime
async def test_memory_stays_bounded_by_what_there_is() -> None:
    """Hundreds of pods, UIDs, Nodes, annotations, demands and nonsense come and go."""
    cluster = StrictCluster(1)
    extender, book = cluster.extender, cluster.book

    def count() -> dict[str, int]:
        return {
            "nodes": len(book._nodes),
            "pods": len(book._node_of),
            "hardware": len(book._states),
            "states": sum(len(each.by_taken) for each in book._states.values()),
            "promises": len(extender._promises),
            "unreadable": len(extender._unreadable),
            "known pods": len(extender._known_pods._pods),
            "groups": len(extender._known_pods._groups),
            "names": len(extender.records._names),
            "resources": len(extender._resources),
        }

    before = count()
    for number in range(600):
        name, wanted = f"p{number}", a_pod(f"p{number}", number="1", memory=str(1 + number))
        wanted["metadata"]["annotations"] = {
            KEYS.include_type: f"a10,{number}",
            KEYS.node_policy: f"nonsense {number}",
        }
        cluster.filter(wanted)
        node = f"node-{number}"
        for memory in (1000 + number, 2000 + number):
            extender.see_node(
                Node(node, "u", many_cards(memory), {}, "", "", {}, {KEYS.number: "20"}, {}, "1")
            )
        bound = a_pod(f"b{number}", node=node if number % 2 else "nowhere", **SMALL)
        bound["metadata"]["annotations"] = {
            KEYS.pre_allocated: f"nonsense {number}"
            if number % 3
            else f"default[0_{uuid(0, 0)}_1_{number}]"
        }
        extender.see_pod(decode.pod(written(bound)))
        extender.forget_node(node)
        extender.forget_pod(f"uid-b{number}")
        extender.filter(written({"Pod": wanted, "NodeNames": [f"x{number}"], name: name}))
        extender.update_gauges()
    slots = 20
    assert count()["promises"] <= slots
    assert len(book._verdicts) <= 128
    assert len(extender._refused) <= 10_000
    assert len(extender.records._filter_calls) <= 5000
    assert len(cluster.journal.entries) <= 1000
    await asyncio.sleep(GRACE_SECONDS + 1)
    extender.expire_promises()
    after = count()
    assert after | {"states": 0} == before | {"states": 0}
    assert after["states"] <= 16_384
    text = extender._metrics.text("")[0].decode()
    assert len(text.splitlines()) < 200
