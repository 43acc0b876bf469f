"""Container images made from local files: what pods run on a machine that reaches no registry.

Each is an OCI image layout in a tar, which `ctr images import --local` takes; pods name it with
``imagePullPolicy: Never``. `PAUSE` and `BUSYBOX` are in every rig. `write_python_image` packs this
interpreter with libraries and a project, for pods that run the agent itself.

Format: https://github.com/opencontainers/image-spec, image-layout.md and manifest.md.
Called by lifecycle.py; tests that want an image of their own call the `write_…` functions and
`Rig.import_image`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.real_node.rig import cache, host
from tests.real_node.rig.errors import RequirementError, RigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAUSE = "vgpu-agent.test/pause:1"
BUSYBOX = "vgpu-agent.test/busybox:1"
_PAUSE_SOURCE = Path(__file__).with_name("pause.c")
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "__pycache__"}
)


def ensure() -> Path:
    """The folder with the archives of `PAUSE` and `BUSYBOX`, made now if they are not in the cache.

    Raises:
        RequirementError: there is no C compiler.
    """
    key = cache.digest(
        [Path(__file__).read_bytes(), _PAUSE_SOURCE.read_bytes(), host.BUSYBOX.read_bytes()]
    )

    def make(folder: Path) -> None:
        write_image(folder / "pause.tar", PAUSE, _layer(_add_pause), {"Entrypoint": ["/pause"]})
        write_image(
            folder / "busybox.tar",
            BUSYBOX,
            _layer(_add_busybox),
            {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"]},
        )

    return cache.get(f"images-{key}", make)


def write_python_image(
    path: Path,
    reference: str,
    packages: Sequence[Path],
    *,
    distribution: str = "vgpu-agent",
    command: Sequence[str] = ("/bin/python3",),
) -> None:
    """Write an image of busybox, this Python, what ``distribution`` depends on,
    and the folders ``packages``.

    Everything keeps the path it has here, so that compiled extensions find their libraries;
    PYTHONPATH makes all of it importable.
    """
    installed = installed_files(distribution)
    site = {Path(str(metadata.distribution(name).locate_file(""))) for name in installed}

    def fill(tar: tarfile.TarFile) -> None:
        _add_busybox(tar)
        _PythonTree(tar).add_all(packages, [file for files in installed.values() for file in files])

    search = ":".join(map(str, [*(package.parent for package in packages), *sorted(site)]))
    write_image(
        path,
        reference,
        _layer(fill),
        {"Cmd": list(command), "Env": ["PATH=/bin", f"PYTHONPATH={search}"]},
    )


def write_image(path: Path, reference: str, layer: bytes, config: dict[str, Any]) -> None:
    """Write an image of one uncompressed tar ``layer`` under the name ``reference``; ``config`` is
    the image's ``config`` object.
    """
    packed = gzip.compress(layer, 1, mtime=0)
    image_config = _json(
        {
            "architecture": _ARCHITECTURE,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [_sha256(layer)]},
            "history": [
                {"created": "1970-01-01T00:00:00Z", "created_by": "tests/real_node/rig/images.py"}
            ],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", image_config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar+gzip", packed)],
        }
    )
    annotations = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    listed = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {
        "platform": {"architecture": _ARCHITECTURE, "os": "linux"},
        "annotations": annotations,
    }
    with tarfile.open(path, "w") as tar:
        _add_file(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}), mode=0o644)
        _add_file(tar, "index.json", _json({"schemaVersion": 2, "manifests": [listed]}), mode=0o644)
        for blob in (image_config, packed, manifest):
            _add_file(
                tar, f"blobs/sha256/{_sha256(blob).removeprefix('sha256:')}", blob, mode=0o644
            )


def write_rebuilt_image(path: Path, reference: str, archive: Path) -> None:
    """Write the image of the OCI ``archive`` with one more layer under the name ``reference``: what
    a node has to unpack when an image was built again.
    """
    layer = _layer(lambda tar: _add_file(tar, "rebuilt", reference.encode(), mode=0o644))
    packed = gzip.compress(layer, 1, mtime=0)
    with tarfile.open(archive) as tar:
        blobs = {
            "sha256:" + entry.name.rpartition("/")[2]: _content(tar, entry.name)
            for entry in tar
            if entry.isfile() and entry.name.startswith("blobs/")
        }
        (listed,) = json.loads(_content(tar, "index.json"))["manifests"]
    manifest = json.loads(blobs.pop(listed["digest"]))
    config = json.loads(blobs.pop(manifest["config"]["digest"]))
    config["rootfs"]["diff_ids"].append(_sha256(layer))
    config["history"].append({"created": "1970-01-01T00:00:00Z", "created_by": "rebuilt"})
    manifest["config"] = _descriptor(manifest["config"]["mediaType"], _json(config))
    manifest["layers"].append(_descriptor("application/vnd.oci.image.layer.v1.tar+gzip", packed))
    listed |= _descriptor(listed["mediaType"], _json(manifest)) | {
        "annotations": {"io.containerd.image.name": reference}
    }
    with tarfile.open(path, "w") as tar:
        _add_file(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}), mode=0o644)
        _add_file(tar, "index.json", _json({"schemaVersion": 2, "manifests": [listed]}), mode=0o644)
        for blob in (*blobs.values(), packed, _json(config), _json(manifest)):
            _add_file(
                tar, f"blobs/sha256/{_sha256(blob).removeprefix('sha256:')}", blob, mode=0o644
            )


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None, name
    return file.read()


def installed_files(distribution: str) -> dict[str, list[Path]]:
    """Return name → files of each distribution that ``distribution`` needs at run time,
    itself included, without scripts.

    Extras are left out, and so is what a marker excludes here, since that is not installed.
    """
    found: dict[str, list[Path]] = {}
    wanted = [distribution]
    while wanted:
        name = wanted.pop()
        try:
            known = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found[name] = [
                Path(str(known.locate_file(file)))
                for file in known.files or ()
                if ".." not in file.parts
            ]
            plain = [
                requirement for requirement in known.requires or () if "extra ==" not in requirement
            ]
            wanted += [
                re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in plain
            ]
    return found


class _PythonTree:
    """Adds files, and with each ELF file the shared libraries it needs, every path once."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._added: set[Path] = set()

    def add_all(self, packages: Sequence[Path], files: Sequence[Path]) -> None:
        base = Path(sys.base_prefix)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        interpreter = (base / "bin" / "python3").resolve()
        self._add_tree(base / "lib" / version, without=base / "lib" / version / "site-packages")
        self._add(interpreter)
        for package in packages:
            self._add_tree(package)
        for file in files:
            if "__pycache__" not in file.parts:
                self._add(file)
        _add_link(self._tar, "bin/python3", str(interpreter))

    def _add_tree(self, root: Path, *, without: Path | None = None) -> None:
        for at, folders, files in os.walk(root):
            here = Path(at)
            folders[:] = sorted(
                name
                for name in folders
                if name not in _SKIPPED_FOLDERS
                and not name.startswith((".", "config-"))
                and here / name != without
            )
            for name in sorted(files):
                if not name.endswith((".pyc", ".a")):
                    self._add(here / name)

    def _add(self, path: Path) -> None:
        if path in self._added or not path.is_file():
            return
        self._added.add(path)
        content = path.read_bytes()
        _add_file(
            self._tar,
            str(path).lstrip("/"),
            content,
            mode=0o755 if os.access(path, os.X_OK) else 0o644,
        )
        if content.startswith(b"\x7fELF"):
            listed = subprocess.run(
                ["ldd", str(path)], text=True, capture_output=True, check=False
            ).stdout
            for word in listed.split():
                if word.startswith("/"):
                    self._add(Path(word))


