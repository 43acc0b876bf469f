"""Files that are called libvgpu.so and limit nothing:
a pod with a share of "3000 MiB" would have the whole card.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from tests.component.volcano import NUMBER, asks, volcano_stage
from vgpu_agent.config.hami_core import HamiCore
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import HostFileError
from vgpu_agent.journal import Journal
from vgpu_agent.runtime import hami_library
from vgpu_agent.runtime.delivered_library import DeliveredLibrary
from vgpu_agent.sim.build import compiler
from vgpu_agent.sim.stand_in_library import (
    FUNCTIONS,
    REGION_BYTES,
    REGION_VARIABLE,
    load_instruction,
    shared_object,
)

CODE = load_instruction(REGION_BYTES)
VARIABLE = REGION_VARIABLE + b"\0"
GOOD = shared_object(FUNCTIONS, code=CODE, strings=VARIABLE)

# In C as in HAMi-core: functions that others call, the size of the region, and the name of the
# variable.
HOOKS = "".join(f"int {name}(void) {{ return 1; }}\n" for name in FUNCTIONS)
CALLS = (
    "".join(f"extern int {name}(void);\n" for name in FUNCTIONS)
    + f"int use(void) {{ return {' + '.join(f'{n}()' for n in FUNCTIONS)}; }}\n"
)
REGION = f"""
#include <stdlib.h>
#include <unistd.h>
long open_region(int file) {{
    return getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE") ? lseek(file, {REGION_BYTES}, SEEK_SET) : -1;
}}
"""

INSTEAD = "or set volcanoVgpu.isolation to none"


def installer(host: Path, source: Path | str) -> DeliveredLibrary:
    """Return an installer of HAMi-core's library."""
    settings = Settings(hami_core=HamiCore(host_directory=str(host), library=str(source)))
    return DeliveredLibrary(hami_library.RECOGNITION, settings, Journal(), instead=INSTEAD)


def refusal(content: bytes, folder: Path) -> str:
    """The reason for which a library of this content is not installed."""
    source = folder / "libvgpu.so"
    source.write_bytes(content)
    library = installer(folder / "host", source)
    with pytest.raises(HostFileError) as refused:
        asyncio.run(library.install())
    assert library.path == ""
    assert os.listdir(folder / "host") == ["ld.so.preload"]
    return str(refused.value)


