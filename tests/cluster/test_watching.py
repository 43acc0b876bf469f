"""Our pods, our Node and the ConfigMap, watched over HTTP from the simulated API server."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tests.cluster.scripted import running, until
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.config_map import ConfigMapWatch
from vgpu_agent.cluster.watching import NodeWatch, PodWatch
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.pods import PodCache
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer

NAME, KEY = "volcano-vgpu-device-config", "device-config.yaml"
_NODE = "volcano.sh/vgpu-node"
_SELECTOR = "spec.nodeName=n1,status.phase!=Succeeded,status.phase!=Failed"


def _pod(name: str, node: str = "n1") -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": node, "containers": [{"name": "main"}]},
    }


@pytest.fixture
def book() -> PodCache:
    """An empty one."""
    return PodCache()


@pytest.fixture
def pods(client: ApiClient, book: PodCache, journal: Journal) -> PodWatch:
    """Return the watch of node n1's pods."""
    return PodWatch(client, "n1", book, journal=journal)


@pytest.fixture
def node(client: ApiClient, journal: Journal) -> NodeWatch:
    """Return the watch of node n1."""
    return NodeWatch(client, "n1", journal=journal)


@pytest.fixture
def config_map(client: ApiClient, journal: Journal) -> ConfigMapWatch:
    """With the contract's names."""
    return ConfigMapWatch(
        client,
        NAME,
        KEY,
        namespaces=("kube-system", "volcano-system"),
        journal=journal,
    )


def _names(book: PodCache) -> list[str]:
    return [pod.name for pod in book.pods]


async def test_the_book_follows_the_pods_of_this_node_in_the_order_of_their_bindings(
    server: ApiServer, pods: PodWatch, book: PodCache
) -> None:
    """Others are never asked for."""
    server.objects.create("pods", _pod("there"))
    server.objects.create("pods", _pod("elsewhere", "n2"))
    for name in ("first", "second"):
        server.objects.create("pods", {"metadata": {"name": name}, "spec": {}})
    async with running(pods.run):
        await until(book.synced.is_set)
        for name in ("second", "first"):
            server.objects.bind(
                name,
                "default",
                {"metadata": {"annotations": {_NODE: name}}, "target": {"name": "n1"}},
            )
        await until(lambda: len(book.pods) == 3)
    assert _names(book) == ["there", "second", "first"]
    assert book.pods[1].annotations == {_NODE: "second"}
    assert {request.query["fieldSelector"] for request in server.requests} == {_SELECTOR}


async def test_a_pod_that_ended_leaves_the_watch_and_is_ended_in_the_book_a_while(
    server: ApiServer, pods: PodWatch, book: PodCache
) -> None:
    """Its annotations are still to be written. Its event shows it as it was before it ended."""
    for name in ("short", "long", "deleted"):
        server.objects.create("pods", _pod(name))
    server.objects.create("pods", _pod("before"))
    server.objects.set_status("pods", "before", {"phase": "Succeeded"}, "default")
    async with running(pods.run):
        await until(lambda: len(book.pods) == 3)
        server.objects.set_status("pods", "short", {"phase": "Failed"}, "default")
        server.objects.delete("pods", "deleted", "default")
        server.objects.delete("pods", "deleted", "default", grace_seconds=0)
        await until(lambda: len(book.pods) == 2 and any(pod.ended for pod in book.pods))
        server.objects.create("pods", _pod("last"))
        await until(lambda: "last" in _names(book))
    assert {pod.name: pod.ended for pod in book.pods} == {
        "short": True,
        "long": False,
        "last": False,
    }
    assert book.get(book.pods[0].uid) is not None


async def test_pods_that_went_while_the_api_server_was_away_are_gone_from_the_book(
    server: ApiServer, pods: PodWatch, book: PodCache
) -> None:
    """Its history was compacted meanwhile, so only a list can tell."""
    for name in ("a", "b"):
        server.objects.create("pods", _pod(name))
    async with running(pods.run):
        await until(lambda: len(book.pods) == 2)
        await server.down()
        server.objects.delete("pods", "a", "default", grace_seconds=0)
        server.objects.create("pods", _pod("c"))
        server.objects.compact()
        assert _names(book) == ["a", "b"]
        await server.up()
        await until(lambda: _names(book) == ["b", "c"])


