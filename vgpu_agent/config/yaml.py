"""YAML without its traps: the tree that `reading` walks, each value with its line.

PyYAML's own loaders let a second key of the same name win, read ``yes``, ``on``, ``012`` and
``1:30`` as something other than text, and expand nine lines into a billion with aliases. Here a
plain scalar has the type that it has in JSON, or is text. A key occurs once. Anchors, aliases, tags
and further documents are refused. Only PyYAML's events are used, so depth and size can be bounded
here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import yaml

from vgpu_agent.config.problems import shown_key

if TYPE_CHECKING:
    from collections.abc import Iterator

Scalar = str | int | float | bool | None

# Our schema is five levels deep and has some hundred keys; the bounds keep a megabyte of junk from
# taking seconds and a hundred MiB.
_DEEPEST = 32
_MAX_VALUES = 10_000
# Characters that YAML forbids in a text, NUL among them.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
# No key takes a number with more characters. int() would refuse it with a text about its own limit.
_LONGEST_NUMBER = 300
_WORDS: dict[str, Scalar] = {"": None, "null": None, "true": True, "false": False}

# The C parser where PyYAML was built with it: a megabyte of junk is refused in milliseconds instead
# of seconds.
_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Fault(NamedTuple):
    """Something that YAML or we forbid: 1-based line, dotted path (may be empty), sentence."""

    line: int
    path: str
    text: str


class Node(msgspec.Struct):
    """A value and its 1-based line; for a member of a mapping the line of its key."""

    value: Scalar | dict[str, Node] | list[Node]
    line: int

    @property
    def plain(self) -> Any:
        """The value without its line numbers."""
        if isinstance(self.value, dict):
            return {name: member.plain for name, member in self.value.items()}
        if isinstance(self.value, list):
            return [member.plain for member in self.value]
        return self.value


class _RefusedError(Exception):
    """The text cannot be read further."""

    def __init__(self, line: int, path: str, text: str) -> None:
        self.fault = Fault(line, path, text)
        super().__init__(text)


class _Open(msgspec.Struct):
    """A mapping or list that is being read. The value of ``key`` comes next; with ``discard`` it is
    dropped, because the mapping has the key already.
    """

    node: Node
    path: str
    key: str | None = None
    key_line: int = 0
    discard: bool = False


def read(content: bytes) -> tuple[Node | None, list[Fault]]:
    """Parse like `parse`, but the content of a file, which must be UTF-8."""
    try:
        return parse(content.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        return None, [
            Fault(line, "", f"is not UTF-8 (byte 0x{content[err.start]:02x}); save it as UTF-8")
        ]


def parse(text: str, *, max_values: int = _MAX_VALUES) -> tuple[Node | None, list[Fault]]:
    """Return the one document in ``text``, None when there is nothing in it or it cannot be read,
    and everything that is wrong with its form.

    Args:
        text: the text of the document.
        max_values: how many keys and values it may have.
    """
    if forbidden := _FORBIDDEN.search(text):
        line = text.count("\n", 0, forbidden.start()) + 1
        return None, [
            Fault(
                line,
                "",
                f"contains the control character U+{ord(forbidden[0]):04X}; expected plain text",
            )
        ]
    faults: list[Fault] = []
    try:
        return _read(_events(text), faults, max_values), faults
    except _RefusedError as refused:
        return None, [*faults, refused.fault]


def kubernetes_object(root: Node) -> Fault | None:
    """Describe the fault of a document that is a whole ConfigMap or another object; None for one
    that is not.
    """
    members = root.value if isinstance(root.value, dict) else {}
    kind = members.get("kind")
    if kind is None or not isinstance(kind.value, str) or "apiVersion" not in members:
        return None
    found = shown_key(kind.value)
    return Fault(
        kind.line,
        "kind",
        f"{found} is an object of Kubernetes; give the text below one key of its data, as a file "
        "of its own",
    )


def _events(text: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=_Loader)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        raise _RefusedError(
            mark.line + 1 if mark else 1, "", f"not YAML: {_sentence(err)}"
        ) from err
    except yaml.YAMLError as err:
        raise _RefusedError(1, "", f"not YAML: {' '.join(str(err).split())}") from err


def _sentence(err: yaml.MarkedYAMLError) -> str:
    return (
        ", ".join(" ".join(part.split()) for part in (err.problem, err.context) if part)
        or "cannot be read"
    )


def _read(events: Iterator[Any], faults: list[Fault], max_values: int) -> Node | None:
    root: Node | None = None
    stack: list[_Open] = []
    documents = 0
    for number, event in enumerate(events):
        line = event.start_mark.line + 1
        if number > max_values:
            raise _RefusedError(
                line, "", f"more than {max_values} keys and values; no configuration has so many"
            )
        match event:
            case yaml.DocumentStartEvent():
                documents += 1
                if documents > 1:
                    raise _RefusedError(line, "", "a second document begins here; expected one")
            case yaml.AliasEvent():
                raise _RefusedError(
                    line,
                    _path_of_next(stack),
                    f"alias *{event.anchor} is not supported, write the value out",
                )
            case yaml.ScalarEvent() | yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                _refuse_decoration(event, line, _path_of_next(stack))
                root = _enter(event, line, stack, faults) or root
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                stack.pop()
    return None if root is not None and root.value is None else root


def _refuse_decoration(event: Any, line: int, path: str) -> None:
    if event.anchor is not None:
        raise _RefusedError(
            line, path, f"anchor &{event.anchor} is not supported, write the value out"
        )
    if event.tag is not None:
        raise _RefusedError(
            line, path, f"tag {shown_key(event.tag)} is not supported, leave it out"
        )


def _enter(event: Any, line: int, stack: list[_Open], faults: list[Fault]) -> Node | None:
    """Put the value that begins with ``event`` in its place; return it when it is the root."""
    parent = stack[-1] if stack else None
    is_scalar = isinstance(event, yaml.ScalarEvent)
    if parent is not None and isinstance(parent.node.value, dict) and parent.key is None:
        if not is_scalar:
            raise _RefusedError(
                line, parent.path, "a mapping or list stands where a key is expected"
            )
        _take_key(parent, event.value, line, faults)
        return None
    path = _path_of_next(stack)
    value: Any = (
        _scalar(event) if is_scalar else {} if isinstance(event, yaml.MappingStartEvent) else []
    )
    node = Node(value, line)
    if parent is not None:
        _attach(parent, node)
    if not is_scalar:
        if len(stack) >= _DEEPEST:
            raise _RefusedError(line, "", f"nested deeper than {_DEEPEST} levels")
        stack.append(_Open(node, path))
    return node if parent is None else None


def _take_key(parent: _Open, key: str, line: int, faults: list[Fault]) -> None:
    members = parent.node.value
    if isinstance(members, dict) and (first := members.get(key)) is not None:
        path = f"{parent.path}.{shown_key(key)}" if parent.path else shown_key(key)
        faults.append(
            Fault(line, path, f"given twice, first on line {first.line}; keep one of them")
        )
        parent.discard = True
    parent.key, parent.key_line = key, line


def _attach(parent: _Open, node: Node) -> None:
    if isinstance(parent.node.value, list):
        parent.node.value.append(node)
    elif isinstance(parent.node.value, dict) and parent.key is not None:
        node.line = parent.key_line
        if not parent.discard:
            parent.node.value[parent.key] = node
        parent.key, parent.discard = None, False


def _path_of_next(stack: list[_Open]) -> str:
    if not stack:
        return ""
    parent = stack[-1]
    if isinstance(parent.node.value, list):
        return f"{parent.path}[{len(parent.node.value)}]"
    if parent.key is None:
        return parent.path
    return f"{parent.path}.{shown_key(parent.key)}" if parent.path else shown_key(parent.key)


def _scalar(event: Any) -> Scalar:
    text: str = event.value
    if event.style not in {None, ""}:
        return text  # quoted or a block: always text
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INTEGER.match(text):
            return int(text)
        if _NUMBER.match(text):
            return float(text)
    return text
