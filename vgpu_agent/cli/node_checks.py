"""The checks of ``vgpu-agent doctor``: each looks at one thing that the agent needs of its node,
and tells what is wrong and what helps.

Called by `doctor`, each check in a thread of its own with a time limit, because a driver that hangs
or a file system that is gone can block a call for ever. They change nothing on the node. They use
the agent's own modules where these judge the same thing (settings, NVML, checkpoint, the
libraries of isolation backends, API client), so that the answer is that of the agent.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import errno
import http
import os
import re
import resource
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import SERVICE_ACCOUNT, credentials
from vgpu_agent.cluster.reviews import Right, have
from vgpu_agent.config import schema
from vgpu_agent.errors import AgentError, CheckpointError, ClusterError, listed
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import checkpoint
from vgpu_agent.kubelet.sockets import KUBELET_SOCKET
from vgpu_agent.mps.host_tools import CONTROL_BINARY, SMI_BINARY
from vgpu_agent.runtime.libraries import Libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.web.views import GpuView, NvmlView, Overview

_OUR_SOCKETS = "vgpu-agent-"
_CONNECT_SECONDS = 2.0
_LARGEST_FILE_BYTES = 64 * 1024 * 1024
_MAX_SPECS = 1000  # CDI files that are read; a node has a few, and one for each grant

# The API server and the kubelet compare times of tokens and leases with their own clocks. Go's and
# Kubernetes' leeway is a minute; ages that the agent shows are wrong from the first second on.
_CLOCK_WARNING_SECONDS, _CLOCK_ERROR_SECONDS = 5.0, 60.0

# A socket for each plugin, stream and HTTP client, and the driver's own files: about 20 for a GPU.
_FEW_FILES, _TOO_FEW_FILES = 1024, 256
# The kernel's default. Log collectors and kubelets of the node share them, because the agent runs
# as root as well.
_FEW_INOTIFY_INSTANCES = 128

_CGROUP_CONTROLLERS = "cgroup.controllers"
_RUNTIME = "nvidia-container-runtime"
_RUNTIME_CLASSES, _RUNTIME_CLASS = "/apis/node.k8s.io/v1/runtimeclasses", "nvidia"
# Where containerd, CRI-O, Docker and K3s have their configuration.
_RUNTIME_FILES = (
    "etc/containerd/config.toml",
    "etc/containerd/conf.d/*.toml",
    "etc/crio/crio.conf",
    "etc/crio/crio.conf.d/*.conf",
    "etc/docker/daemon.json",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
)
_DEFAULT_RUNTIME = re.compile(
    r'^\s*(default_runtime_name|default_runtime|"default-runtime")\s*[=:]\s*"nvidia"', re.MULTILINE
)


class Level(enum.StrEnum):
    """The weight of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        check: the thing that was looked at.
        level: ``ok``; ``warning`` for a thing that works and may fail later, or only for a part;
            ``error`` for a thing that stops the agent or its pods.
        text: the facts.
        remedy: the way to mend it; empty where nothing is wrong.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""


class RunningAgent(msgspec.Struct, frozen=True):
    """The answers of the agent that runs on this node."""

    overview: Overview
    nvml: NvmlView
    gpus: tuple[GpuView, ...] = ()


class Node(msgspec.Struct, frozen=True):
    """The node that is looked at.

    Attributes:
        settings: those in force.
        agent: the agent that runs here; None without one.
        root: where the node's file system begins, other than `/` for tests.
        in_container: this command runs in a container and sees only what is mounted there.
    """

    settings: Settings
    agent: RunningAgent | None = None
    root: Path = Path("/")
    in_container: bool = False