async def test_a_reset_connection_costs_no_list(
    server: ApiServer, pods: PodWatch, book: PodCache
) -> None:
    """The watch goes on from where it was, and what happened in between comes."""
    async with running(pods.run):
        await until(
            lambda: (
                pods.status.watches == 1
                and any(request.verb == "watch" for request in server.requests)
            )
        )
        server.cut()
        server.objects.create("pods", _pod("a"))
        await until(lambda: _names(book) == ["a"])
    assert pods.status.lists == 1
    assert pods.status.watches >= 2


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.CLOSE,
        FaultKind.ERROR_EVENT,
        FaultKind.RESET,
        FaultKind.HTML,
        FaultKind.GARBAGE,
        FaultKind.TRUNCATED,
    ],
)
async def test_whatever_happens_to_a_watch_the_book_is_right_afterwards(
    server: ApiServer, pods: PodWatch, book: PodCache, kind: FaultKind
) -> None:
    """Three times in a row."""
    server.faults = [Fault(kind, verb="watch", times=3)]
    async with running(pods.run):
        await until(book.synced.is_set)
        server.objects.create("pods", _pod("a"))
        await until(lambda: server.faults[0].times == 0 and _names(book) == ["a"])


async def test_one_pod_can_be_fetched(server: ApiServer, pods: PodWatch, book: PodCache) -> None:
    """By one GET; a pod that does not exist is None, an API server that is away is an error,
    and the book is left alone.
    """
    server.objects.create("pods", _pod("a"))
    found = await pods.fetch("default", "a")
    assert found is not None
    assert (found.name, found.node) == ("a", "n1")
    assert await pods.fetch("default", "b") is None
    assert [request.verb for request in server.requests] == ["get", "get"]
    assert book.pods == ()
    await server.down()
    with pytest.raises(ClusterError, match="refused"):
        await pods.fetch("default", "a")


async def test_a_node_that_is_deleted_and_created_again_is_noticed(
    server: ApiServer, node: NodeWatch
) -> None:
    """The value is None in between, and the new Node has another UID."""
    server.objects.create("nodes", {"metadata": {"name": "n1", "uid": "first"}})
    server.objects.create("nodes", {"metadata": {"name": "n2", "uid": "other"}})
    async with running(node.run):
        await until(lambda: node.node.value and node.node.value.uid == "first")
        server.objects.delete("nodes", "n1")
        await until(lambda: node.node.value is None)
        server.objects.create("nodes", {"metadata": {"name": "n1", "uid": "second"}})
        await until(lambda: node.node.value and node.node.value.uid == "second")


async def test_each_annotation_has_the_time_at_which_its_value_was_first_seen(
    server: ApiServer, client: ApiClient, journal: Journal
) -> None:
    """A lock that is taken anew within a second has the text of the one before,
    and is another lock.
    """
    now = 100.0
    watch = NodeWatch(client, "n1", journal=journal, clock=lambda: now)

    def annotate(**annotations: str | None) -> None:
        server.objects.patch("nodes", "n1", {"metadata": {"annotations": annotations}})

    def seen() -> dict[str, float]:
        return dict(watch.node.value.seen_at) if watch.node.value else {}

    server.objects.create(
        "nodes", {"metadata": {"name": "n1", "annotations": {"lock": "10:00:00"}}}
    )
    async with running(watch.run):
        await until(lambda: seen() == {"lock": 100.0})
        now = 101.0
        annotate(other="x")
        await until(lambda: seen() == {"lock": 100.0, "other": 101.0})
        now = 102.0
        annotate(lock=None)
        annotate(lock="10:00:00", other="y")
        await until(lambda: seen() == {"lock": 102.0, "other": 102.0})


