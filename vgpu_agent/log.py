"""The agent's log: one JSON object per line on stderr,
the same shape for our own lines and those of libraries.

Set up once by the command line; every package asks `get` for a logger. Event names are fixed words
with a dot (``gpu.unhealthy``), never sentences with values in them, so that a log search written
today still works next year. Pods are ``namespace/name``.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO, cast

import msgspec
import structlog

from vgpu_agent.bounded import bounded
from vgpu_agent.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterator

    from structlog.typing import EventDict, ExcInfo, FilteringBoundLogger

# Of one line without its traceback; lines of the journal are bounded already.
_MAX_LINE_BYTES = 32 * 1024
_MAX_TRACEBACK_CHARACTERS = 32 * 1024
_MAX_FRAMES = 40  # of one traceback
_MAX_CAUSES = 8  # exceptions that led to one

LEVELS = ("debug", "info", "warning", "error")

# Libraries that log normal events at INFO: grpclib logs each cancelled request, as when the kubelet
# disconnects. kubernetes_asyncio logs what a credential plugin has written, which may be a token;
# `cluster` reports that the plugin failed.
_QUIET_LIBRARIES = {
    "grpclib": logging.WARNING,
    "asyncio": logging.WARNING,
    "aiohttp": logging.WARNING,
    "hpack": logging.WARNING,
    "kubernetes_asyncio": logging.CRITICAL,
}

# The limits of `RepeatedLines`: how many lines of one kind are written in each window of time.
_WINDOW_SECONDS = 60.0
# Enough for 110 pods that start, stop or are found by a restarted agent at once, with several
# useful lines each.
_MAX_OF_AN_EVENT = 600
_MAX_OF_A_LIBRARY = 20
# Events that any client of a socket can cause as often as it likes, with a smaller limit.
_AT_WILL = frozenset(
    {
        "web.bad_request",
        "web.connection_evicted",
        "web.failed",
        "web.not_accepted",
        "grpc.connection_closed",
        "registry.not_accepted",
        "webhook.denied",
        "webhook.failed",
        "webhook.too_large",
        "webhook.too_slow",
        "webhook.unreadable",
    }
)
_MAX_AT_WILL = 20
_MAX_KINDS = 512  # that are counted at a time
_LONGEST_TEMPLATE = 200  # characters of a library's message that tell its kind
_SUPPRESSED = "log.suppressed"  # the event of the line with the number of lines left out


def get(name: str) -> FilteringBoundLogger:
    """The logger of the module ``name``; its lines carry the name without the package."""
    return cast(
        "FilteringBoundLogger", structlog.stdlib.get_logger(name.removeprefix("vgpu_agent."))
    )


def configure(
    *,
    log_format: str = "json",
    level: str = "info",
    stream: TextIO | None = None,
    cache_loggers: bool = False,
) -> None:
    """Route every line of this process to ``stream`` (stderr by default).

    Args:
        log_format: ``json`` or ``console``.
        level: one of `LEVELS`.
        stream: where lines go; a test passes its own.
        cache_loggers: build each logger once instead of for every line. Only for a process that
            does not call this again; `set_level` still works.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            *_common_processors(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=cache_loggers,
    )
    last: list[Any]
    if log_format == "json":
        renamed = structlog.processors.EventRenamer("msg")
        last = [
            structlog.processors.ExceptionRenderer(_traceback),
            _within_bounds,
            renamed,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        console = structlog.dev.ConsoleRenderer(
            colors=(stream or sys.stderr).isatty(),
            timestamp_key="ts",
            exception_formatter=structlog.dev.plain_traceback,
        )
        # As text, so that the console shows it as it is and no library adds the values of variables
        # to it.
        last = [structlog.processors.format_exc_info, _within_bounds, console]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_common_processors(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_WithoutSecrets(formatter, is_json=log_format == "json"))
    handler.addFilter(RepeatedLines())
    root = logging.getLogger()
    root.handlers = [handler]
    set_level(level)
    for name, quiet in _QUIET_LIBRARIES.items():
        logging.getLogger(name).setLevel(quiet)


def writes_json_to_stderr() -> bool:
    """Tell whether `configure` has chosen JSON for this process, on stderr."""
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream is sys.stderr
        and isinstance(handler.formatter, _WithoutSecrets)
        and handler.formatter.is_json
        for handler in logging.getLogger().handlers
    )