def is_in_container(root: Path = Path("/")) -> bool:
    """Tell whether this process runs in a container."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) or any(
        (root / name).exists() for name in (".dockerenv", "run/.containerenv")
    )


def _ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def _warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, text, remedy)


def _error(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.ERROR, text, remedy)


# ---- the agent


def check_agent(node: Node) -> Iterator[Finding]:
    """The running agent's own problems."""
    name = "agent"
    if node.agent is None:
        yield _ok(name, "none runs here; the node is looked at without it")
        return
    overview = node.agent.overview
    state = "ready" if overview.ready else "not ready"
    text = f"vgpu-agent {overview.version} runs on node {overview.node} and is {state}"
    if overview.ready:
        yield _ok(name, text)
    else:
        yield _error(name, text, "see the lines about its problems; vgpu-agent status has more")
    for problem in overview.problems:
        level = Level.WARNING if overview.ready else Level.ERROR
        # the reason ends with the remedy, which has a line of its own here
        text = problem.reason.removesuffix(f"; {problem.remedy}" if problem.remedy else "")
        yield Finding(f"{name}: {problem.part}", level, text, problem.remedy)


# ---- driver and container runtime


def check_driver(node: Node) -> Iterator[Finding]:
    """The NVIDIA driver and its GPUs. A running agent is asked, so that a driver in trouble gets
    no second client.
    """
    name, root = "driver", Path(node.settings.gpu.driver_root)
    if node.agent is not None:
        yield from _driver_of_agent(name, node.agent)
        return
    if node.settings.simulate:
        yield _warning(
            name,
            f"GPUs are simulated ({node.settings.simulate}); the driver was not looked at",
            "leave `simulate` out on a node with GPUs",
        )
        return
    nvml = Nvml()
    try:
        nvml.load(root)
        version, count = nvml.driver_version(), nvml.count()
        nvml.shutdown()
    except AgentError as err:
        yield _error(
            name,
            str(err),
            "run this command where the driver's library is: in a container that is NVIDIA's "
            "container runtime's work (runtimeClassName: nvidia)"
            if node.in_container
            else "install NVIDIA's driver, or set gpu.driverRoot to where it is installed",
        )
        return
    if count:
        yield _ok(name, f"version {version}, {count} GPUs, {nvml.library}")
    else:
        yield _error(name, f"version {version} finds no GPU", "see dmesg for the cards that failed")


def _driver_of_agent(name: str, agent: RunningAgent) -> Iterator[Finding]:
    nvml, gpus = agent.nvml, agent.gpus
    version = agent.overview.driver_version or "of an unknown version"
    # not used: the GPU is part of the processor (Tegra), and NVML is not asked. `call`: the call of
    # NVML that hangs, if any
    if nvml.state not in ("answering", "not used"):
        yield _error(
            name,
            f"the agent reports: {nvml.state}{f' in {nvml.call}' if nvml.call else ''}"
            + (f"; {nvml.last_error}" if nvml.last_error else ""),
            "see dmesg and nvidia-smi; a driver that hangs needs a reset of the card or a reboot",
        )
        return
    ill = [f"{gpu.index}: {gpu.health_reason or gpu.health}" for gpu in gpus if not _is_sound(gpu)]
    text = f"version {version}, {len(gpus)} GPUs" + (
        " (simulated)" if agent.overview.simulated else ""
    )
    if ill:
        yield _warning(
            name,
            f"{text}; not healthy: {listed(ill)}",
            "vgpu-agent status shows when each comes back, or what it needs",
        )
    elif gpus:
        yield _ok(name, f"{text}, all healthy")
    else:
        yield _error(name, f"{text}", "see dmesg for the cards that failed")


def _is_sound(gpu: GpuView) -> bool:
    return gpu.present and gpu.health == "Healthy"


def check_runtime(node: Node) -> Iterator[Finding]:
    """NVIDIA's container runtime."""
    name = "container runtime"
    if node.in_container:
        if node.agent is not None:
            yield _ok(name, "the running agent has loaded the driver's library")
        elif _driver_is_mounted(node):
            yield _ok(name, "this container has the driver's library, so a runtime put it there")
        else:
            yield _error(
                name,
                "no driver library was put into this container",
                "make NVIDIA's runtime the node's default, or set runtimeClassName: nvidia in the "
                "DaemonSet",
            )
        return
    if node.settings.simulate:
        yield _ok(name, "not needed by simulated GPUs")
        return
    configured, default = [], False
    for pattern in _RUNTIME_FILES:
        for path in sorted(node.root.glob(pattern)):
            text = _text_of(path)
            if "nvidia" in text:
                configured.append(f"/{path.relative_to(node.root)}")
                default = default or bool(_DEFAULT_RUNTIME.search(text))
    program = shutil.which(_RUNTIME)
    if configured and program:
        how = "the default" if default else "a named one: pods need its RuntimeClass"
        yield _ok(name, f"{program}, in {listed(configured)}, {how}")
    elif program or configured:
        found = program or listed(configured)
        lacks = "no runtime's configuration names it" if program else f"{_RUNTIME} is not in PATH"
        yield _warning(
            name, f"{found}, but {lacks}", "run nvidia-ctk runtime configure, and restart it"
        )
    else:
        yield _warning(
            name,
            f"no {_RUNTIME}, and no configuration of containerd, CRI-O or Docker names it",
            "install NVIDIA's container toolkit and run nvidia-ctk runtime configure; without it "
            "only CDI gives containers their GPUs",
        )


