"""The schema as a tree that can be walked: the accepted values of each key of `settings` and their
description.

`reading` walks it together with the YAML, `options` (flags and variables) looks types up in it,
`example`, ``config show`` and the documentation generator print it. So a key is described once, in
its annotation.
"""

from __future__ import annotations

import functools
import itertools
import re
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

from vgpu_agent.config import families
from vgpu_agent.config.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Struct = type[msgspec.Struct]

# What strconv.ParseBool of Go reads, because NVIDIA's plugin read PASS_DEVICE_SPECS with it.
_TRUE, _FALSE = {"1", "t", "T", "true", "TRUE", "True"}, {"0", "f", "F", "false", "FALSE", "False"}
# No key takes a number with more characters.
_LONGEST_NUMBER = 20
_DECIMAL = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})\Z", re.ASCII)


class NotAcceptedError(ValueError):
    """A value that its key does not accept; the message is the expectation alone
    (``an integer ≥ 1``).
    """


class Contradicted(NamedTuple):
    """The earlier item of a list that an item contradicts.

    Attributes:
        position: of the earlier item in the list, from 0.
        key: the key of the later item that the message is about.
        text: a sentence with ``{line}`` in the place of the earlier item's line.
    """

    position: int
    key: str
    text: str


class Key(msgspec.Struct, frozen=True):
    """One key of a section.

    Attributes:
        name: as in YAML.
        attribute: as in Python.
        annotation: the full type, with its constraints.
        section: the Struct below the key, None for a value.
        items: the Struct of a list's items, None when it is not a list of sections.
        default: the value without a setting; ``msgspec.NODEFAULT`` when it must be set.
        text: its text in the documentation.
        is_path: it is a path, which is made absolute if it comes from a flag or variable.
        complete_name: for the name of a resource, the function that gives the complete name and
            what is wrong with it ("" for nothing).
        can_be_omitted_with: for a list that must not be empty, the name of its section, which can
            be left out as a whole instead; else "".
        find_contradicted: for such a list, a function of an item and the items before it, which
            finds the one of these that the item contradicts, such as one of the same name.
        example: for a key without a default, its value in the example configuration; else None.
    """

    name: str
    attribute: str
    annotation: Any
    section: Struct | None
    items: Struct | None
    default: Any
    text: str
    is_path: bool
    complete_name: Callable[[str], tuple[str, str]] | None
    can_be_omitted_with: str
    find_contradicted: (
        Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Contradicted | None] | None
    )
    example: Any

    @property
    def expectation(self) -> str:
        """Describe the accepted values, as the end of "expected …"."""
        return _expectation(self.annotation)

    def accept(self, value: Any) -> Any:
        """Return ``value`` as the type of this key, which is not a section.

        Raises:
            NotAcceptedError: it is of another type, too large or small, or has the wrong form.
        """
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, str) and not word.isprintable() for word in words):
            raise NotAcceptedError("text without control characters")
        if isinstance(value, list) and _reads_numbers_as_text(self.annotation):
            value = [str(word) if type(word) is int else word for word in value]
        try:
            return msgspec.convert(value, self.annotation)
        except msgspec.ValidationError as err:
            raise NotAcceptedError(self.expectation) from err

    def accept_text(self, text: str) -> Any:
        """Return ``text`` of a flag or an environment variable as the type of this key.

        Raises:
            NotAcceptedError: as for `accept`.
        """
        if _bare(self.annotation) is bool:
            if text not in _TRUE | _FALSE:
                raise NotAcceptedError(self.expectation)
            return text in _TRUE
        if self.is_list:
            numbers = _holds_numbers(_bare(self.annotation))
            if numbers and text.startswith("[") and text.endswith("]"):  # as in "[] or [0]"
                text = text[1:-1]
            words = [word.strip() for word in text.split(",") if word.strip()]
            return self.accept([_number(word) for word in words] if numbers else words)
        if _bare(self.annotation) is int:
            return self.accept(_number(text))
        if _bare(self.annotation) is float:
            return self.accept(_decimal(text))
        return self.accept(text)

    @property
    def is_list(self) -> bool:
        """Tell whether it is a list of plain values, which flags and variables separate by
        commas.
        """
        return self.items is None and typing.get_origin(_bare(self.annotation)) is tuple

    @property
    def takes_lists(self) -> bool:
        """Tell whether a list of plain values may be right, alone or as one of several forms."""
        return self.is_list or any(
            typing.get_origin(_bare(part)) is tuple
            for part in typing.get_args(_bare(self.annotation))
        )

    @property
    def is_switch(self) -> bool:
        """Tell whether it is true or false, so that its flag may stand alone."""
        return _bare(self.annotation) is bool


@functools.cache
def keys(section: Struct) -> dict[str, Key]:
    """Return the keys of a section by their YAML names, in the order of `settings`."""
    return {field.encode_name: _key(field) for field in msgspec.structs.fields(section)}


# the options of every settings Struct
_STRICT: dict[str, Any] = {"frozen": True, "rename": "camel", "forbid_unknown_fields": True}


@functools.cache
def value_paths() -> dict[str, Key]:
    """Return every key that holds a value, by its dotted path, without the keys of list items."""

    def below(section: Struct, prefix: str) -> Iterator[tuple[str, Key]]:
        for key in keys(section).values():
            path = prefix + key.name
            if key.section is None:
                yield path, key
            else:
                yield from below(key.section, path + ".")

    return dict(below(root(), ""))