def compiled(source: str, folder: Path, *flags: str) -> bytes:
    """A shared object from the node's own compiler and linker."""
    (folder / "source.c").write_text(source)
    command = [
        *compiler(),
        "-w",
        "-shared",
        "-fPIC",
        "-fno-builtin",
        *flags,
        "-o",
        str(folder / "made.so"),
        str(folder / "source.c"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "made.so").read_bytes()


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_a_library_from_a_real_linker_is_understood(style: str, tmp_path: Path) -> None:
    """The counterpart of every attack below: what a linker makes of HAMi-core's functions is
    installed, whatever its hash table.
    """
    (tmp_path / "libvgpu.so").write_bytes(
        compiled(HOOKS + REGION, tmp_path, f"-Wl,--hash-style={style}")
    )
    library = installer(tmp_path / "host", tmp_path / "libvgpu.so")
    assert asyncio.run(library.install()).startswith(f"{tmp_path}/host/libvgpu.so.")


def test_no_other_library_passes_for_hami_core(tmp_path: Path) -> None:
    """A copy of any library of the system was installed,
    and its pods were shown with a limit that nothing kept.
    """
    said = refusal(
        compiled(
            '#include <stdlib.h>\nint inflate(void) { return getenv("HOME") != 0; }', tmp_path
        ),
        tmp_path,
    )
    assert "does not export dlsym, cuGetProcAddress or cuGetProcAddress_v2, cuMemAlloc_v2" in said
    assert "set volcanoVgpu.isolation to none" in said


def test_no_library_that_only_calls_the_driver_passes(tmp_path: Path) -> None:
    """An import of cuMemAlloc is what every CUDA program has, and no hook."""
    assert "does not export dlsym" in refusal(compiled(CALLS + REGION, tmp_path), tmp_path)
    assert "does not export dlsym" in refusal(
        shared_object((), imports=FUNCTIONS, code=CODE, strings=VARIABLE), tmp_path
    )


def test_no_library_that_only_mentions_the_functions_passes(tmp_path: Path) -> None:
    """Names among the strings are what every program has that looks functions up,
    and no hook either.
    """
    mentioned = b"\0".join(name.encode() for name in FUNCTIONS) + b"\0" + VARIABLE
    assert "does not export dlsym" in refusal(
        shared_object((), code=CODE, strings=mentioned), tmp_path
    )


@pytest.mark.parametrize("hidden", ["static", '__attribute__((visibility("hidden")))'])
def test_no_library_that_keeps_its_hooks_to_itself_passes(hidden: str, tmp_path: Path) -> None:
    """A build whose symbols are not exported: programs go on calling the driver."""
    source = HOOKS.replace("int ", f"__attribute__((used)) {hidden} int ")
    assert "does not export dlsym" in refusal(compiled(source + REGION, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if not name.startswith("cuGetProcAddress")]
)
def test_no_library_with_a_gap_passes(name: str, tmp_path: Path) -> None:
    """One function that is not hooked is the way around all others. The message names it."""
    functions = [other for other in FUNCTIONS if other != name]
    assert f"does not export {name}, so it limits nothing" in refusal(
        shared_object(functions, code=CODE, strings=VARIABLE), tmp_path
    )


def test_no_symbols_without_code_pass(tmp_path: Path) -> None:
    """Functions that are said to be where there is no code, and variables of those names."""
    for info, value in ((1 << 4 | 2, 0x10_0000), (1 << 4 | 1, 0x100), (0 << 4 | 2, 0x100)):
        content = bytearray(GOOD)
        first = content.find(struct.pack("<IBB", 1, 1 << 4 | 2, 0))
        struct.pack_into("<IBBHQ", content, first, 1, info, 0, 1, value)
        assert "does not export dlsym" in refusal(bytes(content), tmp_path)


def test_no_other_interposer_passes(tmp_path: Path) -> None:
    """vgpu-manager's library and others hook the same functions, and never look at our region."""
    assert "does not know CUDA_DEVICE_MEMORY_SHARED_CACHE" in refusal(
        shared_object(FUNCTIONS, code=CODE), tmp_path
    )


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (2_008_984, r"is of HAMi 2.8.1"),
        (1_197_896, "is of HAMi 2.3 to 2.4.0"),
        (2_010_000, "of unknown layout"),
    ],
)
def test_no_library_of_another_layout_passes(size: int, said: str, tmp_path: Path) -> None:
    """It reads its limits elsewhere in the file, finds zeros there, and limits nothing."""
    content = shared_object(FUNCTIONS, code=load_instruction(size), strings=VARIABLE)
    assert said in refusal(content, tmp_path)
    beside = shared_object(
        FUNCTIONS,
        code=load_instruction(size),
        strings=VARIABLE + REGION_BYTES.to_bytes(4, "little"),
    )
    assert said in refusal(beside, tmp_path), "the right number outside of the code says nothing"


def test_no_library_of_two_layouts_passes(tmp_path: Path) -> None:
    """The code has our size, and that of 2.8.1 too.
    Which one it opens the region with cannot be known.
    """
    both = load_instruction(REGION_BYTES) + load_instruction(2_008_984)
    assert "is of HAMi 2.8.1" in refusal(
        shared_object(FUNCTIONS, code=both, strings=VARIABLE), tmp_path
    )


def _with_tag(tag: int, value: int) -> bytes:
    """The good library, whose dynamic segment says something else about one table."""
    content = bytearray(GOOD)
    (start,) = struct.unpack_from("<Q", content, 64 + 2 * 56 + 8)
    at = next(
        place
        for place in range(start, len(content), 16)
        if struct.unpack_from("<q", content, place)[0] == tag
    )
    struct.pack_into("<Q", content, at + 8, value)
    return bytes(content)


def _with_hash(word: int, value: int) -> bytes:
    """The good library, whose hash table says something else in one word."""
    content = bytearray(GOOD)
    struct.pack_into(
        "<I", content, GOOD.find(struct.pack("<III", 1, len(FUNCTIONS) + 1, 1)) + 4 * word, value
    )
    return bytes(content)