def _driver_is_mounted(node: Node) -> bool:
    from vgpu_agent.gpu.library import candidates  # noqa: PLC0415 - only this check needs it

    return any(path.exists() for path in candidates(Path(node.settings.gpu.driver_root)))


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


# ---- the node's folders


def check_cdi(node: Node) -> Iterator[Finding]:
    """The directory of CDI specs."""
    name, directory = "CDI directory", Path(node.settings.binding.cdi_directory)
    if not directory.exists():
        yield _warning(
            name,
            f"{directory} does not exist",
            "the DaemonSet makes it; without the DaemonSet, make it, owned by root, mode 755",
        )
        return
    if not directory.is_dir():
        yield _error(name, f"{directory} is no directory", "remove it, or set binding.cdiDirectory")
        return
    if not os.access(directory, os.W_OK):
        yield _error(
            name,
            f"{directory} cannot be written",
            "run as root, and mount the folder without readOnly",
        )
        return
    specs, broken = 0, []
    for path in sorted(directory.iterdir())[:_MAX_SPECS]:
        if path.suffix != ".json":
            continue
        specs += 1
        try:
            document = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, RecursionError):
            document = None
        if not isinstance(document, dict) or "cdiVersion" not in document:
            broken.append(path.name)
    if broken:
        yield _warning(
            name,
            f"{directory}: {listed(broken)} cannot be read as a CDI spec",
            "runtimes report it with every container; remove the file or mend its writer",
        )
    else:
        yield _ok(name, f"{directory} can be written, {specs} specs in JSON")


def check_cgroups(node: Node) -> Iterator[Finding]:
    """The version of the node's cgroups."""
    name, root = "cgroups", node.root / "sys/fs/cgroup"
    if (root / _CGROUP_CONTROLLERS).exists():
        yield _ok(name, "version 2")
    elif (root / "unified" / _CGROUP_CONTROLLERS).exists():
        yield _warning(
            name,
            "version 1, with version 2 beside it",
            "kubelets from 1.35 on want version 2 (failCgroupV1); the agent works with both",
        )
    elif root.is_dir():
        yield _warning(
            name,
            "version 1",
            "kubelets from 1.35 on want version 2 (failCgroupV1); the agent works with both",
        )
    else:
        yield _warning(name, f"{root} is not here", "mount the node's cgroups")


def check_kubelet(node: Node) -> Iterator[Finding]:
    """The kubelet's sockets and its checkpoint."""
    kubelet = node.settings.kubelet
    plugins = kubelet.device_plugin_directory
    if not plugins.is_dir():
        yield _error(
            "device plugins",
            f"{plugins} does not exist",
            "start the kubelet, or set kubelet.directory to its root directory, and mount that "
            "path in the DaemonSet",
        )
    else:
        yield _plugin_directory(plugins)
        yield _socket("device plugins", kubelet.kubelet_socket, "the kubelet makes it at its start")
    yield _socket(
        "pod resources",
        kubelet.pod_resources_socket,
        "the kubelet makes it (feature KubeletPodResources, on by default); mount the whole folder",
    )
    yield _checkpoint(kubelet.checkpoint_path)


