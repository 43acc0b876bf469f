"""Builds Kubernetes, etcd, containerd and Helm from Go modules pinned in tests/real_node/gomod,
once per machine.

No registry of binaries or images is needed, only a Go module proxy (whichever the environment
names), and go.sum makes sure that what it serves is what was tried. Cold, this takes minutes and 3
GB of memory; afterwards it is a look into the cache.

Called by lifecycle.py before every start, by `scripts/cluster build`, and by conftest.py before the
first test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real_node.rig import cache
from tests.real_node.rig.errors import RequirementError, RigError

if TYPE_CHECKING:
    from collections.abc import Callable

_GOMOD = Path(__file__).resolve().parent.parent / "gomod"
_VERSION_PACKAGE = "k8s.io/component-base/version"


@dataclass(frozen=True, slots=True)
class GoBuild:
    """One module of ours, and the programs it yields."""

    name: str
    version_of: str
    """The module whose pinned version names the whole and is linked into it."""
    programs: dict[str, str]
    """File name → package."""
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return _GOMOD / self.name

    @property
    def version(self) -> str:
        """The pinned version, e.g. ``v1.36.3``."""
        match = re.search(
            rf"^\s*{re.escape(self.version_of)} (v\S+)",
            (self.folder / "go.mod").read_text(),
            re.MULTILINE,
        )
        if match is None:
            raise RigError(f"{self.folder / 'go.mod'} requires no {self.version_of}")
        return match[1]

    def command(self, program: str, out: Path) -> list[str]:
        """The `go build` that writes ``program`` into ``out``."""
        minor = self.version.split(".")[1]
        linked = {
            "kubernetes": [
                f"{_VERSION_PACKAGE}.gitVersion={self.version}",
                f"{_VERSION_PACKAGE}.gitMajor=1",
                f"{_VERSION_PACKAGE}.gitMinor={minor}",
            ],
            "containerd": [f"{self.version_of}/version.Version={self.version}"],
            "helm": [f"{self.version_of}/internal/version.version={self.version}"],
        }[self.name]
        # -mod=readonly: a build never rewrites go.mod; what is committed is what is built.
        fixed = [
            "-mod=readonly",
            "-trimpath",
            "-buildvcs=false",
            "-ldflags",
            " ".join(["-s -w", *(f"-X {variable}" for variable in linked)]),
        ]
        return [
            "go",
            "build",
            *fixed,
            *self.flags,
            "-o",
            str(out / program),
            self.programs[program],
        ]

    def key(self) -> str:
        """Hash of all that decides what comes out, but for Go's own version."""
        files = sorted(
            path for path in self.folder.iterdir() if path.suffix in {".mod", ".sum", ".go"}
        )
        commands = [" ".join(self.command(program, Path("out"))) for program in self.programs]
        return cache.digest(
            [path.read_bytes() for path in files] + [command.encode() for command in commands]
        )


KUBERNETES = GoBuild(
    name="kubernetes", version_of="k8s.io/kubernetes", programs={"kubernetes": "."}
)
CONTAINERD = GoBuild(
    name="containerd",
    version_of="github.com/containerd/containerd/v2",
    programs={
        name: f"github.com/containerd/containerd/v2/cmd/{name}"
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    },
    # snapshotters that need C headers, and what a test rig never uses
    flags=("-tags", "no_btrfs no_devmapper no_zfs no_tracing"),
)
# Not in the binary of KUBERNETES: Helm is released against another version of the same libraries.
HELM = GoBuild(
    name="helm",
    version_of="helm.sh/helm/v3",
    programs={"helm": "helm.sh/helm/v3/cmd/helm"},
)
BUILDS = (KUBERNETES, CONTAINERD, HELM)


def cached(build: GoBuild) -> Path | None:
    """Return an earlier build of these very sources, by any Go; None when there is none."""
    return cache.find(f"{build.name}-{build.version}-{build.key()}-go*")


def ensure(build: GoBuild, say: Callable[[str], None]) -> Path:
    """The folder with the programs of ``build``, made now if they are not in the cache.

    A finished build serves without Go; with Go, an upgrade of Go counts as a change.

    Raises:
        RequirementError: nothing is cached and there is no Go.
        RigError: the build fails; the message ends with Go's output.
    """
    go = shutil.which("go")
    if go is None:
        found = cached(build)
        if found is None:
            raise RequirementError(
                "Go is not installed and nothing is in the cache; put `go` 1.26 or newer into PATH"
            )
        return found

    def make(folder: Path) -> None:
        say(
            f"building {build.name} {build.version} from source; minutes the first time, then kept "
            f"in {cache.root()}"
        )
        began = time.monotonic()
        environment = os.environ | {"CGO_ENABLED": "0", "GOWORK": "off"}
        for program in build.programs:
            result = subprocess.run(
                build.command(program, folder),
                cwd=build.folder,
                env=environment,
                text=True,
                capture_output=True,
                check=False,
            )
            if result.returncode:
                raise RigError(
                    f"building {program} failed: "
                    f"{' '.join(result.stderr.strip().splitlines()[-5:])}"
                )
        say(f"built {build.name} in {time.monotonic() - began:.0f} s")

    go_version = subprocess.run(
        [go, "env", "GOVERSION"], cwd=build.folder, text=True, capture_output=True, check=True
    ).stdout.strip()
    return cache.get(f"{build.name}-{build.version}-{build.key()}-{go_version}", make)


def operator_definitions(say: Callable[[str], None]) -> list[Path]:
    """The Prometheus operator's CustomResourceDefinitions of what components/monitoring has.

    They come with the operator's Go module, so that the module proxy and go.sum are enough for
    them, too.

    Raises:
        RequirementError: they are not in the cache and there is no Go.
        RigError: the module cannot be had.
    """
    module = "github.com/prometheus-operator/prometheus-operator"
    folder = _GOMOD / "prometheus-operator"
    names = [f"monitoring.coreos.com_{kind}.yaml" for kind in ("podmonitors", "prometheusrules")]

    def make(made: Path) -> None:
        if shutil.which("go") is None:
            raise RequirementError(
                "the Prometheus operator's definitions are not in the cache, and there is no Go"
            )
        say("fetching the Prometheus operator's definitions")
        result = subprocess.run(
            ["go", "mod", "download", "-json", module],
            cwd=folder,
            env=os.environ | {"GOWORK": "off"},
            text=True,
            capture_output=True,
            check=False,
        )
        if result.returncode:
            raise RigError(f"go mod download {module}: {result.stdout[-500:]}{result.stderr}")
        source = Path(json.loads(result.stdout)["Dir"]) / "example" / "prometheus-operator-crd"
        for name in names:
            shutil.copyfile(source / name, made / name)

    sums = (folder / "go.sum").read_bytes()
    entry = cache.get(f"prometheus-operator-{cache.digest([sums])}", make)
    return [entry / name for name in names]
