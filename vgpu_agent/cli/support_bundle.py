"""``vgpu-agent support-bundle``: all that a bug report needs, in one archive.

Each part is collected in a thread with a time limit. A part that fails is a line of the manifest,
because a bundle is wanted most where something does not work. The parts are in memory until the
archive is written, so each of them and their sum are bounded while they are collected: in the
agent's pod this process shares the agent's memory limit.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import importlib.metadata
import io
import os
import platform
import re
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent import __version__
from vgpu_agent.cli import debug_address, doctor, node_checks
from vgpu_agent.config import options
from vgpu_agent.errors import AgentError, ConfigError, ListenError
from vgpu_agent.kubelet.checkpoint import read_checkpoint
from vgpu_agent.redaction import HIDDEN, redacted
from vgpu_agent.web.address import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.web.address import Address

_MIB = 1024 * 1024
_MAX_PART_BYTES = 4 * _MIB
_MAX_TOTAL_BYTES = 24 * _MIB
_MAX_FILES = 200  # CDI specs; a node has a few, and one for each grant
_PART_SECONDS = 15.0  # for one part, unless --timeout gives another time
_ASK_SECONDS = 5.0  # for one answer of the agent
# doctor has a time limit for each of its checks
_DOCTOR_SECONDS = 90.0
_MANIFEST = "MANIFEST.txt"
_CUT = b"\n(cut here)\n"  # the end of a part that was too large
_INDEX = "/debug/"  # lists the other paths
_PROBES = ("/livez?verbose", "/readyz?verbose")
# Values of keys with such names, in files that people write. Paths are no secrets.
_SECRET_LINE = re.compile(
    r"(?i)(?P<key>[^\n:=]*(?:password|passwd|secret|token|api_?key|credential)\w*[\"']?\s*[:=]\s*)"
    r"(?P<value>.*)"
)
_PATH_OR_HIDDEN = re.compile(r"[\"']?/|\(hidden\)")
_KEY_OF_ITEM = re.compile(r"\s*(?:-\s+)*")  # where the key of a line of YAML begins
_SECRET_IN_BRACES = re.compile(
    r"(?i)(?P<key>[{,]\s*[\"']?\w*(?:password|passwd|secret|token|api_?key|credential)\w*[\"']?\s*:"
    r"\s*)(?!\s*[\"']?/)[^\s,}][^,}\n]*"
)
_EXAMPLES = """examples:
  vgpu-agent support-bundle                              into a file in this directory
  vgpu-agent support-bundle --hide-names --output report.tar.gz
  kubectl -n vgpu-agent exec AGENT -- vgpu-agent support-bundle --output - > report.tar.gz
  kubectl vgpu bundle                                    of all nodes, with the agents' logs