def _plugin_directory(directory: Path) -> Finding:
    name = "device plugins"
    if not os.access(directory, os.W_OK | os.X_OK):
        return _error(
            name,
            f"{directory} cannot be written by user {os.geteuid()}",
            "run as root, and mount the folder without readOnly",
        )
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH:
        return _error(
            name,
            f"{directory} can be written by everyone (mode {stat.S_IMODE(mode):o})",
            f"chmod 750 {directory}: whoever can make sockets there can offer GPUs",
        )
    return _ok(name, f"{directory} can be written, mode {stat.S_IMODE(mode):o}")


def _socket(name: str, path: Path, origin: str) -> Finding:
    """Connect to the socket at ``path``; ``origin``, a part of the remedy, says what makes it."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return _error(name, f"{path} is no socket", f"remove it; {origin}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            probe.connect(os.fspath(path))
    except FileNotFoundError:
        return _error(name, f"{path} does not exist", f"is the kubelet running? {origin}")
    except ConnectionRefusedError:
        return _error(name, f"{path}: no one listens", "the kubelet is away; start it")
    except PermissionError:
        return _error(name, f"{path}: user {os.geteuid()} may not connect", "run as root")
    except OSError as err:
        return _error(
            name,
            f"{path}: {err.strerror or err}",
            "a path of more than 107 bytes cannot be a socket; else see the kubelet's log",
        )
    return _ok(name, f"{path} accepts connections")


def _checkpoint(path: Path) -> Finding:
    name = "checkpoint"
    if not path.exists():
        return _ok(name, f"{path} does not exist yet: no device was ever given out")
    try:
        entries = asyncio.run(checkpoint.read_checkpoint(path))
    except CheckpointError as err:
        return _error(name, str(err), "run as root; see docs/troubleshooting.md, checkpoint")
    holders = len({(entry.pod_uid, entry.container_name) for entry in entries})
    return _ok(name, f"{path}: {len(entries)} entries of {holders} containers")


class _Registered(msgspec.Struct, rename="pascal"):
    registered_devices: dict[str, list[str] | None] | None = None


class _CheckpointFile(msgspec.Struct, rename="pascal"):
    data: _Registered


def registered_resources(path: Path) -> dict[str, int]:
    """Return resource → the number of its ids, as the kubelet has them from device plugins. Empty
    without a checkpoint that can be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES)
        found = msgspec.json.decode(content, type=_CheckpointFile).data.registered_devices or {}
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}
    return {name: len(ids or ()) for name, ids in found.items()}


def check_rivals(node: Node) -> Iterator[Finding]:
    """Other device plugins that offer resources of the families that are on."""
    name, kubelet = "other plugins", node.settings.kubelet
    others = [path.name for path in _foreign_sockets(kubelet.device_plugin_directory)]
    # beginning of the name of a resource → whether its family is on
    prefixes: dict[str, bool] = {}
    for family in FAMILIES:
        for prefix in family.resource_prefixes:
            prefixes[prefix] = prefixes.get(prefix, False) or family.is_on(node.settings)
    ours = {each.resource for each in node.agent.overview.resources} if node.agent else set()
    contested = sorted(
        resource
        for resource, ids in registered_resources(kubelet.checkpoint_path).items()
        if ids and resource not in ours and _is_of_a_family_on(resource, prefixes)
    )
    if not others:
        yield _ok(name, "none listens in the kubelet's directory")
    elif contested:
        yield _error(
            name,
            f"the kubelet has {listed(contested)} from another plugin, and {listed(others)} "
            "listen there",
            "remove the plugin that the agent replaces before the agent starts; two plugins of one "
            "resource take it from each other",
        )
    else:
        yield _ok(name, f"{listed(others)} listen, and none of them offers the agent's resources")


def _is_of_a_family_on(resource: str, prefixes: Mapping[str, bool]) -> bool:
    """Tell whether the longest of ``prefixes`` with which the name begins has the value True."""
    found = [prefix for prefix in prefixes if resource.startswith(prefix)]
    return bool(found) and prefixes[max(found, key=len)]


def _foreign_sockets(directory: Path) -> Iterator[Path]:
    """Yield the sockets of other plugins that have a listener."""
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return
    for path in paths:
        if path.name == KUBELET_SOCKET or path.name.startswith(_OUR_SOCKETS):
            continue
        if path.is_socket() and _socket("", path, "").level is Level.OK:
            yield path