DAMAGED = {
    "cut after the header": lambda: GOOD[:64],
    "cut in the tables": lambda: GOOD[:-200],
    "cut by one byte": lambda: GOOD[:-1],
    "symbols outside of the file": lambda: _with_tag(6, 1 << 60),
    "names outside of the file": lambda: _with_tag(5, len(GOOD) + 4096),
    "a hash table outside of the file": lambda: _with_tag(4, 1 << 40),
    "no hash table": lambda: _with_tag(4, 0).replace(struct.pack("<q", 4), struct.pack("<q", 99)),
    "2^32 symbols": lambda: _with_hash(1, 0xFFFFFFFF),
    "2^32 buckets": lambda: _with_hash(0, 0xFFFFFFFF),
    "a symbol far away": lambda: _with_hash(2, 0xFFFFFFF0),
    "a chain without end": lambda: _with_hash(4, 1),
    "65535 program headers": lambda: GOOD[:56] + b"\xff\xff" + GOOD[58:] + bytes(65535 * 56),
    "segments beyond 2^64": lambda: GOOD[:96] + b"\xff" * 8 + GOOD[104:],
    "no dynamic segment": lambda: GOOD.replace(struct.pack("<II", 2, 4), struct.pack("<II", 4, 4)),
    "random bytes": lambda: GOOD[:64] + bytes(range(256)) * 8,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_no_damaged_file_costs_more_than_a_line(damage: str, tmp_path: Path) -> None:
    """Offsets out of the file, endless chains, counts of billions:
    one clear error, little memory, and no other exception.
    """
    content = DAMAGED[damage]()
    tracemalloc.start()
    try:
        if damage != "2^32 symbols":  # their number does no harm: nothing goes through them
            assert "deliver HAMi-core's libvgpu.so there" in refusal(content, tmp_path)
        else:
            (tmp_path / "libvgpu.so").write_bytes(content)
            asyncio.run(installer(tmp_path / "host", tmp_path / "libvgpu.so").install())
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_no_bit_that_is_flipped_raises_anything_else(tmp_path: Path) -> None:
    """Each byte of the head and the tables once: installed or refused, and nothing else happens."""
    source = tmp_path / "libvgpu.so"
    for place in range(len(GOOD)):
        source.write_bytes(GOOD[:place] + bytes([GOOD[place] ^ 0xFF]) + GOOD[place + 1 :])
        library = installer(tmp_path / "host", source)
        try:
            library._install()
        except HostFileError:
            continue


def test_no_huge_file_is_read(tmp_path: Path) -> None:
    """A file of 64 GiB in the library's place, and a pipe without a writer."""
    source = tmp_path / "libvgpu.so"
    with source.open("wb") as file:
        file.write(GOOD)
        file.truncate(64 << 30)
    tracemalloc.start()
    with pytest.raises(HostFileError, match="larger than 16 MiB"):
        installer(tmp_path / "host", source)._install()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    source.unlink()
    os.mkfifo(source)
    with pytest.raises(HostFileError, match="is not a file"):
        installer(tmp_path / "host", source)._install()


@pytest.mark.component
async def test_no_bad_library_reaches_a_pod(folder: Path) -> None:
    """Nothing is offered with a file that limits nothing, and /readyz says what it lacks. With the
    right one pods start; a bad one that is delivered then reaches no pod, new pods have the one
    that was installed, and after a restart of the agent there is nothing again.
    """
    other = shared_object(("inflate",), code=CODE)
    library = "/usr/local/vgpu/libvgpu.so"
    async with volcano_stage(folder) as stage:
        stage.configure()
        source = folder / "vgpu" / "libvgpu.so"
        await asyncio.to_thread(_deliver, source, other)
        agent = stage.new_agent()
        await agent.start()
        answer = await agent.until(
            "/debug/status", lambda answer: "does not export dlsym" in str(answer["problems"])
        )
        assert not answer["ready"]
        assert int(stage.allocatable.get(NUMBER, 0)) == 0
        await asyncio.to_thread(_deliver, source, GOOD)
        await stage.offered()
        first = await stage.serve("first", asks(1, 16, 10))
        await asyncio.to_thread(_deliver, source, other)
        await agent.until(
            "/debug/resources", lambda answer: "does not export dlsym" in str(answer["cautions"])
        )
        second = await stage.serve("second", asks(1, 16, 10))
        assert first.mounts[library] == second.mounts[library]
        assert await asyncio.to_thread(Path(second.mounts[library][0]).read_bytes) == GOOD
        await agent.terminate()
        await agent.start()
        answer = await agent.until(
            "/debug/status", lambda answer: "does not export dlsym" in str(answer["problems"])
        )
        assert not answer["ready"]


def _deliver(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)
