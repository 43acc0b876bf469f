"""The page for a browser: its content, and what is sent when the node changes."""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import vgpu_agent
from tests.patience import quickest_call
from tests.web.conftest import FALLEN_OFF, IDS, NOW, VGPU, a_gpu, a_pod, wants_vgpus
from vgpu_agent.journal import Entry
from vgpu_agent.model import (
    Cause,
    ContainerUsage,
    GpuUsage,
    Grant,
    GrantState,
    Health,
    Owner,
    Remedy,
    Share,
)
from vgpu_agent.status import AgentStatus, Problem, ProblemKind
from vgpu_agent.web.dashboard import node as content
from vgpu_agent.web.dashboard import stream, timeline
from vgpu_agent.web.dashboard.stream import Dashboard

ATTACK = "<img src=x onerror=alert(1)>\"'&\0main\0</li><script>alert(2)</script>"
_VOID = frozenset({"input", "link", "meta"})
# the agent's own among the words of docs/architecture.md; regions are HAMi-core's
_JARGON = re.compile(
    r"\b(ledger|journal|grants?|claims?|cordon\w*|carrier|token|inventory|drift|provision|"
    r"edits|proven|turns?|Allocate|famil(?:y|ies)|snapshot|reconcil\w*)\b",
    re.IGNORECASE,
)