async def test_a_node_that_does_not_exist_yet_is_waited_for(
    server: ApiServer, node: NodeWatch
) -> None:
    """It is known that there is none, and it is seen when it comes."""
    async with running(node.run):
        await until(node.synced.is_set)
        assert node.node.value is None
        server.objects.create("nodes", {"metadata": {"name": "n1", "uid": "u"}})
        await until(lambda: node.node.value is not None)


async def test_nothing_changes_and_nothing_is_asked(
    server: ApiServer, node: NodeWatch, pods: PodWatch, book: PodCache
) -> None:
    """Two lists and two watches, and then silence. None of them is a write."""
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    async with running(node.run), running(pods.run):
        await until(lambda: len(server.requests) == 4)
        await until(book.synced.is_set)
    assert sorted((request.verb, request.resource) for request in server.requests) == [
        ("list", "nodes"),
        ("list", "pods"),
        ("watch", "nodes"),
        ("watch", "pods"),
    ]


async def test_objects_that_have_not_changed_for_long_are_watched(
    server: ApiServer, config_map: ConfigMapWatch, node: NodeWatch
) -> None:
    """The API server refuses a watch from a version before those that it remembers, and after its
    start it remembers none. Each refusal would lead to another question, for ever.
    """
    server.objects.create("configmaps", _config("kube-system", "first"))
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    server.objects.create("nodes", {"metadata": {"name": "other"}})
    server.objects.compact()
    async with running(config_map.run), running(node.run):
        await until(lambda: config_map.text.value == "first" and node.node.value is not None)
        await until(lambda: sum(request.verb == "watch" for request in server.requests) >= 2)
        server.objects.patch("configmaps", NAME, {"data": {KEY: "changed"}}, "kube-system")
        await until(lambda: config_map.text.value == "changed")
    asked = collections.Counter(
        (request.verb, request.resource, request.namespace) for request in server.requests
    )
    assert set(asked.values()) == {1}


def _config(namespace: str, text: str, key: str = KEY) -> dict[str, Any]:
    return {"metadata": {"name": NAME, "namespace": namespace}, "data": {key: text}}


async def test_the_config_map_of_the_first_namespace_wins_whenever_it_comes(
    server: ApiServer, config_map: ConfigMapWatch
) -> None:
    """It is followed through creation, change and deletion; afterwards the second counts again.
    volcano-vgpu:D23
    """
    async with running(config_map.run):
        await until(config_map.synced.is_set)
        assert config_map.text.value is None
        server.objects.create("configmaps", _config("volcano-system", "second"))
        await until(lambda: config_map.text.value == "second")
        server.objects.create("configmaps", _config("kube-system", "first"))
        await until(lambda: config_map.text.value == "first")
        server.objects.patch("configmaps", NAME, {"data": {KEY: "changed"}}, "kube-system")
        await until(lambda: config_map.text.value == "changed")
        assert config_map.namespace == "kube-system"
        server.objects.patch("configmaps", NAME, {"data": {KEY: "newer second"}}, "volcano-system")
        server.objects.delete("configmaps", NAME, "kube-system")
        await until(lambda: config_map.text.value == "newer second")


async def test_a_namespace_of_the_operators_own_is_looked_at_first(
    server: ApiServer, client: ApiClient, journal: Journal
) -> None:
    """volcano-vgpu-device-plugin's DEVICE_CONFIG_NAMESPACE;
    the two known ones come after it, as there.
    """
    config_map = ConfigMapWatch(
        client, NAME, KEY, namespaces=("volcano", "kube-system"), journal=journal
    )
    server.objects.create("configmaps", _config("kube-system", "second"))
    async with running(config_map.run):
        await until(lambda: config_map.text.value == "second")
        server.objects.create("configmaps", _config("volcano", "first"))
        await until(lambda: config_map.text.value == "first")
    assert config_map.namespace == "volcano"


