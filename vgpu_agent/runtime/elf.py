"""The dynamic symbols and the code of an ELF shared object, read from its bytes without running it.

Symbols are looked up as the dynamic linker looks them up: by the hash table that the dynamic
segment names. Section headers do not count, because loading the file does not need them. Only what
`delivered_library` asks for is read, so a table that claims billions of entries costs nothing.
Layouts: elf(5), and the gABI's chapter on dynamic linking. Not pyelftools: importing it costs 7 MiB
of the agent's memory, and it answers damaged files with a dozen kinds of exceptions.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Iterator

X86_64, AARCH64 = 62, 183  # e_machine

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr, little endian
_PROGRAM = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_DYNAMIC = struct.Struct("<qQ")  # Elf64_Dyn
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym

_CLASS_AND_ORDER = bytes((2, 1))  # ELFCLASS64, ELFDATA2LSB
_SHARED_OBJECT = 3  # e_type
_LOAD, _DYNAMIC_SEGMENT, _EXECUTABLE = 1, 2, 1  # p_type, p_type, bit of p_flags
_HASH, _STRTAB, _SYMTAB, _STRSZ, _GNU_HASH = 4, 5, 6, 10, 0x6FFFFEF5  # d_tag
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_SEEN_BY_OTHERS = (1, 2)  # STB_GLOBAL, STB_WEAK
_NOT_HIDDEN = (0, 3)  # STV_DEFAULT, STV_PROTECTED

# Bounds of the search: program headers, entries of the dynamic segment, and symbols in one chain of
# a hash table. Linkers stay far below.
_MAX_PROGRAMS = 128
_MAX_DYNAMIC = 1024
_MAX_CHAIN = 4096


class ElfError(AgentError):
    """The file is no ELF shared object, or a damaged one;
    the message continues a sentence that begins with the file's name.
    """


class _Segment(msgspec.Struct, frozen=True):
    flags: int
    offset: int
    address: int
    size: int  # bytes in the file


class SharedObject:
    """One 64-bit little-endian shared object.

    Attributes:
        machine: the processor that it is built for (e_machine).

    Raises:
        ElfError: it is something else, a part of it lies outside of the file, or it has no dynamic
            segment.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        if not content.startswith(b"\x7fELF"):
            raise ElfError("is not an ELF file" if content else "is empty")
        (
            _,
            kind,
            self.machine,
            _,
            _,
            programs,
            sections,
            _,
            _,
            program_size,
            program_count,
            section_size,
            section_count,
            _,
        ) = self._unpack(_HEADER, 0, "its header")
        if content[4:6] != _CLASS_AND_ORDER:
            raise ElfError("is not a 64-bit little-endian ELF file")
        if kind != _SHARED_OBJECT:
            raise ElfError("is not a shared library")
        # The table of sections is the last thing in the file, so an unfinished copy lacks it.
        self._require(
            max(programs + program_size * program_count, sections + section_size * section_count)
        )
        if program_count > _MAX_PROGRAMS or program_size != _PROGRAM.size:
            raise ElfError(f"is damaged: {program_count} program headers of {program_size} bytes")
        segments = list(self._segments(programs, program_count))
        self._load_segments = [segment for kind, segment in segments if kind == _LOAD]
        dynamic = [segment for kind, segment in segments if kind == _DYNAMIC_SEGMENT]
        if not dynamic:
            raise ElfError("has no dynamic segment, so no program can load it")
        self._tags = dict(self._dynamic(dynamic[-1]))  # d_tag → value

    def exports(self, name: str) -> bool:
        """Tell whether programs that load the file find a function of that name in it;
        a function that it only imports does not count.

        Raises:
            ElfError: the tables of symbols are missing or damaged.
        """
        return any(
            self._is_export(index, name.encode()) for index in self._candidates(name.encode())
        )

    @property
    def code(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) in the file of each part that is mapped executable."""
        return (
            (one.offset, one.offset + one.size)
            for one in self._load_segments
            if one.flags & _EXECUTABLE
        )

    def _require(self, size: int) -> None:
        if len(self._content) < size:
            raise ElfError(
                f"is not complete: {len(self._content)} of {size} bytes (still being copied?)"
            )

    def _segments(self, table: int, number: int) -> Iterator[tuple[int, _Segment]]:
        for place in range(number):
            kind, flags, offset, address, _, size, _, _ = self._unpack(
                _PROGRAM, table + place * _PROGRAM.size, "a program header"
            )
            if kind in {_LOAD, _DYNAMIC_SEGMENT}:
                self._require(offset + size)
                yield kind, _Segment(flags, offset, address, size)

    def _dynamic(self, segment: _Segment) -> Iterator[tuple[int, int]]:
        for number in range(min(segment.size // _DYNAMIC.size, _MAX_DYNAMIC)):
            tag, value = self._unpack(
                _DYNAMIC, segment.offset + number * _DYNAMIC.size, "its dynamic segment"
            )
            if tag == 0:
                return
            yield tag, value

    def _candidates(self, name: bytes) -> Iterator[int]:
        """Return the indices of the symbols that the hash table has for ``name``; some of these may
        have another name.
        """
        if _GNU_HASH in self._tags:
            return self._by_gnu_hash(name)
        return self._by_hash(name)

    def _by_gnu_hash(self, name: bytes) -> Iterator[int]:
        table = self._place(_GNU_HASH, "GNU hash table")
        buckets, first, bloom, _ = self._words(table, 4)
        if not buckets:
            return
        wanted = _gnu_hash(name)
        starts = table + 16 + bloom * 8
        (index,) = self._words(starts + wanted % buckets * 4, 1)
        if index < first:
            return  # an empty bucket
        for place in range(index, index + _MAX_CHAIN):
            (value,) = self._words(starts + (buckets + place - first) * 4, 1)
            if value | 1 == wanted | 1:
                yield place
            if value & 1:
                return
        raise ElfError(f"is damaged: a chain of its hash table has more than {_MAX_CHAIN} symbols")

    def _by_hash(self, name: bytes) -> Iterator[int]:
        table = self._place(_HASH, "hash table of symbols")
        buckets, _ = self._words(table, 2)
        if not buckets:
            return
        (index,) = self._words(table + 8 + _hash(name) % buckets * 4, 1)
        for _ in range(_MAX_CHAIN):
            if not index:
                return
            yield index
            (index,) = self._words(table + 8 + (buckets + index) * 4, 1)
        raise ElfError(f"is damaged: a chain of its hash table has more than {_MAX_CHAIN} symbols")

    def _is_export(self, index: int, name: bytes) -> bool:
        """Tell whether the symbol with that index is a function ``name`` that others can call."""
        begin, info, other, section, value, _ = self._unpack(
            _SYMBOL,
            self._place(_SYMTAB, "table of symbols") + index * _SYMBOL.size,
            "its table of symbols",
        )
        name_at = self._place(_STRTAB, "table of names") + begin
        if (
            begin + len(name) >= self._tags.get(_STRSZ, 0)
            or self._content[name_at : name_at + len(name) + 1] != name + b"\0"
        ):
            return False
        if (
            not section
            or info & 15 not in _FUNCTIONS
            or info >> 4 not in _SEEN_BY_OTHERS
            or other & 3 not in _NOT_HIDDEN
        ):
            return False
        return any(
            one.flags & _EXECUTABLE and 0 <= value - one.address < one.size
            for one in self._load_segments
        )

    def _place(self, tag: int, table: str) -> int:
        """Return the offset in the file of the table to which ``tag`` of the dynamic segment
        points; ``table`` is its name in messages.
        """
        if tag not in self._tags:
            raise ElfError(f"has no {table}, so it exports nothing")
        address = self._tags[tag]
        for one in self._load_segments:
            if 0 <= address - one.address < one.size:
                return one.offset + address - one.address
        raise ElfError(f"is damaged: its {table} is at {address:#x}, outside of the file")

    def _words(self, offset: int, number: int) -> tuple[int, ...]:
        """Return that many 32-bit numbers of the hash table."""
        return self._unpack(struct.Struct(f"<{number}I"), offset, "its hash table of symbols")

    def _unpack(self, layout: struct.Struct, offset: int, part: str) -> tuple[Any, ...]:
        if offset + layout.size > len(self._content):
            raise ElfError(
                f"is damaged: {part} at {offset:#x} reaches beyond the file's "
                f"{len(self._content)} bytes"
            )
        return layout.unpack_from(self._content, offset)


def code_loads(library: SharedObject, content: bytes, number: int) -> bool:
    """Tell whether the code of ``library``, whose bytes are ``content``, has an instruction that
    loads ``number``, which has 32 bits. A library is recognised by such constants in its code, e.g.
    the size of a structure.
    """
    # on x86-64 an operand, elsewhere a constant among the code
    plain = number.to_bytes(4, "little")
    return any(
        content.find(plain, begin, end) >= 0
        or (library.machine == AARCH64 and _loads_in_halves(content[begin:end], number))
        for begin, end in library.code
    )


# On aarch64 a number takes two instructions on one register, which compilers leave together or a
# few instructions apart: mov for its lower half, and movk for its upper half. In both, the lowest
# five bits are the register's number, and the highest bit is its width.
_MOVE, _KEEP = 0x52800000, 0x72A00000  # mov; movk, which keeps the lower half
_REGISTER, _WIDE = 0x1F, 1 << 31
_APART_BYTES = 32  # from mov to movk, at most


def _loads_in_halves(code: bytes, number: int) -> bool:
    first, second, third, fourth = (_MOVE | (number & 0xFFFF) << 5).to_bytes(4, "little")
    parts = (
        bytes([first]),
        bytes([first | _REGISTER]),
        bytes([second, third]),
        bytes([fourth]),
        bytes([fourth | 0x80]),
    )
    # also where two overlap
    move = re.compile(b"(?=([%b-%b]%b[%b%b]))" % tuple(map(re.escape, parts)), re.DOTALL)
    for found in move.finditer(code):
        at = found.start()
        if at % 4:
            continue
        own = int.from_bytes(found[1], "little") & (_REGISTER | _WIDE)
        keep = (_KEEP | number >> 16 << 5 | own).to_bytes(4, "little")
        if any(
            code[place : place + 4] == keep for place in range(at + 4, at + 4 + _APART_BYTES, 4)
        ):
            return True
    return False


def _hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
