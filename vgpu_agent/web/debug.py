"""The endpoints ``/debug/…``: the state of the agent as JSON, for operators.

`PATHS` has each path with its description, its query parameters, and a pure function that answers a
request from a snapshot. `web.server` serves them. The shapes of the answers are the types of
`views`; scripts rely on them (docs/debug-endpoints.md). All paths are read-only, except for the log
level.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vgpu_agent import log
from vgpu_agent.errors import AgentError
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.web import allocations, binding, cluster, explain, page, uses, views
from vgpu_agent.web.shapes import shown, when
from vgpu_agent.web.terminal import NARROWEST, WIDEST, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.status import AgentStatus, BindingStatus

_logger = log.get(__name__)
_MAX_ECHO = 60  # characters of an invalid value that are repeated in an error message
# namespace/name: an RFC 1123 label and a subdomain
_POD = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z")
_UNIX_SECONDS = re.compile(r"\d{1,12}(\.\d{1,9})?\Z", re.ASCII)
_AGE = re.compile(r"(\d{1,9})([smhd])\Z", re.ASCII)
TEXT = ("text", "columns", "colours")  # the parameters of paths that answer with text as well
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BadRequestError(AgentError):
    """A query parameter or a body is invalid. The response is status 400 with this message."""


class DebugRequest(msgspec.Struct, frozen=True):
    """A request: the snapshot to answer from, its time (Unix seconds), and the query."""

    status: AgentStatus
    now: float
    query: Mapping[str, str]


class DebugPath(NamedTuple):
    """One path.

    Attributes:
        path: the URL path.
        description: one sentence, shown in the index.
        parameters: the query parameters, except ``pretty``, which all paths accept.
        answer: returns the answer to a request, ready for `to_json`.
        as_text: returns an answer as text for a terminal, for the parameter ``text``, whose form
            ``columns`` and ``colours`` choose; None for paths without these parameters.
    """

    path: str
    description: str
    parameters: tuple[str, ...]
    answer: Callable[[DebugRequest], Any]
    as_text: Callable[[Any, Layout], str] | None = None


def to_json(answer: Any, *, pretty: bool = False) -> bytes:
    """Encode ``answer`` on one line, or indented if ``pretty``. Values that JSON has no type for
    are encoded as their ``repr``.
    """
    line = msgspec.json.encode(answer, enc_hook=repr)
    return (msgspec.json.format(line, indent=2) if pretty else line) + b"\n"


def parse_request(
    status: AgentStatus,
    now: float,
    pairs: Iterable[tuple[str, str]],
    known: Iterable[str],
    path: str,
) -> DebugRequest:
    """Check the query parameters and build the request.

    Args:
        status: the snapshot to answer from.
        now: Unix seconds.
        pairs: the query parameters, (name, value).
        known: the parameters of the path, except ``pretty``.
        path: the URL path, for errors.

    Raises:
        BadRequestError: a parameter is not one of the path, or is given twice.
    """
    allowed = [*known, "pretty"]
    query: dict[str, str] = {}
    for name, value in pairs:
        if name not in allowed:
            raise BadRequestError(
                f"query parameter {_echo(name)} is not known to {path}; known: {', '.join(allowed)}"
            )
        if name in query:
            raise BadRequestError(f"query parameter {name!r} is given twice; give it once")
        query[name] = value
    return DebugRequest(status, now, query)


def layout(request: DebugRequest) -> Layout:
    """Return the form of the text that was asked for: its width, and whether it has colours.

    Raises:
        BadRequestError: ``columns`` is no width, or the form of a text was given without ``text``.
    """
    if "text" not in request.query and {"columns", "colours"} & set(request.query):
        raise BadRequestError("columns and colours are for text; write ?text&columns=80")
    given = request.query.get("columns")
    if given is None:
        return Layout(None, "colours" in request.query)
    if not (given.isascii() and given.isdigit() and NARROWEST <= int(given[:9]) <= WIDEST):
        raise BadRequestError(
            f"columns {_echo(given)} is not understood; write a width from {NARROWEST} to {WIDEST}"
        )
    return Layout(int(given), "colours" in request.query)


def change_log_level(body: bytes) -> dict[str, Any]:
    """Answer ``PUT /debug/loglevel``: set the log level until the agent restarts.

    Args:
        body: the level as plain text, or ``{"level": "debug"}``.

    Raises:
        BadRequestError: the body is neither. The message lists the levels.
    """
    text = body.decode(errors="replace").strip()
    if text.startswith(("{", '"')):
        text = _level_in_json(text)
    if text not in log.LEVELS:
        raise BadRequestError(
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
    """Quote an invalid value for an error message, on one line and shortened."""
    return repr(text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}…")


def _status(request: DebugRequest) -> views.Overview:
    return views.overview(request.status, request.now)


def _devices(request: DebugRequest) -> dict[str, Any]:
    inventory = request.status.inventory
    return {
        "simulated": views.is_simulated(request.status),
        "driver_version": inventory.driver_version,
        "cuda_version": inventory.cuda_version,
        "inventory_version": inventory.version,
        "inventory_taken": when(request.status.inventory_at, request.now),
        "usage_taken": when(request.status.usage_at, request.now),
        "nvml": views.nvml(request.status, request.now),
        "failures": inventory.failures,  # GPUs that did not answer when they were listed
        "gpus": views.gpus(request.status, request.now),
    }


def _ledger(request: DebugRequest) -> dict[str, Any]:
    ledger = request.status.ledger
    return {
        "revision": ledger.revision,
        # when it was last compared with the kubelet's records
        "verified": when(ledger.verified_at, request.now),
        "drift_total": ledger.drift_total,
        "drift_last": ledger.drift_last,
        # ids in the kubelet's records that this node does not offer
        "unknown_ids": ledger.unknown_ids,
        # device → how many containers may share it
        "max_holders": ledger.capacity,
        # resource → how many of its ids are free and healthy
        "ids_free": ledger.free,
        # resource → what new containers can still get of each device
        "rooms": ledger.rooms,
        # devices of which schedulers have promised more compute or shares than there are
        "scheduler_overcommitted": ledger.overcommitted,
        # GPU → the family that it serves, and the pods that wait for it
        "uses": {use.gpu: uses.use_view(use, request.now) for use in ledger.uses},
        # resource → how many of its ids are not granted now, and why
        "held_back": {
            resource: uses.held_back(request.status, resource) for resource in ledger.held_back
        },
        "grants": views.grants(request.status, request.now),
    }


def _allocations(request: DebugRequest) -> dict[str, Any]:
    return allocations.answer(
        request.status, request.now, _pod_asked_for(request) if "pod" in request.query else None
    )


def _explain(request: DebugRequest) -> explain.Explanation | dict[str, Any]:
    if "pod" not in request.query:
        if "text" in request.query:
            raise BadRequestError("text is for one pod; write ?text&pod=NAMESPACE/NAME")
        return {"ask": "?pod=NAMESPACE/NAME", "pods": explain.pods(request.status)}
    return explain.explain(request.status, request.now, _pod_asked_for(request))


def _pod_asked_for(request: DebugRequest) -> str:
    pod = request.query["pod"]
    if not _POD.match(pod):
        raise BadRequestError(
            f"pod {_echo(pod)} is not understood; write ?pod=NAMESPACE/NAME, for example "
            "?pod=default/train-0"
        )
    return pod


def _pods(request: DebugRequest) -> dict[str, Any]:
    return {
        "pods": views.pods(request.status, request.now),
        **cluster.watched_pods(request.status, request.now),
    }


def _mps(request: DebugRequest) -> dict[str, Any]:
    return {"daemons": [shown(daemon, request.now) for daemon in request.status.mps]}


def _resources(request: DebugRequest) -> dict[str, Any]:
    return {
        "kubelet": shown(request.status.kubelet, request.now),
        "resources": views.resources(request.status, request.now),
        # resource → why it has no plugin server
        "withheld": views.withheld(request.status),
        # problems that some pods will have with offered resources
        "cautions": list(request.status.binding.cautions),
    }


def _events(request: DebugRequest) -> dict[str, Any]:
    since = _since(request.query.get("since"), request.now)
    name = request.query.get("event")
    limit = _limit(request.query.get("limit"))
    matching = [
        entry
        for entry in request.status.events
        if entry.at >= since
        and (name is None or entry.event == name or entry.event.startswith(f"{name}."))
    ]
    newest = matching if limit is None else matching[-limit:]
    return {
        "kept": len(request.status.events),
        "matching": len(matching),
        "events": [
            {
                **msgspec.to_builtins(when(entry.at, request.now)),
                "event": entry.event,
                "facts": entry.facts,
            }
            for entry in newest
        ],
    }


def _since(text: str | None, now: float) -> float:
    """Parse the parameter ``since`` into Unix seconds; 0 if it is missing.

    It may be a time in ISO 8601 (UTC by default), Unix seconds, or an age such as ``10m``.
    """
    if text is None:
        return 0.0
    if age := _AGE.match(text):
        return now - int(age[1]) * _UNIT_SECONDS[age[2]]
    if _UNIX_SECONDS.match(text):
        return float(text)
    try:
        # In a query, the "+" of "…T12:00:00+01:00" means a space, unless it is escaped. With curl,
        # people rarely escape it.
        at = dt.datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    except ValueError:
        raise BadRequestError(
            f"since {_echo(text)} is not understood; write an age (30s, 10m, 2h, 1d), a time "
            "(2026-01-31T12:00:00Z) or unix seconds"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=dt.UTC)).timestamp()


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise BadRequestError(
            f"limit {_echo(text)} is not understood; write how many of the newest events you want, "
            "1 or more"
        )
    return int(text)


def _config(request: DebugRequest) -> dict[str, Any]:
    return {
        "problem": "\n".join(request.status.config_problems),
        "needs_restart": request.status.config_needs_restart,
        # which of the named configurations is chosen, and why
        "named": request.status.config_named,
        "binding": binding.binding_view(request.status.binding, request.now),
        "cdi": views.cdi(request.status.cdi, request.now),
        **_plugin_file_settings(request.status.binding),
        # namespace/name of the ConfigMap that was read: settings of a replaced plugin
        "config_map": request.status.cluster.config_map,
        "file_problems": request.status.binding.file_problems,  # in the replaced plugins' files
        "values": {
            key: {"value": value, "from": origin}
            for key, (value, origin) in sorted(request.status.config.items())
        },
    }


def _plugin_file_settings(status: BindingStatus) -> dict[str, Any]:
    """Return the settings in force of each family that reads files of the plugin that it
    replaces, and the origin of each setting.
    """
    answer: dict[str, Any] = {}
    for family in FAMILIES:
        if family.files:
            # `attribute`: the family's name with underscores
            answer[family.settings.attribute] = status.in_force.get(family.name, {})
            answer[f"{family.settings.attribute}_from"] = status.origins.get(family.name, {})
    return answer


def _tasks(request: DebugRequest) -> dict[str, Any]:
    now = request.now
    return {
        "loop_lag_seconds": request.status.loop_lag_seconds,
        "loop_lag_max_seconds": request.status.loop_lag_max_seconds,
        "nvml": views.nvml(request.status, now),
        "tasks": [
            {**shown(task, now), "stuck_seconds": task.stuck_for(now)}
            for task in request.status.tasks
        ],
    }


def _log_level(_: DebugRequest) -> dict[str, Any]:
    return {"level": log.current_level(), "levels": log.LEVELS}


def _index(_: DebugRequest) -> dict[str, Any]:
    return {
        "paths": [
            {
                "path": entry.path,
                "about": entry.description,
                "parameters": [*entry.parameters, "pretty"],
            }
            for entry in PATHS
            if entry.path != "/debug/"
        ]
    }


PATHS: tuple[DebugPath, ...] = (
    DebugPath("/debug/", "This list.", (), _index),
    DebugPath(
        "/debug/status",
        "The whole node on one page: what `vgpu-agent status` prints (text).",
        TEXT,
        _status,
        page.as_text,
    ),
    DebugPath(
        "/debug/devices",
        "Every GPU: health with its reason, usage, topology, and the holders of its shares (text).",
        TEXT,
        _devices,
        page.devices,
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
        "Every grant with its evidence, grants whose container the kubelet's records do not name "
        "yet, and refused starts: of all pods, or of one (pod=namespace/name).",
        ("pod",),
        _allocations,
    ),
    DebugPath(
        "/debug/explain",
        "The reason why a pod does not start, or the GPU that it has, with the evidence "
        "(pod=namespace/name; text).",
        ("pod", *TEXT),
        _explain,
        page.explained,
    ),
    DebugPath(
        "/debug/pods",
        "The holders of each GPU by pod, and the pods of this node in the API server (text).",
        TEXT,
        _pods,
        page.pods,
    ),
    DebugPath(
        "/debug/cluster",
        "The API server: connection, watches, writers, requests, and the data that is kept for a "
        "restart during an outage.",
        (),
        lambda request: cluster.answer(request.status, request.now),
    ),
    DebugPath(
        "/debug/resources",
        "Each plugin server: registration, stream, sent ids, Allocate calls; and the kubelet.",
        (),
        _resources,
    ),
    DebugPath(
        "/debug/mps",
        "The MPS control daemons: limits in force, clients, restarts, problems.",
        (),
        _mps,
    ),
    DebugPath(
        "/debug/events",
        "The latest events and decisions, a thousand at most (since=10m, event=gpu.unhealthy, "
        "limit=20; text).",
        ("since", "event", "limit", *TEXT),
        _events,
        page.events,
    ),
    DebugPath(
        "/debug/config",
        "Each setting in force with its origin; early or late binding, with the reason.",
        (),
        _config,
    ),
    DebugPath(
        "/debug/tasks",
        "The agent's loops: state, restarts, heartbeats; and the NVML call that hangs.",
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