# ---- sharing


def check_mps(node: Node) -> Iterator[Finding]:
    """NVIDIA's programs for MPS."""
    name = "MPS"
    missing = [program for program in (CONTROL_BINARY, SMI_BINARY) if not shutil.which(program)]
    if not _wants_mps(node.settings):
        yield _ok(name, "not needed: no resource is shared with MPS")
    elif missing:
        yield _error(
            name,
            f"{listed(missing)} not found in PATH",
            "they come with the driver: give the agent's container the capabilities "
            "compute,utility (NVIDIA_DRIVER_CAPABILITIES), or apply manifests/components/mps",
        )
    else:
        yield _ok(name, f"{CONTROL_BINARY} and {SMI_BINARY} are there")


def _wants_mps(settings: Settings) -> bool:
    """Tell whether a resource is shared with daemons that the agent runs."""
    return any(
        (path.startswith("sharing.mps.resources[") and path.endswith(".name"))
        or (path.endswith(".mps") and value == "supervised")
        for path, value in schema.values(settings)
    )


def check_libraries(node: Node) -> Iterator[Finding]:
    """The libraries that put limits in force, where a family needs one."""
    name = "isolation library"
    libraries = Libraries(node.settings, Journal()).check(node.settings)
    if not libraries:
        yield _ok(name, "not needed by the families that are on")
    for backend, library in libraries.items():
        if library.trouble:
            text, _, remedy = library.trouble.partition("; ")
            yield _error(name, f"{backend}: {text}", remedy or "see docs/operations.md")
        else:
            yield _ok(name, f"{backend}: {library.path}")


# ---- limits of the kernel


def check_limits(node: Node) -> Iterator[Finding]:
    """The limits of open files and of inotify."""
    name = "limits"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "raise LimitNOFILE of the container runtime's service, or ulimit -n"
    if soft != resource.RLIM_INFINITY and soft < _TOO_FEW_FILES:
        yield _error(name, f"{soft} open files at most (hard limit {hard})", remedy)
    elif soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        yield _warning(name, f"{soft} open files at most (hard limit {hard})", remedy)
    else:
        yield _ok(name, f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} open files")
    yield _inotify(name, node.root / "proc/sys/fs/inotify/max_user_instances")


def _inotify(name: str, path: Path) -> Finding:
    remedy = "sysctl -w fs.inotify.max_user_instances=1024 on the node"
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        number = ctypes.get_errno()
        why = os.strerror(number)
        if number in (errno.EMFILE, errno.ENFILE):
            return _error(name, f"no inotify instance is left ({why})", remedy)
        return _warning(name, f"inotify does not work here ({why})", "the agent polls instead")
    os.close(descriptor)
    try:
        most = int(path.read_text())
    except (OSError, ValueError):
        return _ok(name, "inotify works")
    if most < _FEW_INOTIFY_INSTANCES:
        return _warning(name, f"{most} inotify instances for each user", remedy)
    return _ok(name, f"{most} inotify instances for each user, and one was free")


# ---- the API server


def rights(settings: Settings) -> tuple[Right, ...]:
    """List the rights that the agent uses with these settings (docs/operations.md, Rights)."""
    name = settings.node_name_or_hostname
    found = [
        *(Right(verb, "nodes", name=name) for verb in ("get", "list", "watch", "patch")),
        Right("patch", "nodes/status", name=name),
        *(Right(verb, "pods") for verb in ("get", "list", "watch", "patch")),
        *(Right(verb, "events") for verb in ("create", "patch")),
    ]
    # the agent evicts failed pods, or deletes and recreates them
    rescues = settings.binding.reschedule_failed or any(
        family.reschedules is not None and family.reschedules(settings)
        for family in FAMILIES
        if family.is_on(settings)
    )
    # it also evicts pods whose start it has refused for so many seconds
    if rescues or settings.binding.refused_evict_seconds:
        found.append(Right("create", "pods/eviction"))
    if rescues:
        found += [Right("create", "pods"), Right("delete", "pods")]
    return tuple(found)


