"""The content of the page: the node's state, problems, GPUs with their pods, resources, pods that
wait, and the last hour.

Pure functions of the snapshot. A text shows no age, because it would change all the time: moments
are ``time`` elements in UTC, and ``dashboard.js`` adds how long ago they were. The names of pods,
and texts that they or others have written, are escaped where they enter a part: a piece of the page
with an id, which is sent alone when it changes (`parts`). Functions add parts to ``made``, whose
methods return the HTML element of the part.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from vgpu_agent.errors import with_advice
from vgpu_agent.journal import Entry
from vgpu_agent.status import PluginState, ProblemKind
from vgpu_agent.web import explain, mig, page, problems, uses
from vgpu_agent.web.dashboard import timeline
from vgpu_agent.web.dashboard.parts import Parts, text
from vgpu_agent.web.dashboard.timeline import Mood
from vgpu_agent.web.health import clock, remedy
from vgpu_agent.web.limits import Limits, LimitState
from vgpu_agent.web.views import gpu_of_devices, is_simulated, live_grants

if TYPE_CHECKING:
    from vgpu_agent.model import ContainerUsage, Gpu, GpuUsage, Grant, Health, Share
    from vgpu_agent.pods import Pod
    from vgpu_agent.status import AgentStatus, PluginStatus
    from vgpu_agent.web.dashboard.stream import Dashboard

# The most items of a list. More pods of one GPU, and more problems, are counted.
_SHOWN_PODS = 100
_SHOWN_PROBLEMS = 30
_SHOWN_WAITING = 50
_SHOWN_FOUND = 20
# characters of a reason; the pod's events have all of it
_LONGEST_REASON = 600
# what may be typed into the search: a namespace, a slash and the name of a pod
LONGEST_SEARCH = 320
_POD = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z")
_MIB_PER_GIB = 1024
# kinds of problems for which the page has a word other than that of `ProblemKind`
_KIND_WORDS = {ProblemKind.LEDGER: "kubelet's records", ProblemKind.TASK: "agent"}


class _Held(msgspec.Struct, frozen=True):
    """One share of a GPU and its grant; ``memory_mib`` is 0 where nothing limits it, ``place`` is
    the share's position in the grant.
    """

    grant: Grant
    share: Share
    memory_mib: int
    place: int


def parts(status: AgentStatus, now: float) -> Parts:
    """Return the parts of the page.

    Args:
        status: the snapshot.
        now: Unix seconds.
    """
    made = Parts()
    indices = {gpu.uuid: gpu.index for gpu in status.inventory.gpus}
    made.add("head", _head(made, status, now))
    content = "".join(
        (
            _section("Problems", made.list("problems", _problems(status, now), css="rows"), "none"),
            _section("GPUs", _gpus(made, status, now), "this node shows no GPU"),
            _section(
                "Pods that wait", made.list("waiting", _waiting(status), css="rows"), "no pod waits"
            ),
            _section(
                "Resources", made.list("resources", _resources(status), css="rows"), "none offered"
            ),
            _section(
                "The last hour",
                made.list(
                    "hour",
                    {
                        event.part: f"{_time(event.at)} {_marked(event.mood, event.sentence)}"
                        for event in timeline.latest(status.events, now, indices)
                    },
                    css="rows",
                ),
                "nothing happened",
            ),
        )
    )
    made.add("main", content)
    return made


def document(dashboard: Dashboard, now: float, searched: str, found: str) -> str:
    """Return the HTML document.

    Args:
        dashboard: the content.
        now: Unix seconds.
        searched: the text in the search field; empty if nothing was searched.
        found: the HTML of the answer to the search.
    """
    result = f'<div id="answer">{found}</div>' if searched else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{dashboard.html('node')}: GPUs</title>"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="dashboard.css">'
        '<noscript><meta http-equiv="refresh" content="10"></noscript>'
        '<script src="dashboard.js" defer></script></head>'
        f'<body data-version="{dashboard.version}" data-now="{now * 1000:.0f}">'
        f'<header id="head">{dashboard.html("head")}</header><form role="search">'
        '<label for="pod">Why is a pod where it is?</label>'
        '<input id="pod" name="pod" type="search" placeholder="NAMESPACE/NAME" '
        f'maxlength="{LONGEST_SEARCH}" value="{text(searched)}">'
        '<button>Search</button><span id="live" class="pill plain" role="status">State of '
        f"{_time(now)}</span></form>{result}"
        f'<main id="main">{dashboard.html("main")}</main>'
        '<footer class="quiet"><a href="metrics">metrics</a> · '
        '<a href="readyz?verbose">readiness</a> · <a href="livez?verbose">liveness</a></footer>'
        "</body></html>\n"
    )


def answer(status: AgentStatus, now: float, searched: str) -> str:
    """Return the answer to a search as HTML: why a pod is where it is, or the pods whose names
    match.

    Args:
        status: the snapshot.
        now: Unix seconds.
        searched: the text from the search field, at most `LONGEST_SEARCH` characters of it count.
    """
    wanted = searched.strip().lower()[:LONGEST_SEARCH]
    known = explain.pods(status)
    found = [name for name in known if wanted in name]
    if wanted in known or (len(found) != 1 and _POD.match(wanted) and not found):
        found = [wanted]
    if len(found) == 1:
        return _explained(status, now, found[0])
    if not found:
        return (
            f"<p>No pod on this node that asks for a GPU matches <b>{text(wanted)}</b>. "
            "A name with its namespace, NAMESPACE/NAME, is explained even if it is not here.</p>"
        )
    links = "".join(f"<li>{_pod(name)}</li>" for name in found[:_SHOWN_FOUND])
    more = len(found) - _SHOWN_FOUND
    rest = f"<p>and {more} more: type more of the name</p>" if more > 0 else ""
    return f"<p>{len(found)} pods match.</p><ul class=rows>{links}</ul>{rest}"


def _explained(status: AgentStatus, now: float, name: str) -> str:
    explanation = explain.explain(status, now, name)
    indices = {gpu.uuid: gpu.index for gpu in status.inventory.gpus}
    events = [
        event
        for each in explanation.events
        if (
            # None for an event that the page does not show
            event := timeline.told(
                Entry(now - (each.when.seconds_ago or 0.0), each.event, each.facts), indices
            )
        )
    ]
    sentences = "".join(f"<p>{text(sentence)}</p>" for sentence in explanation.answer)
    items = "".join(
        f"<li>{_time(event.at)} {_marked(event.mood, event.sentence)}</li>"
        for event in reversed(events)
    )
    return (
        f"<h3>{text(name)}</h3>{sentences}<ul class=rows>{items}</ul>"
        f"<p class=quiet>Answered {_time(now)}. Search again for a newer answer.</p>"
    )


def _head(made: Parts, status: AgentStatus, now: float) -> str:
    found = len(problems.known(status, now))
    counted = f"{found} problem{'' if found == 1 else 's'}" if found else "no problems"
    mood, state = (
        (Mood.BAD, "Stuck: it needs a restart")
        if status.not_alive
        else (Mood.BAD, "Not ready")
        if status.not_ready
        else (Mood.WARNING, "Ready")
        if found
        else (Mood.GOOD, "Ready")
    )
    driver, cuda = status.inventory.driver_version, status.inventory.cuda_version
    facts = [
        f"vgpu-agent {text(status.version)}",
        f"driver {text(driver)}" if driver else "",
        f"CUDA {text(cuda)}" if cuda else "",
        f"started {_time(status.started_at)}" if status.started_at else "",
    ]
    simulated = f'<p class="pill warn">{page.SIMULATED}</p>' if is_simulated(status) else ""
    return (
        f"<h1>{made.add('node', text(status.node))} {_pill(mood, state)} "
        f"{_pill(mood, counted)}</h1>{simulated}"
        f"<p class=quiet>{' · '.join(filter(None, facts))}</p>"
    )


def _problems(status: AgentStatus, now: float) -> dict[str, str]:
    gpus = {str(gpu.index): gpu for gpu in status.inventory.gpus}
    items: dict[str, str] = {}
    known = problems.known(status, now)
    # those for which a probe fails; only these, and those of GPUs, are marked as bad
    failing = problems.merged((*status.not_alive, *status.not_ready))
    for place, problem in enumerate(known[:_SHOWN_PROBLEMS]):
        part = problem.part.replace(problem.kind, _KIND_WORDS.get(problem.kind, problem.kind), 1)
        told, help_text = problem.text, problem.remedy
        stops = problem.kind is ProblemKind.GPU or problem in failing
        mood = Mood.BAD if stops else Mood.WARNING
        gpu = gpus.get(problem.subject)
        if problem.kind is ProblemKind.GPU and gpu and told.startswith(f"{gpu.uuid} "):
            # its box among the GPUs has the times, which would change this text all the time
            part = f"GPU {gpu.index}"
            told = f"{'unhealthy' if gpu.present else 'gone'}: {gpu.health.reason or 'no answer'}"
        items[f"p{place}"] = (
            f"{_pill(mood, part)} {_reason(told)}"
            f"{f'<p class=remedy>{text(help_text)}</p>' if help_text else ''}"
        )
    if (more := len(known) - _SHOWN_PROBLEMS) > 0:
        items["p-more"] = f"and {more} more: vgpu-agent status lists them"
    return items


def _gpus(made: Parts, status: AgentStatus, now: float) -> str:
    usage = {used.uuid: used for used in status.usage}
    held = _held(status)
    usage_by_container = {
        (used.namespace, used.pod, used.container, used.uuid): used for used in status.containers
    }
    pods = {pod.kubelet_uid: pod for pod in status.cluster.pods}
    limits = Limits(status)
    several = len(status.binding.families) > 1
    serves = {use.gpu: use.family for use in status.ledger.uses if several and use.family}
    cards = {}
    for place, gpu in enumerate(status.inventory.gpus):
        on_gpu, part = held.get(gpu.uuid, []), f"g{place}"
        shares = {f"{part}s{each.grant.number}-{each.place}": each for each in on_gpu[:_SHOWN_PODS]}
        rows = {
            share: _share(made, share, each, usage_by_container, pods, limits, status)
            for share, each in shares.items()
        }
        if (more := len(on_gpu) - _SHOWN_PODS) > 0:
            rows[f"{part}s-more"] = f"and {more} more: search for the pod"
        cards[part] = _card(
            made, part, gpu, usage.get(gpu.uuid), on_gpu, rows, serves.get(gpu.uuid, ""), now
        )
    return made.list("gpus", cards, css="cards")


def _held(status: AgentStatus) -> dict[str, list[_Held]]:
    """Return the UUID of each GPU → the shares of it and of its MIG instances, by pod."""
    gpus = gpu_of_devices(status)
    instances = {
        instance.uuid: instance.memory_mib
        for gpu in status.inventory.gpus
        for instance in gpu.mig_instances
    }
    found: dict[str, list[_Held]] = {}
    for grant in live_grants(status):
        for place, share in enumerate(grant.shares):
            gpu = gpus.get(share.device)
            memory = share.memory_mib or instances.get(share.device, 0)
            if share.exclusive and gpu is not None and share.device == gpu.uuid:
                memory = gpu.memory_mib
            found.setdefault(gpu.uuid if gpu else share.device, []).append(
                _Held(grant, share, memory, place)
            )
    for shares in found.values():
        shares.sort(key=lambda each: (_pod_name(each.grant), each.grant.number, each.place))
    return found


def _card(
    made: Parts,
    part: str,
    gpu: Gpu,
    usage: GpuUsage | None,
    held: list[_Held],
    rows: dict[str, str],
    serves: str,
    now: float,
) -> str:
    """Return the box of one GPU.

    Args:
        made: gets the parts of the box.
        part: the beginning of their ids.
        gpu: the GPU.
        usage: what was measured of it last; None if nothing could be.
        held: its shares.
        rows: id → HTML, of the shares that are shown.
        serves: the family that has shares of it; empty if none has, or if the node has one family.
        now: Unix seconds.
    """
    total = gpu.memory_mib or (usage.memory_total_mib if usage else None) or 0
    used = usage.memory_used_mib if usage else None
    busy = usage.utilisation_percent if usage else None
    memory = sum(each.memory_mib for each in held)
    without_limit = sum(not each.memory_mib for each in held)
    compute, compute_percent = _compute(gpu, held)
    celsius, watts = (usage.temperature_celsius, usage.power_watts) if usage else (None, None)
    facts = (
        f"{celsius} °C" if celsius is not None else "",
        f"{watts:.0f} W" if watts is not None else "",
        f"serves {serves}" if serves else "",
    )
    shared = f" and {without_limit} without a limit" if without_limit else ""
    return "".join(
        (
            made.add(f"{part}h", _title(gpu, now), tag="div"),
            _meter(
                made,
                f"{part}m",
                "Memory",
                made.add(
                    f"{part}mt", "not known" if used is None else f"{_size(used)} of {_size(total)}"
                ),
                made.add(f"{part}mg", f"{_size(memory)}{shared}"),
                100 * (used or 0) / total if total else 0,
                100 * memory / total if total else 0,
            ),
            _meter(
                made,
                f"{part}c",
                "Compute",
                made.add(f"{part}ct", "not known" if busy is None else f"{busy} %"),
                made.add(f"{part}cg", compute),
                busy or 0,
                compute_percent,
            ),
            made.add(f"{part}w", " · ".join(filter(None, facts)), tag="p", css="quiet"),
            made.list(f"{part}p", rows, css="pods"),
            "<p class=none>no pod has a share</p>",
        )
    )


def _compute(gpu: Gpu, held: list[_Held]) -> tuple[str, float]:
    """Return the compute that the shares have together, in words and in percent."""
    if gpu.mig_instances:
        used = len({each.share.device for each in held})
        return f"{used} of {len(gpu.mig_instances)} MIG instances", 100 * used / len(
            gpu.mig_instances
        )
    if any(each.share.exclusive for each in held):
        return "100 %", 100
    if not all(each.share.cores_percent for each in held):
        return "without a limit", 100
    percent = sum(each.share.cores_percent for each in held)
    return f"{percent} %", percent


def _meter(
    made: Parts,
    part: str,
    name: str,
    used: str,
    given: str,
    used_percent: float,
    given_percent: float,
) -> str:
    """Return the bar and the legend of one quantity of a GPU: what is used of it, and what the
    shares of containers have together. ``used`` and ``given`` are HTML.
    """
    return (
        f'<p class=meter id="{part}n"><b>{name}</b></p>'
        '<svg class=bar viewBox="0 0 100 8" preserveAspectRatio="none" role=img '
        f'aria-labelledby="{part}n {part}l">'
        f"{made.bar(f'{part}bg', given_percent, css='given')}"
        f"{made.bar(f'{part}bu', used_percent, css='used')}</svg>"
        f'<p class=legend id="{part}l"><span class=used>used {used}</span> '
        f"<span class=given>given {given}</span></p>"
    )


def _title(gpu: Gpu, now: float) -> str:
    healthy = gpu.present and gpu.health.ok
    state = "Healthy" if healthy else "Unhealthy" if gpu.present else "Gone"
    title = (
        f"<h3>GPU {gpu.index} {_pill(Mood.GOOD if healthy else Mood.BAD, state)}</h3>"
        f"<p class=quiet>{text(gpu.name)} · {text(gpu.uuid)}</p>"
    )
    if not healthy:
        title += _illness(gpu.health, gpu.uuid, now)
    for instance in gpu.mig_instances:
        # `why_withheld`: why no new container gets the instance
        if healthy and mig.why_withheld(gpu, instance):
            title += (
                f"<p>{_pill(Mood.BAD, 'Unhealthy')} MIG instance {text(instance.profile)}: "
                f"{text(mig.why_withheld(gpu, instance))}</p>"
            )
            if not instance.health.ok:
                title += _illness(instance.health, gpu.uuid, now)
    return title


def _illness(health: Health, gpu: str, now: float) -> str:
    """Return why a device is not healthy, since when, until when, and the remedy, as HTML."""
    others = [cause.text for cause in health.causes[1:] if cause.text not in health.reason]
    facts = [f"<p class=cause>{_reason(health.reason or 'it no longer answers')}</p>"]
    if others:
        facts.append(f"<p>Also: {_reason(', '.join(others))}</p>")
    when = f"Since {_time(health.since, css='since')}. " if health.since and not health.ok else ""
    if health.answers is not None:
        when += "It answers now. " if health.answers else "It does not answer. "
    if health.offered_at > now:
        when += (
            f"Offered again {_time(health.offered_at, css='until')}, if there is no further error."
        )
    elif health.offered_at:
        when += "Offered again after the next reading, if there is no further error."
    else:
        when += "It is not offered again before that is remedied."
    facts.append(f"<p>{when}</p>")
    if help_text := remedy(health, gpu):
        facts.append(f"<p class=remedy>{text(help_text)}</p>")
    return "".join(facts)


def _share(
    made: Parts,
    part: str,
    held: _Held,
    usage_by_container: dict[tuple[str, str, str, str], ContainerUsage],
    pods: dict[str, Pod],
    limits: Limits,
    status: AgentStatus,
) -> str:
    """Return the row of one share.

    Args:
        made: gets the parts of the row.
        part: the beginning of their ids.
        held: the share.
        usage_by_container: namespace, pod, container and UUID of the device → what its processes
            use, as far as a library counts that.
        pods: the pods on this node, by the kubelet's UID.
        limits: tell whether the limit of a grant is in force.
        status: the snapshot.
    """
    grant, share, owner = held.grant, held.share, held.grant.owner
    amount = [_size(held.memory_mib)] if held.memory_mib else []
    amount += [f"{share.cores_percent} %"] if share.cores_percent else []
    if share.exclusive and not share.device.startswith("MIG-"):
        amount = ["whole GPU"]
    row = [
        _pod(_pod_name(grant)) if owner and owner.pod else "a pod that is starting",
        f"<span class=quiet>{text(owner.container)}</span>" if owner else "",
        f"<span class=given>{', '.join(amount) or 'without a limit'}</span>",
    ]
    key = (owner.namespace, owner.pod, owner.container, share.device) if owner else None
    if key and (used := usage_by_container.get(key)):
        use = f"{_size(used.used_bytes >> 20)}, {used.cores_percent} %"
        row.append(f"<span class=use>uses {made.add(f'{part}u', use)}</span>")
    pod = pods.get(owner.pod_uid) if owner else None
    container = pod.container(owner.container) if pod and owner else None
    if container is not None and not container.started:
        row.append(_pill(Mood.PLAIN, "starting"))
    limit = limits.of(grant)
    if limit and limit.state is LimitState.NOT_IN_FORCE:
        row.append(_pill(Mood.WARNING, "limit not in force"))  # the search has the reason
    if any(each.device == share.device for each in status.ledger.overcommitted):
        row.append(_pill(Mood.WARNING, "more is given than the GPU has"))
    return " ".join(filter(None, row))


def _waiting(status: AgentStatus) -> dict[str, str]:
    """Return the pods that cannot start, and those for which a GPU is kept: id → HTML."""
    items = {}
    for refusal in status.binding.refusals[:_SHOWN_WAITING]:
        reason = with_advice(refusal.reason, refusal.advice)
        again = "" if refusal.final else "; it is tried again"
        items[_item("r", refusal.pod.kubelet_uid, refusal.container)] = (
            f"{_pod(refusal.pod.full_name)} <span class=quiet>{text(refusal.container)}</span> "
            f"{_pill(Mood.BAD, 'cannot start')} since {_time(refusal.since, css='since')}{again}: "
            f"{_reason(reason)}"
        )
    for use in status.ledger.uses:
        for claim in use.claims[: _SHOWN_WAITING - len(items)]:
            freed = uses.freed_by(use) if use.family else ""
            until = f"; it is free after {text(freed)}" if freed else ""
            items[_item("c", claim.pod_uid, use.gpu)] = (
                f"{_pod(claim.pod)} {_pill(Mood.PLAIN, 'waits')} "
                f"since {_time(claim.since, css='since')} for "
                f"{text(uses.called(status, (use.gpu,)))}{until}"
            )
    return items


def _resources(status: AgentStatus) -> dict[str, str]:
    held: dict[str, int] = {}
    for grant in live_grants(status):
        held[grant.resource] = held.get(grant.resource, 0) + len(grant.ids)
    items = {
        f"n{place}": _resource(status, plugin, held.get(plugin.resource, 0))
        for place, plugin in enumerate(status.plugins)
    }
    for family in status.binding.families:
        if not family.offered and not family.idle:  # idle: the node has no device for it
            items[f"f-{family.name}"] = (
                f"<b>resources of {family.name}</b> {_pill(Mood.BAD, 'not offered')} "
                f"{_reason(family.trouble)}"
            )
    return items


def _resource(status: AgentStatus, plugin: PluginStatus, held: int) -> str:
    if plugin.ready:
        state = _pill(Mood.GOOD, "offered")
    elif plugin.state is PluginState.REGISTERED:
        state = _pill(Mood.BAD, "the kubelet does not listen")
    else:
        state = _pill(Mood.BAD, plugin.state.value)
    counts = f"{plugin.healthy_sent} of {plugin.ids_sent} can be used"
    # `only_counted`: the ids serve schedulers for counting, and no grant has any
    if plugin.resource not in status.ledger.only_counted:
        counts += f", {held} in use"
        if plugin.resource in status.ledger.free:
            counts += f", {status.ledger.free[plugin.resource]} free"
    why = "".join(
        f"<p>{each.ids} held back: {_reason(each.reason)}</p>"
        for each in uses.held_back(status, plugin.resource)
    )
    return f"<b>{text(plugin.resource)}</b> {state} {counts}{why}"


def _section(title: str, content: str, text_if_empty: str) -> str:
    return f"<section><h2>{title}</h2>{content}<p class=none>{text_if_empty}</p></section>"


def _pod_name(grant: Grant) -> str:
    return grant.owner.pod_name if grant.owner else ""


def _pod(name: str) -> str:
    return f'<a href="?pod={quote(name, safe="/")}">{text(name)}</a>'


def _pill(mood: Mood, words: str) -> str:
    return f'<span class="pill {mood}">{text(words)}</span>'


def _marked(mood: Mood, sentence: str) -> str:
    return f'<span class="mark {mood}">{text(sentence)}</span>'


def _reason(reason: str) -> str:
    """Return a reason as HTML, in one line and not too long."""
    short = " ".join(reason.split())
    return text(short if len(short) <= _LONGEST_REASON else f"{short[:_LONGEST_REASON]}…")


def _time(unix_seconds: float, css: str = "ago") -> str:
    """Return a moment as HTML. By the class ``css`` (ago, since, until) ``dashboard.js`` writes how
    long ago it was, since when something is so, or how soon it will be.
    """
    moment = clock(unix_seconds)
    return f'<time class={css} datetime="{moment}">{moment[11:19]} UTC</time>'


def _size(mib: int) -> str:
    return f"{mib / _MIB_PER_GIB:.1f} GiB" if mib >= _MIB_PER_GIB else f"{mib} MiB"


def _item(kind: str, *names: str) -> str:
    """Return an id for the item of these names, which a pod may have chosen. ``kind`` is a letter
    that differs between refusals and claims.
    """
    return kind + hashlib.blake2b("\0".join(names).encode(), digest_size=5).hexdigest()