The manifest that is printed lists the parts, and those that could not be collected. It is part
of the archive. The exit status is 0 when the archive was written."""

# Labels of metrics, and keys of log lines in JSON, whose values are names.
_LABELS = re.compile(
    r'\b(?P<key>namespace|pod|podnamespace|podname)(?P<sign>"?\s*[=:]\s*)"(?P<value>[^"\\]*)"'
)
# Keys in JSON whose values are names, and those whose values are one or several ``namespace/pod``.
_NAME_KEYS = frozenset({"namespace", "pod", "name", "pod_name", "podnamespace", "podname"})
_LIST_KEYS = frozenset({"pod", "pods", "holders", "holder", "waiting", "pod_name"})
_POD = re.compile(
    r"(?P<namespace>[a-z0-9][a-z0-9-]*)/(?P<name>[a-z0-9][a-z0-9.-]*)(?:/[a-z0-9-]+)?\Z"
)
# Names that are replaced in running text also without their namespace. Shorter names, and those
# that are plain words, would be found in other texts as well.
_DISTINCT = re.compile(r"(?=.*[-.0-9]).{4,}\Z")


class Part:
    """One file of the archive.

    Attributes:
        name: its path in the archive.
        content: its content; None when it could not be collected.
        note: why it could not be collected, or that it was cut; empty for neither.
        seconds: how long it took to collect it.
    """

    def __init__(self, name: str, content: bytes | None, note: str, seconds: float) -> None:
        self.name, self.content, self.note, self.seconds = name, content, note, seconds


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "support-bundle",
        help="collect all that a bug report needs in one archive",
        description=(
            "Collect the agent's state, metrics, configuration, versions, CDI specs, the summary "
            "of the kubelet's checkpoint and the findings of doctor in one archive (tar.gz)."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the archive, - for standard output (default: a new file in this directory)",
    )
    parser.add_argument(
        "--hide-names",
        action="store_true",
        help="replace the names of pods and namespaces with numbered ones",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        help="add the end of this file, the agent's log; - for standard input",
    )
    debug_address.add_timeout(parser, "how long one part may take", _PART_SECONDS)
    options.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the archive and print the manifest.

    Raises:
        ConfigError: an address makes no sense.
        AgentError: the archive cannot be written.
    """
    output: str | None = arguments.output
    if output == "-" and sys.stdout.isatty():
        raise ConfigError(["--output -: standard output is a terminal; send it into a file"])
    flags = options.given(arguments)
    address = debug_address.address(flags.pop("--debug-listen", None))
    public = flags.pop("--listen", None)
    collected = _parts(flags, address, public, arguments.log, timeout_seconds=arguments.timeout)
    parts = list(_within_the_sum(collected))
    if arguments.hide_names:
        Names.of(parts).hide(parts)
    manifest = _manifest(parts, names_hidden=arguments.hide_names)
    archive = _archive([Part(_MANIFEST, manifest.encode(), "", 0.0), *parts])
    if output == "-":
        sys.stdout.buffer.write(archive)
        sys.stdout.buffer.flush()
        print(manifest, end="", file=sys.stderr)
        return 0
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = output or f"vgpu-agent-{os.uname().nodename.lower()}-{moment}.tar.gz"
    try:
        # The archive has the names of tenants, so it is for its owner alone; a file that exists is
        # replaced only where it was named.
        flag = os.O_TRUNC if output else os.O_EXCL
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
        with open(descriptor, "wb") as file:
            file.write(archive)
    except OSError as err:
        raise AgentError(
            f"cannot write {path}: {err.strerror}; name another place with --output FILE, or write "
            "to standard output with --output -"
        ) from err
    print(f"{manifest}\n{path}: {len(archive)} bytes")
    return 0


# ---- the parts


def _parts(
    flags: Mapping[str, str],
    address: Address,
    public: str | None,
    log: str | None,
    *,
    timeout_seconds: float,
) -> Iterator[Part]:
    """Yield each part, the small and important ones first.

    Args:
        flags: those that were given, without those of the two addresses.
        address: where the agent answers ``/debug``.
        public: the address of its metrics and probes (``--listen``); None for that of the settings.
        log: the file of ``--log``; None without one.
        timeout_seconds: for each part.
    """
    collect = functools.partial(_part, timeout_seconds=timeout_seconds)
    yield collect("versions.json", _versions)
    agent, _ = doctor.running_agent(address)
    settings, _ = doctor.settings_in_force(flags, address, agent=agent is not None)
    yield _part(
        "doctor.json",
        lambda: _json(list(doctor.examine(flags, address))),
        timeout_seconds=_DOCTOR_SECONDS,
    )
    # `failing`: the answer of a probe that fails is an answer, too
    ask = functools.partial(debug_address.fetch, timeout_seconds=_ASK_SECONDS, failing=True)
    index = collect("debug/index.json", lambda: ask(address, _INDEX))
    yield index
    for path in _debug_paths(index.content):
        name = f"{path.removeprefix('/')}.json"
        yield collect(name, functools.partial(ask, address, f"{path}?pretty"))
    for path in ("/metrics", *_PROBES):
        name = f"{path.partition('?')[0].removeprefix('/')}.txt"
        yield collect(name, functools.partial(_ask_public, public or settings.listen, path))
    if (file := doctor.config_file(flags)) is not None:
        yield collect("config.yaml", lambda: _without_secrets(_beginning_of(file)))
    yield collect("kubelet-checkpoint.json", lambda: _checkpoint(settings))
    yield from _cdi_specs(settings, collect)
    if log is not None:
        yield collect("agent.log", lambda: _end_of(log))