def check_api_server(node: Node) -> Iterator[Finding]:
    """The API server: credentials, connection, clock and rights."""
    settings = node.settings
    if settings.cluster.enabled == "never":
        yield _ok("API server", "not used (cluster.enabled: never)")
        return
    found = credentials(settings)
    if found is None:
        needing = [family.name for family in FAMILIES if _needs_api(family, settings)]
        if needing:
            yield _error(
                "API server",
                f"no credentials, and {listed(needing)} need it",
                f"set kubeconfig, or run in a pod with a service account ({SERVICE_ACCOUNT})",
            )
        else:
            yield _ok("API server", "no credentials here, and no family that is on needs it")
        return
    yield from asyncio.run(_ask_api_server(ApiClient(found), settings, found.origin))


def _needs_api(family: Any, settings: Settings) -> bool:
    return bool(family.needs_api_server and family.is_on(settings))


async def _ask_api_server(api: ApiClient, settings: Settings, origin: str) -> list[Finding]:
    name = "API server"
    try:
        began = time.time()
        theirs = await api.server_seconds()
        # The header Date has whole seconds, so the true time is in the second that begins there.
        ahead = _distance(began, time.time(), theirs)
        findings = [_ok(name, f"answers, {origin}"), _clock(ahead)]
        findings += await runtime_class(api)
        missing = [right for right in rights(settings) if not await have(api, right)]
    except ClusterError as err:
        return [_error(name, str(err), "see docs/troubleshooting.md, The API server is away")]
    finally:
        await api.close()
    if missing:
        lacks = listed([f"{right.verb} {right.resource}" for right in missing])
        findings.append(
            _error(
                "API rights",
                f"missing: {lacks}",
                "kubectl apply -k manifests, with the components for the settings in force "
                "(eviction, reschedule); docs/operations.md lists the rights",
            )
        )
    else:
        findings.append(_ok("API rights", f"all {len(rights(settings))} that the settings need"))
    return findings


async def runtime_class(api: Api) -> list[Finding]:
    """Look for the RuntimeClass of NVIDIA's runtime; nothing where the credentials do not allow it,
    as the agent's own do not.

    Raises:
        ClusterError: no answer.
    """
    name = "RuntimeClass"
    try:
        await api.get(f"{_RUNTIME_CLASSES}/{_RUNTIME_CLASS}")
    except ClusterError as err:
        if err.status in (http.HTTPStatus.FORBIDDEN, http.HTTPStatus.UNAUTHORIZED):
            return []
        if err.status != http.HTTPStatus.NOT_FOUND:
            raise
        text = f"none is named {_RUNTIME_CLASS}: NVIDIA's runtime has to be the node's default"
        return [_ok(name, text)]
    return [_ok(name, f"{_RUNTIME_CLASS} is there, for pods that name it")]


def _distance(began: float, ended: float, theirs: float) -> float:
    """Return by how many seconds the API server's clock is ahead; 0 if the clocks may agree.

    Args:
        began: unix seconds here before the request.
        ended: unix seconds here after the answer.
        theirs: unix seconds there, cut off to a whole second.
    """
    if theirs > ended:
        return theirs - ended
    if theirs + 1 < began:
        return theirs + 1 - began
    return 0.0


def _clock(ahead: float) -> Finding:
    text = (
        "agrees with the API server's to the second"
        if not ahead
        else f"{abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the API server's"
    )
    remedy = "run a time service (chrony, systemd-timesyncd) on the node and on the API server"
    if abs(ahead) >= _CLOCK_ERROR_SECONDS:
        return _error("clock", f"{text}; tokens may be refused", remedy)
    if abs(ahead) >= _CLOCK_WARNING_SECONDS:
        return _warning("clock", text, remedy)
    return _ok("clock", text)


CHECKS: tuple[tuple[str, Callable[[Node], Iterator[Finding]]], ...] = (
    ("agent", check_agent),
    ("driver", check_driver),
    ("container runtime", check_runtime),
    ("CDI directory", check_cdi),
    ("cgroups", check_cgroups),
    ("kubelet", check_kubelet),
    ("other plugins", check_rivals),
    ("MPS", check_mps),
    ("isolation library", check_libraries),
    ("limits", check_limits),
    ("API server", check_api_server),
)