def _add_pause(tar: tarfile.TarFile) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "pause"
        command = [*_static_compiler(), "-Os", "-s", "-o", str(program), str(_PAUSE_SOURCE)]
        result = subprocess.run(command, text=True, capture_output=True, check=False)
        if result.returncode:
            raise RigError(
                f"compiling {_PAUSE_SOURCE.name} failed: {' '.join(result.stderr.split())[-400:]}"
            )
        _add_file(tar, "pause", program.read_bytes())


def _static_compiler() -> list[str]:
    """A C compiler that links statically: the machine's,
    else the one that ziglang brings as a wheel.
    """
    for name in ("cc", "gcc"):
        if shutil.which(name) and _links_statically([name, "-static"]):
            return [name, "-static"]
    zig = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        f"{platform.machine()}-linux-musl",
        "-static",
    ]
    if _links_statically(zig):
        return zig
    raise RequirementError(
        "no C compiler that links statically; install gcc and libc6-dev, or `pip install ziglang` "
        "into the virtual environment"
    )


def _links_statically(compiler: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.c"
        source.write_text("int main(void) { return 0; }\n")
        result = subprocess.run(
            [*compiler, "-o", str(Path(scratch) / "probe"), str(source)],
            capture_output=True,
            check=False,
        )
    return result.returncode == 0


def _add_busybox(tar: tarfile.TarFile) -> None:
    for folder in ("bin", "etc", "tmp", "proc", "sys", "dev", "root", "var"):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        tar.addfile(entry)
    _add_file(tar, "bin/busybox", host.BUSYBOX.read_bytes())
    for applet in subprocess.run(
        [host.BUSYBOX, "--list"], text=True, capture_output=True, check=True
    ).stdout.split():
        if applet != "busybox":
            _add_link(tar, f"bin/{applet}", "busybox")
    _add_file(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", mode=0o644)
    _add_file(tar, "etc/group", b"root:x:0:\n", mode=0o644)


def _layer(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        fill(tar)
    return raw.getvalue()


def _add_file(tar: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o755) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.size = mode, len(content)
    tar.addfile(entry, io.BytesIO(content))


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _sha256(blob), "size": len(blob)}


def _sha256(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