def section_text(section: Any) -> str:
    """Return the docstring of ``section`` as text without line breaks, however its source is
    wrapped.
    """
    return " ".join((section.__doc__ or "").split())


@functools.cache
def root() -> type[Settings]:
    """Return the type of the whole configuration: `Settings`, with a switch for each family, and
    the families' own sections.
    """
    base = type(Settings().families)
    switches = [
        (
            family.attribute,
            Annotated[bool, Meta(description=family.switch_text)],
            family.on_by_default,
        )
        for family in families.DECLARED
    ]
    own = msgspec.defstruct(
        "Families", switches, bases=(base,), namespace={"__doc__": base.__doc__}, **_STRICT
    )
    sections = itertools.chain.from_iterable(
        family.sections.items() for family in families.DECLARED
    )
    fields: list[Any] = [
        (name, kind, msgspec.field(default_factory=kind))
        for name, kind in (("families", own), *sections)
    ]
    whole = msgspec.defstruct(
        "Settings", fields, bases=(Settings,), namespace={"__doc__": Settings.__doc__}, **_STRICT
    )
    return cast("type[Settings]", whole)


def declare(family: families.FamilySettings) -> None:
    """Add a family's part. Called by `families.registry` before a configuration is read."""
    families.DECLARED.append(family)
    root.cache_clear()
    value_paths.cache_clear()


def values(settings: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of ``settings`` with its dotted path. An empty list is a value; of other
    lists each value in their items is one (``resources[0].name``).
    """
    for key in keys(type(settings)).values():
        value, path = getattr(settings, key.attribute), prefix + key.name
        if key.section is not None:
            yield from values(value, path + ".")
        elif key.items is not None and value:
            for index, item in enumerate(value):
                yield from values(item, f"{path}[{index}].")
        else:
            yield path, value


def _key(field: msgspec.structs.FieldInfo) -> Key:
    bare, metas = _bare(field.type), _metas(field.type)
    default = (
        field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    )
    item = typing.get_args(bare)[0] if typing.get_origin(bare) is tuple else None
    return Key(
        name=field.encode_name,
        attribute=field.name,
        annotation=field.type,
        section=bare if _is_struct(bare) else None,
        items=item if _is_struct(item) else None,
        default=default,
        text=next(
            (meta.description for meta in reversed(metas) if meta.description), section_text(bare)
        ),
        is_path=any((meta.extra or {}).get("path") for meta in metas),
        complete_name=_extra(metas, "complete_name", None),
        can_be_omitted_with=_extra(metas, "can_be_omitted_with", ""),
        find_contradicted=_extra(metas, "find_contradicted", None),
        example=next((meta.examples[0] for meta in metas if meta.examples), None),
    )


def _reads_numbers_as_text(annotation: Any) -> bool:
    """Tell whether a list may hold numbers that are names: the 0 of ``devices: [0]`` is an
    index.
    """
    if any((meta.extra or {}).get("numbers_are_text") for meta in _metas(annotation)):
        return True
    return any(
        _reads_numbers_as_text(part)
        for part in typing.get_args(_bare(annotation))
        if typing.get_origin(_bare(annotation)) is not Literal
    )


def _holds_numbers(bare: Any) -> bool:
    item = _bare(typing.get_args(bare)[0])
    return item is int or (
        typing.get_origin(item) is Literal
        and all(type(word) is int for word in typing.get_args(item))
    )


def _number(text: str) -> Any:
    """Return ``text`` as a number, or unchanged when it is none, to be refused as such."""
    try:
        return (
            int(text)
            if len(text) <= _LONGEST_NUMBER and text.isascii() and "_" not in text
            else text
        )
    except ValueError:
        return text


def _decimal(text: str) -> Any:
    """Return ``text`` as a number that may have a fraction, or unchanged when it is none."""
    return float(text) if _DECIMAL.match(text) else text


def _is_struct(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def _bare(annotation: Any) -> Any:
    """Return the type without the constraints and texts that ``Annotated`` adds to it."""
    return (
        typing.get_args(annotation)[0]
        if typing.get_origin(annotation) is typing.Annotated
        else annotation
    )


def _metas(annotation: Any) -> list[msgspec.Meta]:
    return [
        meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, msgspec.Meta)
    ]


def _extra(metas: list[msgspec.Meta], name: str, default: Any) -> Any:
    return next((meta.extra[name] for meta in metas if meta.extra and name in meta.extra), default)


def _expectation(annotation: Any) -> str:
    bare, metas = _bare(annotation), _metas(annotation)
    for meta in metas:
        if meta.extra and "expected" in meta.extra:
            return str(meta.extra["expected"])
    if typing.get_origin(bare) is Literal:
        *others, last = (word if word != "" else '""' for word in typing.get_args(bare))
        return f"{', '.join(others)} or {last}"
    if typing.get_origin(bare) is tuple:
        return "a list"
    if _is_struct(bare):
        return "a mapping"
    noun = {bool: "true or false", int: "an integer", float: "a number", str: "text in quotes"}[
        bare
    ]
    low = next((meta.ge for meta in metas if meta.ge is not None), None)
    high = next((meta.le for meta in metas if meta.le is not None), None)
    if low is not None and high is not None:
        return f"{noun} from {low} to {high}"
    return noun if low is None else f"{noun} ≥ {low}"