def set_level(level: str) -> None:
    """Log ``level`` and above from now on.

    Raises:
        ValueError: the level is none of `LEVELS`; the message lists them.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not known; use one of {', '.join(LEVELS)}")
    logging.getLogger().setLevel(level.upper())


def current_level() -> str:
    """The level in force, as in `LEVELS`."""
    return logging.getLevelName(logging.getLogger().level).lower()


class _WithoutSecrets(logging.Formatter):
    """The formatter of every line, our own and those of libraries; hides secrets."""

    def __init__(self, inner: logging.Formatter, *, is_json: bool) -> None:
        super().__init__()
        self._inner = inner
        self.is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        return redacted(self._inner.format(record))


# Locals of frames hold request headers and file contents, so they are never shown.
_frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=_MAX_FRAMES)


def _traceback(exc_info: ExcInfo) -> list[dict[str, Any]]:
    """Return an exception as JSON, without locals, and with its texts cut."""
    stacks = _frames(exc_info)[:_MAX_CAUSES]
    for stack in stacks:
        for key in ("exc_value", "exc_notes"):
            if key in stack:
                stack[key] = bounded({key: stack[key]}, most_bytes=_MAX_LINE_BYTES)[0][key]
    return stacks


def _within_bounds(_: Any, __: str, event: EventDict) -> EventDict:
    """Keep a line within bounds. Its traceback is bounded separately;
    lines of the journal are bounded already.
    """
    if event.get("logger") == "journal":
        return event
    traceback = {key: event.pop(key) for key in ("exception",) if key in event}
    kept, _size = bounded(event, most_bytes=_MAX_LINE_BYTES)
    if (
        isinstance(text := traceback.get("exception"), str)
        and len(text) > _MAX_TRACEBACK_CHARACTERS
    ):
        half = _MAX_TRACEBACK_CHARACTERS // 2
        traceback["exception"] = f"{text[:half]}\n… ({len(text)} characters)\n{text[-half:]}"
    return {**kept, **traceback}


class RepeatedLines(logging.Filter):
    """A filter that passes the first lines of a kind in each window of time,
    and then one line with the number left out.

    The kind of our own line is its event; that of a library's line is its template and the
    exception. So a storm of one kind never hides another kind.

    State: how many lines of each kind passed and did not pass in its current window. A forgotten
    kind begins a new window.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, ...], _Window] = {}
        self._ends_at = float("inf")
        # any thread may log, and reporting what was left out logs as well
        self._counting = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether ``record`` is written."""
        with self._counting:
            return self._passes(record)

    def _passes(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now >= self._ends_at:
            self._report_ended(now)
        kind, most = _kind(record)
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= _MAX_KINDS:
                self._report_ended(float("inf"))
            window = self._windows[kind] = _Window(now + _WINDOW_SECONDS)
            self._ends_at = min(self._ends_at, window.ends_at)
        # `kind[1]`: the event
        if kind[1] == _SUPPRESSED or window.passed < most:
            window.passed += 1
            return True
        window.suppressed += 1
        return False

    def _report_ended(self, now: float) -> None:
        ended = {kind: window for kind, window in self._windows.items() if window.ends_at <= now}
        for kind in ended:
            del self._windows[kind]
        self._ends_at = min(
            (window.ends_at for window in self._windows.values()), default=float("inf")
        )
        for (logger, similar, *_), window in ended.items():
            if window.suppressed:
                get(__name__).warning(
                    _SUPPRESSED,
                    lines=window.suppressed,
                    of_logger=logger,
                    similar_to=similar,
                    seconds=_WINDOW_SECONDS,
                )


class _Window:
    """The lines of one kind since its window of time began: written, and left out."""

    __slots__ = ("ends_at", "passed", "suppressed")

    def __init__(self, ends_at: float) -> None:
        self.ends_at, self.passed, self.suppressed = ends_at, 0, 0


def _kind(record: logging.LogRecord) -> tuple[tuple[str, ...], int]:
    """Return the key that similar lines have in common, and how many such lines pass in a window.
    The key begins with the logger, and the event or the template.
    """
    if isinstance(record.msg, dict):
        event = str(record.msg.get("event", ""))
        return (
            record.name,
            event,
            record.levelname,
        ), _MAX_AT_WILL if event in _AT_WILL else _MAX_OF_AN_EVENT
    # asyncio puts sockets with their numbers into the later lines of a message.
    template = str(record.msg).partition("\n")[0][:_LONGEST_TEMPLATE]
    error = record.exc_info[1] if record.exc_info else None
    about = "" if error is None else f"{type(error).__name__} {getattr(error, 'errno', '')}"
    return (record.name, template, record.levelname, about), _MAX_OF_A_LIBRARY


class ChangeFilter:
    """A filter that tells new messages from repeated ones,
    so that what a loop finds in each round is logged only when it begins or changes.

    State: the last message about each subject, and when it was new.
    """

    def __init__(self, *, again_seconds: float = math.inf) -> None:
        """Count a repeated message as new again after ``again_seconds``;
        by default never.
        """
        self._again_seconds = again_seconds
        self._last: dict[Hashable, tuple[Hashable, float]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._last)

    def is_new(self, subject: Hashable, message: Hashable = "", *, now: float = 0.0) -> bool:
        """Take note of ``message`` at ``now`` (seconds of any clock);
        tell whether it is not the last one about ``subject``.
        """
        last, at = self._last.get(subject, (None, -math.inf))
        new = message != last or now - at >= self._again_seconds
        if new:
            self._last[subject] = (message, now)
        return new

    def forget(self, subject: Hashable) -> bool:
        """Forget ``subject``, whose next message is new again; tell whether there was one."""
        return self._last.pop(subject, None) is not None

    def keep_only(self, subjects: Container[Hashable]) -> None:
        """Forget all other subjects."""
        self._last = {subject: last for subject, last in self._last.items() if subject in subjects}


def _common_processors() -> list[Any]:
    """Return the processors of every line, our own and those of libraries."""
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]


def _to_json(event: EventDict, **_: object) -> str:
    # What a reader looks for first comes first.
    ordered = {key: event[key] for key in ("ts", "level", "msg", "logger") if key in event}
    return msgspec.json.encode({**ordered, **event}, enc_hook=repr).decode()