class Element:
    """An element of a parsed document. Its children are elements and texts."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Element | str] = []

    def walk(self) -> list[Element]:
        """This element and all inside it."""
        inner = [each for child in self.children if isinstance(child, Element) for each in [child]]
        return [self, *(each for child in inner for each in child.walk())]

    def by_id(self) -> dict[str | None, Element]:
        """All elements with an id."""
        return {each.attributes["id"]: each for each in self.walk() if "id" in each.attributes}

    @property
    def text(self) -> str:
        """The text inside."""
        return " ".join(child if isinstance(child, str) else child.text for child in self.children)

    def __repr__(self) -> str:
        return f"<{self.tag} {self.attributes}>{self.children}"


class Parser(html.parser.HTMLParser):
    """Builds elements, and fails where tags do not match or an id comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("root", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag, self._open

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def close(self) -> None:
        super().close()
        assert self._open == [self.root], self._open
        ids = [each.attributes["id"] for each in self.root.walk() if "id" in each.attributes]
        assert len(ids) == len(set(ids)), ids


def parsed(text: str) -> Element:
    """Return the document's elements."""
    parser = Parser()
    parser.feed(text)
    parser.close()
    return parser.root


class Page:
    """A page of a node that a test changes, and its clock."""

    def __init__(self, status: AgentStatus) -> None:
        self.status, self.clock, self.now = status, 0.0, NOW
        self.dashboard = Dashboard(lambda: content.parts(self.status, self.now), self._time)
        self.dashboard.refresh()

    def _time(self) -> float:
        return self.clock

    def later(self) -> None:
        """Let the next rendering be due, and render."""
        self.clock += stream.REFRESH_SECONDS
        self.now += stream.REFRESH_SECONDS
        self.dashboard.refresh()

    def document(self, searched: str = "") -> str:
        """The whole document."""
        found = content.answer(self.status, self.now, searched) if searched else ""
        return content.document(self.dashboard, self.now, searched, found)

    def changes(self, since: str) -> dict[str, Any]:
        """The changes in the message since a version."""
        message = self.dashboard.message(since)
        found: dict[str, Any] = json.loads(message.partition(b"data: ")[2])["changes"]
        return found


def applied(document: str, changes: dict[str, Any]) -> Element:
    """Do what ``dashboard.js`` does with a message."""
    root = parsed(document)
    for part, items in changes.get("order", {}).items():
        elements = root.by_id()
        elements[part].children = [
            elements.get(item) or Element("li", {"id": item}) for item in items
        ]
    for part, inner in changes.get("set", {}).items():
        element = root.by_id()[part]
        if element.tag == "rect":
            element.attributes["width"] = inner
        else:
            element.children = parsed(inner).children
    return root


@pytest.fixture
def full_node(volcano_node: AgentStatus) -> AgentStatus:
    """Eight GPUs and 80 pods with a share of one and a name of ordinary length."""
    names = [f"research/transformer-finetune-worker-{number}" for number in range(80)]
    volcano_node.inventory = msgspec.structs.replace(
        volcano_node.inventory, gpus=tuple(map(a_gpu, range(8))), failures=()
    )
    volcano_node.usage = tuple(
        GpuUsage(f"GPU-{index}", 1000 * index, 81920, 5 * index, 41, 250.5) for index in range(8)
    )
    owners = [Owner("main", f"uid-{name}", *name.split("/")) for name in names]
    volcano_node.ledger.grants = tuple(
        Grant(
            number,
            "volcano-vgpu",
            VGPU,
            (f"a-{number}",),
            (Share(f"GPU-{number % 8}", 4096, 10),),
            GrantState.IDENTIFIED,
            owner,
            NOW - 50,
        )
        for number, owner in enumerate(owners)
    )
    volcano_node.containers = tuple(
        ContainerUsage(
            owner.namespace, owner.pod, "main", 0, f"GPU-{number % 8}", 1 << 30, 4 << 30, 7
        )
        for number, owner in enumerate(owners)
    )
    volcano_node.cluster.pods = tuple(
        a_pod(
            owner.pod,
            wants_vgpus("main", started=True),
            namespace="research",
            uid=owner.pod_uid,
            phase="Running",
        )
        for owner in owners
    )
    volcano_node.events = tuple(
        Entry(NOW - 3000 + number, "start.bound", {"pod": name, "container": "main"})
        for number, name in enumerate(names)
    )
    return volcano_node


def lose(status: AgentStatus, index: int) -> None:
    """The GPU is gone, as `gpu` reports it."""
    health = Health(
        ok=False,
        reason=FALLEN_OFF,
        since=NOW,
        causes=(Cause("XID 79", FALLEN_OFF, Remedy.REBOOT_OR_REPLACE, NOW),),
        remedy=Remedy.REBOOT_OR_REPLACE,
        answers=False,
    )
    gpus = list(status.inventory.gpus)
    gpus[index] = msgspec.structs.replace(gpus[index], present=False, health=health)
    status.inventory = msgspec.structs.replace(status.inventory, gpus=tuple(gpus))
    event = Entry(
        NOW + 1, "gpu.lost", {"gpu": f"GPU-{index}", "index": index, "reason": FALLEN_OFF}
    )
    status.events = (*status.events, event)


def use_more(status: AgentStatus) -> None:
    """Every figure of every GPU and container changes."""
    status.usage = tuple(
        GpuUsage(
            used.uuid,
            (used.memory_used_mib or 0) + 3000,
            81920,
            (used.utilisation_percent or 0) + 11,
            63,
            (used.power_watts or 0) + 77,
        )
        for used in status.usage
    )
    status.containers = tuple(
        msgspec.structs.replace(used, used_bytes=used.used_bytes + (300 << 20), cores_percent=93)
        for used in status.containers
    )


@pytest.mark.parametrize("name", ["node", "volcano_node", "mixed_node", "full_node"])
def test_a_node_is_a_well_formed_document(name: str, request: pytest.FixtureRequest) -> None:
    """Every element is closed, every id is unique, and each GPU has a card, without any script."""
    status: AgentStatus = request.getfixturevalue(name)
    root = parsed(Page(status).document())
    cards = root.by_id()["gpus"].children
    assert len(cards) == len(status.inventory.gpus)
    assert all("Memory" in card.text for card in cards if isinstance(card, Element))


@pytest.mark.parametrize("name", ["node", "volcano_node", "mixed_node", "full_node"])
def test_no_word_of_ours_is_on_the_page(name: str, request: pytest.FixtureRequest) -> None:
    """It is read by people who know Kubernetes and GPUs."""
    status: AgentStatus = request.getfixturevalue(name)
    status.binding.file_problems, status.ledger.unknown_ids = (), ()
    for searched in ("", "ml/served", "ml/refused", "ml/never"):
        text = re.sub(r"\S*[-/]\S*", "", parsed(Page(status).document(searched)).text)
        assert _JARGON.findall(text) == [], text


def test_without_scripts_the_page_reloads_itself(node: AgentStatus) -> None:
    """The browser of a jump host may have none. With scripts, a reload would lose the place."""
    root = parsed(Page(node).document())
    (hidden,) = [each for each in root.walk() if each.tag == "noscript"]
    assert [each.attributes for each in hidden.walk()[1:]] == [
        {"http-equiv": "refresh", "content": "10"}
    ]


def test_nothing_comes_from_elsewhere(full_node: AgentStatus) -> None:
    """A node has no way to the internet, and a page about it must not call out."""
    folder = Path(content.__file__).parent
    texts = [Page(full_node).document()]
    texts += [(folder / name).read_text() for name in ("dashboard.css", "dashboard.js")]
    for text in texts:
        assert not re.search(r"//[a-z]|url\(|@import|\bimport\b", text, re.IGNORECASE), text
    assert sum(len(text.encode()) for text in texts) <= 100 * 1024


def test_foreign_text_cannot_become_markup(volcano_node: AgentStatus) -> None:
    """Names, reasons, annotations and events come from elsewhere. On the page they are text."""
    status = volcano_node
    before = {each.tag for each in parsed(Page(status).document("ml/served")).walk()}
    owner = Owner(ATTACK, "uid-served", ATTACK, ATTACK)
    grant = msgspec.structs.replace(status.ledger.grants[0], owner=owner)
    bad = msgspec.structs.replace(
        status.inventory.gpus[1], name=ATTACK, health=Health(ok=False, reason=ATTACK, since=NOW)
    )
    status.inventory = msgspec.structs.replace(
        status.inventory,
        gpus=(status.inventory.gpus[0], bad),
        driver_version=ATTACK,
        failures=(ATTACK,),
    )
    status.ledger.grants = (grant,)
    status.node = status.version = ATTACK
    status.not_ready = (Problem(ProblemKind.RESOURCE, ATTACK, ATTACK, ATTACK),)
    status.plugins = (msgspec.structs.replace(status.plugins[0], resource=ATTACK),)
    pod = a_pod(ATTACK, wants_vgpus(ATTACK), namespace=ATTACK)
    refusal = status.binding.refusals[0]
    status.binding.refusals = (
        msgspec.structs.replace(refusal, pod=pod, container=ATTACK, reason=ATTACK, advice=ATTACK),
    )
    facts = dict.fromkeys(
        ("gpu", "reason", "pod", "container", "resource", "name", "meaning", "error", "call"),
        ATTACK,
    )
    status.events = tuple(
        Entry(NOW - 1, event, {**facts, "devices": [ATTACK]}) for event in timeline._SENTENCES
    )
    for searched in ("", ATTACK, "ml/served"):
        root = parsed(Page(status).document(searched))
        tags = {each.tag for each in root.walk()}
        assert tags <= before
        assert [each.attributes for each in root.walk() if each.tag == "script"] == [
            {"src": "dashboard.js", "defer": None}
        ]
        assert not any(name.startswith("on") for each in root.walk() for name in each.attributes)
        links = [each.attributes["href"] or "" for each in root.walk() if each.tag == "a"]
        assert all(re.fullmatch(r"[?/\w=%.-]+", link) for link in links), links
    assert ATTACK.replace("\0", " ") in parsed(Page(status).document()).text


def test_nothing_is_sent_while_nothing_changes(full_node: AgentStatus) -> None:
    """Ages and countdowns run in the browser."""
    full_node.inventory = msgspec.structs.replace(
        full_node.inventory,
        gpus=(
            a_gpu(
                0,
                health=Health(ok=False, reason=FALLEN_OFF, since=NOW - 9, offered_at=NOW + 600),
            ),
            *full_node.inventory.gpus[1:],
        ),
    )
    page = Page(full_node)
    version = page.dashboard.version
    page.later()
    assert page.dashboard.message(version) == b""
    assert page.dashboard.version == version


def test_one_figure_is_sent_alone(full_node: AgentStatus) -> None:
    """The card around it is not, nor other cards."""
    page = Page(full_node)
    version = page.dashboard.version
    first, *others = full_node.usage
    full_node.usage = (msgspec.structs.replace(first, temperature_celsius=77), *others)
    page.later()
    assert page.changes(version) == {"set": {"g0w": "77 °C · 250 W"}}
    assert len(page.dashboard.message(version)) < 150


def _start_pod(status: AgentStatus) -> None:
    grant = msgspec.structs.replace(
        status.ledger.grants[0], number=900, owner=Owner("main", "uid-new", "ml", "new")
    )
    status.ledger.grants = (*status.ledger.grants, grant)
    event = Entry(NOW + 1, "start.bound", {"pod": "ml/new", "devices": ["GPU-0 4096 MiB 10 %"]})
    status.events = (*status.events, event)


def _end_pod(status: AgentStatus) -> None:
    status.ledger.grants = status.ledger.grants[1:]


def _refuse(status: AgentStatus) -> None:
    status.binding.refusals = tuple(
        msgspec.structs.replace(refusal, container=f"main-{number}")
        for refusal in status.binding.refusals
        for number in range(3)
    )


def _heal(status: AgentStatus) -> None:
    status.inventory = msgspec.structs.replace(status.inventory, gpus=tuple(map(a_gpu, range(8))))


@pytest.mark.parametrize(
    "change",
    [use_more, lambda status: lose(status, 3), _start_pod, _end_pod, _refuse, _heal],
    ids=["usage", "a lost GPU", "a pod starts", "a pod ends", "refusals", "nothing"],
)
def test_one_change_is_small_and_brings_the_page_up_to_date(
    full_node: AgentStatus, change: Callable[[AgentStatus], None]
) -> None:
    """At most 5 KiB, even when all figures of eight GPUs and 80 containers change at once."""
    page = Page(full_node)
    document, version = page.document(), page.dashboard.version
    change(full_node)
    page.later()
    message = page.dashboard.message(version)
    assert len(message) <= 5 * 1024
    found = page.changes(version) if message else {}
    after, expected = applied(document, found).by_id(), parsed(page.document()).by_id()
    for part in ("head", "main"):
        assert repr(after[part]) == repr(expected[part])


def test_a_viewer_that_missed_versions_gets_the_sum_of_their_changes(
    full_node: AgentStatus,
) -> None:
    """One was busy while a pod started, a GPU was lost, all figures changed and a pod ended."""
    page = Page(full_node)
    document, version = page.document(), page.dashboard.version
    for change in (_start_pod, lambda status: lose(status, 3), use_more, _end_pod):
        change(full_node)
        page.later()
    after = applied(document, page.changes(version)).by_id()
    assert repr(after["main"]) == repr(parsed(page.document()).by_id()["main"])


@pytest.mark.parametrize("version", ["", "00000000-1", "nonsense", "-", "\0", "1-" + "9" * 5000])
def test_a_version_of_another_process_means_all_of_the_page(
    node: AgentStatus, version: str
) -> None:
    """The agent was restarted under the viewer, or the viewer sends nonsense."""
    page = Page(node)
    assert set(page.changes(version)["set"]) == {"head", "main"}
    own = page.dashboard.version.partition("-")[0]
    assert set(page.changes(f"{own}-x")["set"]) == {"head", "main"}
    assert set(page.changes(f"{own}-{'9' * 5000}")["set"]) == {"head", "main"}


def test_invented_versions_cost_no_computing(full_node: AgentStatus) -> None:
    """Whoever opens streams in a loop gets what is kept, and that is right for every version."""
    page = Page(full_node)
    for number in range(40):
        first, *others = full_node.usage
        full_node.usage = (msgspec.structs.replace(first, temperature_celsius=number), *others)
        page.later()
    own = page.dashboard.version.partition("-")[0]
    sizes = [len(page.dashboard.message(f"{own}-{number}")) for number in range(1, 40)]
    assert sizes[:16] == [sizes[0]] * 16
    assert sizes[0] < 200
    assert min(sizes[16:]) > 10_000
    assert len(page.dashboard._changes) <= 17
    whole = page.dashboard._changes[0]
    page.dashboard.message(f"{own}-20")
    assert page.dashboard._changes[0] is whole
    assert page.dashboard.message(f"{own}-9999") == b""


def test_the_page_is_rendered_once_for_all_viewers(full_node: AgentStatus) -> None:
    """Within the interval, each gets what is there."""
    rendered = 0

    def render() -> Any:
        nonlocal rendered
        rendered += 1
        return content.parts(full_node, NOW)

    clock = [0.0]
    dashboard = Dashboard(render, lambda: clock[0])
    for _ in range(5):
        dashboard.refresh()
    assert (rendered, dashboard.due_in) == (1, stream.REFRESH_SECONDS)
    clock[0] += stream.REFRESH_SECONDS
    dashboard.refresh()
    assert rendered == 2


def test_a_rendering_takes_a_small_part_of_the_interval(full_node: AgentStatus) -> None:
    """A rendering with the differences, and messages to five viewers: well below 1 % of a core."""
    page = Page(full_node)

    def again() -> None:
        version = page.dashboard.version
        use_more(full_node)
        page.later()
        for _ in range(5):
            page.dashboard.message(version)

    assert quickest_call(again, within_seconds=0.02) < 0.02


def test_an_ill_gpu_says_since_when_what_helps_and_when_it_is_offered_again(
    node: AgentStatus,
) -> None:
    """The moments are elements, which the script turns into ages and a countdown."""
    card = parsed(Page(node).document()).by_id()["g1"]
    assert FALLEN_OFF in card.text
    assert "drain the node and reboot it" in card.text
    assert "It does not answer." in card.text
    times = {
        each.attributes["class"]: each.attributes["datetime"]
        for each in card.walk()
        if each.tag == "time"
    }
    assert times == {"since": "2027-01-15T07:59:30Z", "until": "2027-01-15T08:00:30Z"}


def test_a_card_compares_what_is_given_with_what_is_used(full_node: AgentStatus) -> None:
    """Ten pods with 4 GiB and 10 % each on a GPU of 80 GiB that has 2 GiB and a tenth in use."""
    found = parsed(Page(full_node).document()).by_id()
    assert found["g2mt"].text == "2.0 GiB of 80.0 GiB"
    widths = [found[part].attributes["width"] for part in ("g2mbg", "g2mbu", "g2cbg", "g2cbu")]
    assert widths == ["50", "2", "100", "10"]
    assert [found[part].text for part in ("g2mg", "g2ct", "g2cg")] == ["40.0 GiB", "10 %", "100 %"]
    assert found["g2w"].text == "41 °C · 250 W"


def test_a_simulated_node_says_so(node: AgentStatus) -> None:
    """Even where the settings do not know it. A real one does not."""
    node.simulated = False
    assert "SIMULATED" not in Page(node).document()
    node.inventory = msgspec.structs.replace(node.inventory, simulated=True)
    assert "SIMULATED" in Page(node).document()


def test_an_empty_node_says_what_there_is_not() -> None:
    """A fresh agent on a node without GPUs."""
    root = parsed(Page(AgentStatus(node="node-b", version="0.1.0")).document())
    assert root.by_id()["gpus"].children == []
    assert "this node shows no GPU" in root.text
    assert "no problems" in root.by_id()["head"].text


@pytest.mark.parametrize(
    ("searched", "sentence"),
    [
        ("ml/served", "4096 MiB and 30 % of the cores of GPU 0"),
        ("SERVED", "4096 MiB and 30 % of the cores of GPU 0"),
        ("ml/refused", "no GPU has 4096 MiB left"),
        ("ml/", "3 pods match."),
        ("other/never", "Nothing is known of a pod other/never"),
        ("no such pod", "No pod on this node that asks for a GPU matches no such pod"),
        ("x" * 5000, "No pod on this node that asks for a GPU matches xxx"),
    ],
)
def test_a_search_finds_a_pod_and_says_why_it_is_there(
    volcano_node: AgentStatus, searched: str, sentence: str
) -> None:
    """By its whole name, also if it is elsewhere, or by a part of it."""
    answer = parsed(content.answer(volcano_node, NOW, searched)).text
    assert sentence in re.sub(r" +", " ", answer)
    assert len(answer) < 5000


def test_a_pod_of_many_events_shows_them_in_plain_words(volcano_node: AgentStatus) -> None:
    """Those that only developers understand are left out."""
    volcano_node.events = (
        *volcano_node.events,
        Entry(NOW - 4, "start.bound", {"pod": "ml/served", "devices": [f"GPU-0 {IDS}"]}),
    )
    answer = content.answer(volcano_node, NOW, "ml/served")
    assert "ml/served starts with" in parsed(answer).text
    assert "pods.written" not in answer


def test_the_last_hour_is_told_newest_first_and_bounded() -> None:
    """Older events, and more than fit, are left out."""
    entries = [
        Entry(NOW - 4000 + 10 * number, "gpu.recovered", {"gpu": "GPU-1"}) for number in range(400)
    ]
    told = timeline.latest(entries, NOW, {"GPU-1": 1})
    assert len(told) == timeline.SHOWN_EVENTS
    assert [event.at for event in told] == sorted((event.at for event in told), reverse=True)
    assert told[0].sentence == "GPU 1 is healthy again"
    assert len(timeline.latest(entries[:60], NOW, {})) == 20


def test_a_pod_without_a_share_is_not_said_to_have_one() -> None:
    """Where a share is decided at the start, the kubelet's records name the container before that,
    and the start may be refused.
    """
    facts: dict[str, object] = {"pod": "ml/a", "container": "main", "devices": []}
    assert timeline.told(Entry(NOW, "ledger.named", facts), {}) is None
    facts["devices"] = ["GPU-1 4096 MiB 10 %"]
    named = timeline.told(Entry(NOW, "ledger.named", facts), {"GPU-1": 1})
    assert named is not None
    assert named.sentence == "ml/a, container main has 4096 MiB 10 % of GPU 1"


def test_events_of_one_moment_have_ids_of_their_own() -> None:
    """Ids of elements are unique, and stay while others come."""
    entries = [Entry(NOW, "gpu.recovered", {"index": index}) for index in range(3)]
    assert len({event.part for event in timeline.latest(entries, NOW, {})}) == 3
    before = {event.sentence: event.part for event in timeline.latest(entries[:2], NOW, {})}
    after = {event.sentence: event.part for event in timeline.latest(entries, NOW, {})}
    assert before.items() <= after.items()


@pytest.mark.parametrize("event", sorted(timeline._SENTENCES))
def test_every_sentence_is_about_an_event_that_exists(event: str) -> None:
    """One that was renamed would silently disappear from the page. A missing fact is no error."""
    folder = Path(vgpu_agent.__file__).parent
    sources = [
        path.read_text()
        for path in folder.rglob("*.py")
        if "dashboard" not in path.parts and "sim" not in path.parts
    ]
    assert any(f'"{event}"' in source for source in sources)
    told = timeline.told(Entry(NOW, event, {}), {})
    assert told is not None
    assert told.sentence
