"""``/debug/…``: everything the agent knows about itself, as JSON, for the person on call.

A table of paths, each with one sentence, its query parameters and a pure function from a snapshot
to an answer.
`web.server` serves it. Answers are the types of `views`, so their shapes are a contract with
scripts (docs/debug-endpoints.md). The only thing that can be changed here is the log level.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vgpu_agent import log
from vgpu_agent.errors import AgentError
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.web import allocations, binding, cluster, explain, uses, views
from vgpu_agent.web.shapes import shown, when

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.status import AgentStatus, BindingStatus

_logger = log.get(__name__)
_LONGEST_ECHO = 60  # characters of a wrong value that an error repeats
# RFC 1123 label / subdomain
_POD = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z")
_UNIX_SECONDS = re.compile(r"\d{1,12}(\.\d{1,9})?\Z", re.ASCII)
_AGO = re.compile(r"(\d{1,9})([smhd])\Z", re.ASCII)
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BadQuestionError(AgentError):
    """A query parameter or a body that makes no sense; answered with 400 and this message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One request: the snapshot to answer from, the time (unix seconds) and the query."""

    status: AgentStatus
    now: float
    query: Mapping[str, str]


class DebugPath(NamedTuple):
    """One line of the index: path, description in one sentence, parameters (except ``pretty``),
    and the answer.
    """

    path: str
    about: str
    parameters: tuple[str, ...]
    answer: Callable[[Question], Any]


def to_json(answer: Any, *, pretty: bool = False) -> bytes:
    """``answer`` as one line, or indented; what JSON has no form
    for is written as Python shows it.
    """
    line = msgspec.json.encode(answer, enc_hook=repr)
    return (msgspec.json.format(line, indent=2) if pretty else line) + b"\n"


def question(
    status: AgentStatus,
    now: float,
    pairs: Iterable[tuple[str, str]],
    known: Iterable[str],
    path: str,
) -> Question:
    """The request in our words.

    Raises:
        BadQuestionError: a parameter that ``path`` does not know, or one given twice.
    """
    allowed = [*known, "pretty"]
    query: dict[str, str] = {}
    for name, value in pairs:
        if name not in allowed:
            raise BadQuestionError(
                f"query parameter {_echo(name)} is not known to {path}; known: {', '.join(allowed)}"
            )
        if name in query:
            raise BadQuestionError(f"query parameter {name!r} is given twice; give it once")
        query[name] = value
    return Question(status, now, query)


def change_log_level(body: bytes) -> dict[str, Any]:
    """``PUT /debug/loglevel``: the body is a level, or ``{"level": "debug"}``.
    Lasts until the agent restarts.

    Raises:
        BadQuestionError: anything else; the message lists the levels.
    """
    text = body.decode(errors="replace").strip()
    if text.startswith(("{", '"')):
        text = _level_in_json(text)
    if text not in log.LEVELS:
        raise BadQuestionError(
            f"log level {_echo(text)} is not known; send one of {', '.join(log.LEVELS)} as plain "
            'text or as {"level": "debug"}'
        )
    was = log.current_level()
    log.set_level(text)
    _logger.info("log.level_changed", level=text, was=was)
    return {"level": text, "was": was}


def _level_in_json(text: str) -> str:
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    level = found.get("level") if isinstance(found, dict) else found
    return level if isinstance(level, str) else text


def _echo(text: str) -> str:
    """A wrong value as an error repeats it: one line, shortened."""
    return repr(text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}…")


def _status(asked: Question) -> views.Overview:
    return views.overview(asked.status, asked.now)


def _devices(asked: Question) -> dict[str, Any]:
    inventory = asked.status.inventory
    return {
        "simulated": views.is_simulated(asked.status),
        "driver_version": inventory.driver_version,
        "cuda_version": inventory.cuda_version,
        "inventory_version": inventory.version,
        "inventory_taken": when(asked.status.inventory_at, asked.now),
        "usage_taken": when(asked.status.usage_at, asked.now),
        "nvml": views.nvml(asked.status, asked.now),
        "failures": inventory.failures,
        "gpus": views.gpus(asked.status, asked.now),
    }


def _ledger(asked: Question) -> dict[str, Any]:
    ledger = asked.status.ledger
    return {
        "revision": ledger.revision,
        "verified": when(ledger.verified_at, asked.now),
        "drift_total": ledger.drift_total,
        "drift_last": ledger.drift_last,
        "unknown_ids": ledger.unknown_ids,
        "max_holders": ledger.capacity,
        "ids_free": ledger.free,
        "rooms": ledger.rooms,
        "scheduler_overcommitted": ledger.overcommitted,
        "uses": {use.gpu: uses.use_view(use, asked.now) for use in ledger.uses},
        "held_back": {
            resource: uses.held_back(asked.status, resource) for resource in ledger.held_back
        },
        "grants": views.grants(asked.status, asked.now),
    }


def _allocations(asked: Question) -> dict[str, Any]:
    return allocations.answer(
        asked.status, asked.now, _pod_asked_for(asked) if "pod" in asked.query else None
    )


def _explain(asked: Question) -> explain.Explanation | dict[str, Any]:
    if "pod" not in asked.query:
        return {"ask": "?pod=NAMESPACE/NAME", "pods": explain.pods(asked.status)}
    return explain.explain(asked.status, asked.now, _pod_asked_for(asked))


def _pod_asked_for(asked: Question) -> str:
    pod = asked.query["pod"]
    if not _POD.match(pod):
        raise BadQuestionError(
            f"pod {_echo(pod)} is not understood; write ?pod=NAMESPACE/NAME, for example "
            "?pod=default/train-0"
        )
    return pod


def _pods(asked: Question) -> dict[str, Any]:
    return {
        "pods": views.pods(asked.status, asked.now),
        **cluster.watched_pods(asked.status, asked.now),
    }


def _mps(asked: Question) -> dict[str, Any]:
    return {"daemons": [shown(daemon, asked.now) for daemon in asked.status.mps]}


def _resources(asked: Question) -> dict[str, Any]:
    return {
        "kubelet": shown(asked.status.kubelet, asked.now),
        "resources": views.resources(asked.status, asked.now),
        "withheld": views.withheld(asked.status),
        "cautions": list(asked.status.binding.cautions),
    }


def _events(asked: Question) -> dict[str, Any]:
    since = _since(asked.query.get("since"), asked.now)
    name = asked.query.get("event")
    limit = _limit(asked.query.get("limit"))
    matching = [
        entry
        for entry in asked.status.events
        if entry.at >= since
        and (name is None or entry.event == name or entry.event.startswith(f"{name}."))
    ]
    newest = matching if limit is None else matching[-limit:]
    return {
        "kept": len(asked.status.events),
        "matching": len(matching),
        "events": [
            {
                **msgspec.to_builtins(when(entry.at, asked.now)),
                "event": entry.event,
                "facts": entry.facts,
            }
            for entry in newest
        ],
    }


def _since(text: str | None, now: float) -> float:
    """Parse ``since`` into unix seconds: a time in ISO-8601 (UTC by default), unix seconds,
    or an age such as ``10m``.
    """
    if text is None:
        return 0.0
    if ago := _AGO.match(text):
        return now - int(ago[1]) * _UNIT_SECONDS[ago[2]]
    if _UNIX_SECONDS.match(text):
        return float(text)
    try:
        # "+" of "…T12:00:00+01:00" means a space in a query, unless it is escaped, which is rarely
        # done in curl.
        at = dt.datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    except ValueError:
        raise BadQuestionError(
            f"since {_echo(text)} is not understood; write an age (30s, 10m, 2h, 1d), a time "
            "(2026-01-31T12:00:00Z) or unix seconds"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=dt.UTC)).timestamp()


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise BadQuestionError(
            f"limit {_echo(text)} is not understood; write how many of the newest events you want, "
            "1 or more"
        )
    return int(text)


def _config(asked: Question) -> dict[str, Any]:
    return {
        "problem": "\n".join(asked.status.config_problems),
        "needs_restart": asked.status.config_needs_restart,
        "named": asked.status.config_named,
        "binding": binding.binding_view(asked.status.binding, asked.now),
        "cdi": views.cdi(asked.status.cdi, asked.now),
        **_of_files(asked.status.binding),
        "config_map": asked.status.cluster.config_map,
        "file_problems": asked.status.binding.file_problems,
        "values": {
            key: {"value": value, "from": origin}
            for key, (value, origin) in sorted(asked.status.config.items())
        },
    }


def _of_files(status: BindingStatus) -> dict[str, Any]:
    """Show for each family with files of a replaced plugin its settings in force,
    and which of them a file has set.
    """
    answer: dict[str, Any] = {}
    for family in FAMILIES:
        if family.files:
            answer[family.settings.attribute] = status.in_force.get(family.name, {})
            answer[f"{family.settings.attribute}_from"] = status.origins.get(family.name, {})
    return answer


def _tasks(asked: Question) -> dict[str, Any]:
    now = asked.now
    return {
        "loop_lag_seconds": asked.status.loop_lag_seconds,
        "loop_lag_max_seconds": asked.status.loop_lag_max_seconds,
        "nvml": views.nvml(asked.status, now),
        "tasks": [
            {**shown(task, now), "stuck_seconds": task.stuck_for(now)}
            for task in asked.status.tasks
        ],
    }


def _log_level(_: Question) -> dict[str, Any]:
    return {"level": log.current_level(), "levels": log.LEVELS}


def _index(_: Question) -> dict[str, Any]:
    return {
        "paths": [
            {"path": entry.path, "about": entry.about, "parameters": [*entry.parameters, "pretty"]}
            for entry in PATHS
            if entry.path != "/debug/"
        ]
    }


PATHS: tuple[DebugPath, ...] = (
    DebugPath("/debug/", "This list.", (), _index),
    DebugPath(
        "/debug/status", "The whole node on one page: what `vgpu-agent status` prints.", (), _status
    ),
    DebugPath(
        "/debug/devices",
        "Every GPU: health and why, usage, topology, and who holds a share of it.",
        (),
        _devices,
    ),
    DebugPath(
        "/debug/ledger",
        "The ledger: grants, capacity, free ids, the family that each GPU serves, and the "
        "differences that verification against the kubelet's records found.",
        (),
        _ledger,
    ),
    DebugPath(
        "/debug/allocations",
        "Every grant with its evidence, reservations without an owner, refused starts; all, or "
        "of one pod (pod=namespace/name).",
        ("pod",),
        _allocations,
    ),
    DebugPath(
        "/debug/explain",
        "Why a pod does not start, or which GPU it has and how that is known (pod=namespace/name).",
        ("pod",),
        _explain,
    ),
    DebugPath(
        "/debug/pods",
        "Who holds which GPU, by pod; and the pods of this node as the API server has them.",
        (),
        _pods,
    ),
    DebugPath(
        "/debug/cluster",
        "The API server: connection, watches, writers, requests, the remembered state.",
        (),
        lambda asked: cluster.answer(asked.status, asked.now),
    ),
    DebugPath(
        "/debug/resources",
        "Each plugin server: registered, stream open, ids sent, Allocate calls; and the kubelet.",
        (),
        _resources,
    ),
    DebugPath(
        "/debug/mps",
        "The MPS control daemons: limits in force, clients, restarts, what is wrong.",
        (),
        _mps,
    ),
    DebugPath(
        "/debug/events",
        "The last thousand decisions (since=10m, event=gpu.unhealthy, limit=20).",
        ("since", "event", "limit"),
        _events,
    ),
    DebugPath(
        "/debug/config",
        "Each setting in force and where it came from; how grants are bound and why.",
        (),
        _config,
    ),
    DebugPath(
        "/debug/tasks",
        "The agent's loops: state, restarts, heartbeats; and an NVML call that hangs.",
        (),
        _tasks,
    ),
    DebugPath(
        "/debug/loglevel",
        "The log level; PUT one of debug, info, warning, error to change it until the next "
        "restart.",
        (),
        _log_level,
    ),
)