async def test_config_maps_are_listed_and_watched_by_name(
    server: ApiServer, config_map: ConfigMapWatch
) -> None:
    """The role allows no more; and where the first namespace has it,
    the second is not watched on.
    """
    server.objects.create("configmaps", _config("kube-system", "first"))
    server.objects.create("configmaps", _config("volcano-system", "second"))
    seen: list[str | None] = []
    async with running(config_map.run):
        await until(config_map.synced.is_set)
        seen.append(config_map.text.value)
    assert seen == ["first"]
    assert {request.verb for request in server.requests} <= {"list", "watch"}
    assert all(request.namespace for request in server.requests)
    assert {request.query["fieldSelector"] for request in server.requests} == {
        f"metadata.name={NAME}"
    }


async def test_a_config_map_without_the_key_is_said_and_is_not_taken_for_none(
    server: ApiServer, config_map: ConfigMapWatch, journal: Journal
) -> None:
    """A typing error in the key must not look like an absent ConfigMap,
    which puts the agent's own settings in force.
    """
    server.objects.create("configmaps", _config("kube-system", "x", key="device-config.yml"))
    async with running(config_map.run):
        await until(config_map.synced.is_set)
    assert config_map.text.value == ""
    assert "kube-system/volcano-vgpu-device-config has no key" in journal.entries[-1].facts["error"]


@pytest.mark.parametrize(
    ("forbidden", "present", "text"),
    [
        ("kube-system", "volcano-system", "second"),
        ("volcano-system", "kube-system", "second"),
        ("volcano-system", "default", None),
        ("", "default", None),
    ],
)
async def test_a_namespace_that_may_not_be_read_is_passed_over(
    server: ApiServer, config_map: ConfigMapWatch, forbidden: str, present: str, text: str | None
) -> None:
    """Its role may be missing where it is not used, and the other object is known at once."""
    server.faults = [
        Fault(
            FaultKind.STATUS,
            resource="configmaps",
            namespace=forbidden,
            code=403,
            reason="Forbidden",
        )
    ]
    server.objects.create("configmaps", _config(present, "second"))
    async with running(config_map.run):
        await until(config_map.synced.is_set)
    assert config_map.text.value == text


async def test_it_is_said_where_the_config_map_is_and_where_it_may_be_unseen(
    server: ApiServer, config_map: ConfigMapWatch, journal: Journal
) -> None:
    """A missing role is no fault as long as there is a ConfigMap where it may be read. Else it may
    be the reason, and is reported.
    """
    server.faults = [
        Fault(
            FaultKind.STATUS,
            resource="configmaps",
            namespace="volcano-system",
            code=403,
            reason="Forbidden",
        )
    ]
    server.objects.create("configmaps", _config("kube-system", "first"))
    async with running(config_map.run):
        await until(lambda: config_map.text.value == "first")
        server.objects.delete("configmaps", NAME, "kube-system")
        await until(
            lambda: any(entry.event == "cluster.no_config_map" for entry in journal.entries)
        )
    said = [entry for entry in journal.entries if entry.event.startswith("cluster.")]
    assert [entry.event for entry in said] == ["cluster.config_map", "cluster.no_config_map"]
    assert said[0].facts["config_map"] == f"kube-system/{NAME}"
    assert said[1].facts["namespaces"] == ["kube-system"]
    assert said[1].facts["forbidden_namespaces"] == ["volcano-system"]
    assert "components/volcano" in str(said[1].facts["remedy"])


async def test_nothing_is_known_of_config_maps_while_the_api_server_is_away(
    server: ApiServer, config_map: ConfigMapWatch
) -> None:
    """An outage is not the absence of a ConfigMap."""
    server.objects.create("configmaps", _config("volcano-system", "second"))
    server.faults = [Fault(FaultKind.HTML, times=4)]
    async with running(config_map.run):
        await until(lambda: server.faults[0].times == 0)
        assert not config_map.synced.is_set()
        await until(config_map.synced.is_set)
    assert config_map.text.value == "second"