def _part(name: str, collected: Callable[[], bytes], *, timeout_seconds: float) -> Part:
    """Collect a part in a thread, and give up on one that blocks: it ends with the process."""
    began, done = time.monotonic(), list[tuple[bytes | None, str]]()

    def in_thread() -> None:
        try:
            done.append((collected(), ""))
        except (AgentError, OSError) as err:
            done.append((None, " ".join(str(err).split())))
        except Exception as err:  # noqa: BLE001 - the other parts must not suffer from a bug in one
            done.append((None, f"{type(err).__name__}: {err}"))

    thread = threading.Thread(target=in_thread, name=f"bundle: {name}", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    content, note = done[0] if done else (None, f"not there within {timeout_seconds:g} s")
    if content is not None:
        # `redacted`: without what looks like credentials
        content = redacted(content.decode(errors="replace")).encode()
        if len(content) > _MAX_PART_BYTES:
            note = f"cut after {_MAX_PART_BYTES // _MIB} of {len(content) / _MIB:.1f} MiB"
            content = content[:_MAX_PART_BYTES] + _CUT
    return Part(name, content, redacted(note), time.monotonic() - began)


def _within_the_sum(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts, without the content of those that would make the archive too large."""
    total = 0
    for part in parts:
        size = len(part.content or b"")
        if total + size > _MAX_TOTAL_BYTES:
            part.content = None
            part.note = f"left out: the bundle would exceed {_MAX_TOTAL_BYTES // _MIB} MiB"
        else:
            total += size
        yield part


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _versions() -> bytes:
    names = sorted(
        f"{found.metadata['Name']} {found.version}" for found in importlib.metadata.distributions()
    )
    return _json(
        {
            "vgpu_agent": __version__,
            "commit": os.environ.get("VGPU_AGENT_COMMIT", ""),
            "python": sys.version,
            "kernel": platform.release(),
            "machine": platform.machine(),
            "system": platform.platform(),
            "packages": names,
        }
    )


def _debug_paths(index: bytes | None) -> list[str]:
    """Return the paths that the agent lists, without the one that is the list."""
    try:
        listed = msgspec.json.decode(index or b"{}").get("paths", [])
        paths = [entry["path"] for entry in listed]
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return []
    return [
        path for path in paths if isinstance(path, str) and re.fullmatch(r"/debug/[a-z_-]+", path)
    ]


def _ask_public(listen: str, path: str) -> bytes:
    """Return the agent's answer at the address of metrics and probes."""
    try:
        # `reachable`: the loopback address where the agent listens on all
        found = parse(listen).reachable
    except ListenError as err:
        raise AgentError(str(err)) from err
    if not found.port:
        raise AgentError("the agent took a free port (listen: port 0); name it with --listen")
    return debug_address.fetch(found, path, _ASK_SECONDS, failing=True)


def _beginning_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_PART_BYTES)


def _end_of(path: str) -> bytes:
    if path == "-":
        kept = b""
        while piece := sys.stdin.buffer.read(_MIB):
            kept = (kept + piece)[-_MAX_PART_BYTES:]
        return kept
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_PART_BYTES))
        return file.read(_MAX_PART_BYTES)


def _without_secrets(content: bytes) -> bytes:
    """Return a YAML file without the values of keys that sound secret."""
    text = content.decode(errors="replace")
    text = _SECRET_IN_BRACES.sub(lambda found: f"{found['key']}{HIDDEN}", text)
    return "".join(_without_secret_lines(text.splitlines(keepends=True))).encode()


def _without_secret_lines(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a YAML file without the values of keys that sound secret: on the line of
    the key, and on the lines below that belong to it.
    """
    number = 0
    while number < len(lines):
        line, number = lines[number], number + 1
        found = _SECRET_LINE.match(line)
        if found is None or _PATH_OR_HIDDEN.match(found["value"]):
            yield line
            continue
        below = 0
        if not line.lstrip().startswith("#"):
            has_value = bool(found["value"].partition("#")[0].strip())
            below = _lines_of_value(lines[number:], _indentation(line), has_value=has_value)
            number += below
        yield f"{found['key'].rstrip()} {HIDDEN}\n" if found["value"] or below else line


def _indentation(line: str) -> int:
    """Return the column in which the key of the line begins."""
    found = _KEY_OF_ITEM.match(line)
    return found.end() if found else 0


def _lines_of_value(lines: list[str], indentation: int, *, has_value: bool) -> int:
    """Count the lines that belong to the value of a key: those that are indented further, and the
    items of a list, which need not be.

    Args:
        lines: those below the key.
        indentation: of the key.
        has_value: there is a value on the key's own line, so that no list follows.
    """
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue  # part of the value only if more of it follows
        own = len(line) - len(line.lstrip(" "))
        item = not has_value and own == indentation and line.lstrip().startswith("- ")
        if own <= indentation and not item:
            break
        count = number
    return count


def _checkpoint(settings: Settings) -> bytes:
    """Summarise the kubelet's checkpoint: it may have tens of thousands of ids."""
    path = settings.kubelet.checkpoint_path
    size = path.stat().st_size
    held: dict[str, collections.Counter[str]] = {}
    for entry in asyncio.run(read_checkpoint(path)):
        holder = f"{entry.pod_uid}/{entry.container_name}"
        held.setdefault(entry.resource_name, collections.Counter())[holder] += len(entry.ids)
    return _json(
        {
            "path": str(path),
            "bytes": size,
            "modified_seconds_ago": round(time.time() - path.stat().st_mtime, 1),
            "registered_ids": node_checks.registered_resources(path),
            "held_ids": held,
        }
    )


def _cdi_specs(settings: Settings, collect: Callable[..., Part]) -> Iterator[Part]:
    """Yield a part for each CDI spec of the node, by ``collect``, which is `_part` with its time
    limit.
    """
    for directory in dict.fromkeys((Path(settings.binding.cdi_directory), Path("/etc/cdi"))):
        try:
            paths = sorted(path for path in directory.iterdir() if path.is_file())
        except FileNotFoundError:
            continue
        except OSError as err:
            yield Part(f"cdi{directory}", None, err.strerror or str(err), 0.0)
            continue
        for path in paths[:_MAX_FILES]:
            yield collect(f"cdi{path}", functools.partial(_beginning_of, str(path)))
        if len(paths) > _MAX_FILES:
            note = f"{len(paths) - _MAX_FILES} more files were left out"
            yield Part(f"cdi{directory}", None, note, 0.0)


# ---- names


class Names:
    """Names of pods and namespaces, with the numbered names that replace them.

    State: the names that were found in the parts; names are only added.
    """

    def __init__(self) -> None:
        self._namespaces: dict[str, str] = {}
        self._pods: dict[tuple[str, str], str] = {}
        self._bare: dict[str, str] = {}  # pod without its namespace → numbered name

    @classmethod
    def of(cls, parts: list[Part]) -> Names:
        """Find the names in all parts."""
        names = cls()
        for part in parts:
            document = _decoded(part)
            if document is not None:
                names._learn(document)
            elif part.content:
                names._learn_labels(part.content.decode(errors="replace"))
        return names

    def hide(self, parts: list[Part]) -> None:
        """Replace the names in all parts and notes."""
        for part in parts:
            part.note = self._in_text(part.note)
            document = _decoded(part)
            if document is not None:
                part.content = _json(self._hidden(document))
            elif part.content:
                text = _LABELS.sub(self._label, part.content.decode(errors="replace"))
                part.content = self._in_text(text).encode()

    def _namespace(self, name: str) -> str:
        """Return the numbered name of the namespace, a new one where it has none."""
        return self._namespaces.setdefault(name, f"namespace-{len(self._namespaces) + 1}")

    def _pod(self, namespace: str, name: str) -> str:
        found = self._pods.setdefault((namespace, name), f"pod-{len(self._pods) + 1}")
        self._bare.setdefault(name, found)
        return found

    def _learn(self, value: Any) -> None:
        """Note the names in a JSON value and below it."""
        if isinstance(value, list):
            for item in value:
                self._learn(item)
        elif isinstance(value, dict):
            namespace = value.get("namespace")
            if isinstance(namespace, str) and namespace:
                self._namespace(namespace)
                for name in (value.get("pod"), value.get("name")):
                    if isinstance(name, str) and name and "/" not in name:
                        self._pod(namespace, name)
            for key, item in value.items():
                if key in _LIST_KEYS:
                    self._learn_pods(item)
                self._learn(item)

    def _learn_pods(self, value: Any) -> None:
        """Note the names in ``namespace/name`` and ``namespace/name/container``."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (found := _POD.match(text)):
                self._namespace(found["namespace"])
                self._pod(found["namespace"], found["name"])

    def _learn_labels(self, text: str) -> None:
        for line in text.splitlines():
            # by key without ``pod``: a pod's name is under "" or ``name``
            labels = {
                found["key"].removeprefix("pod"): found["value"] for found in _LABELS.finditer(line)
            }
            for value in labels.values():
                if "/" in value:  # the log has a pod and its namespace in one field
                    self._learn_pods(value)
            namespace, pod = labels.get("namespace", ""), labels.get("") or labels.get("name", "")
            if namespace:
                self._namespace(namespace)
                if pod:
                    self._pod(namespace, pod)

    def _label(self, found: re.Match[str]) -> str:
        return f'{found["key"]}{found["sign"]}"{self._named(found["value"])}"'

    def _named(self, value: str) -> str:
        """Replace a value that is a name, alone or with its namespace."""
        exact = self._exact(value)
        return exact if exact != value else self._in_text(value)

    def _exact(self, value: str) -> str:
        """Replace a value that is a name as a whole."""
        return self._bare.get(value) or self._namespaces.get(value) or value

    def _hidden(self, value: Any, key: str = "") -> Any:
        """Return a JSON value with the names in it replaced; ``key`` is that of the value."""
        if isinstance(value, dict):
            return {self._in_text(name): self._hidden(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self._hidden(item, key) for item in value]
        if isinstance(value, str):
            return self._exact(value) if self._is_name(key, value) else self._in_text(value)
        return value

    def _is_name(self, key: str, value: str) -> bool:
        """Tell whether the value under that key is a name that was found."""
        return key in _NAME_KEYS and self._exact(value) != value

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Names in running text: with their namespace, or alone where they can be nothing else."""
        texts = [f"{namespace}/{name}" for namespace, name in self._pods]
        texts += [name for name in (*self._bare, *self._namespaces) if _DISTINCT.match(name)]
        longest_first = sorted(texts, key=len, reverse=True)
        words = "|".join(map(re.escape, longest_first)) or r"(?!)"
        return re.compile(rf"(?<![\w.-])(?:{words})(?![\w-]|\.\w)")

    def _in_text(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._replacement(found[0]), text)

    def _replacement(self, text: str) -> str:
        namespace, slash, name = text.partition("/")
        if slash:
            return f"{self._namespace(namespace)}/{self._pod(namespace, name)}"
        return self._exact(text)


def _decoded(part: Part) -> Any:
    """Return the JSON of a part; None for another one, or one that was cut."""
    if part.content is None or not part.name.endswith(".json"):
        return None
    try:
        return msgspec.json.decode(part.content)
    except (msgspec.DecodeError, RecursionError):
        return None


# ---- the archive


def _manifest(parts: list[Part], *, names_hidden: bool) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    names = "hidden" if names_hidden else "shown"
    lines = [
        f"vgpu-agent {__version__}, support bundle of {moment}",
        f"credentials: hidden; names of pods and namespaces: {names}",
        "",
    ]
    width = max(len(part.name) for part in parts)
    for part in parts:
        size = "missing" if part.content is None else f"{len(part.content)}"
        lines.append(f"{part.name:{width}}  {size:>9}  {part.seconds:5.2f} s  {part.note}".rstrip())
    return "\n".join(lines) + "\n"


def _archive(parts: list[Part]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for part in parts:
            if part.content is None:
                continue
            member = tarfile.TarInfo(f"vgpu-agent-support/{part.name}")
            member.size, member.mtime, member.mode = len(part.content), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(part.content))
    return buffer.getvalue()
