"""The node's problems in sentences, the worst first: the last table of ``vgpu-agent status``, and
the first one of the overview page.

`views.overview` collects them from the snapshot. Problems that fail the liveness or readiness probe
come first, then problems that stop nothing yet.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.status import (
    BRING_API_SERVER_BACK,
    CORRECT_CONFIGURATION,
    MAKE_ROOM,
    MpsState,
    PluginState,
    Problem,
    ProblemKind,
)
from vgpu_agent.web import health, mig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vgpu_agent.model import Inventory
    from vgpu_agent.status import (
        AgentStatus,
        CdiSpecStatus,
        ClusterStatus,
        LedgerStatus,
        WriteFailure,
    )

_SHOWN_IDS = 5
# a shorter wait of a write is normal, e.g. while the API server restarts
_LATE_SECONDS = 60.0


class ProblemView(msgspec.Struct, frozen=True):
    """A problem as JSON. ``part`` is kind and subject in words, ``reason`` is text and remedy, and
    ``also`` has further subjects with the same problem.
    """

    part: str
    reason: str
    kind: str = ""
    subject: str = ""
    remedy: str = ""
    also: tuple[str, ...] = ()


def known(status: AgentStatus, now: float) -> tuple[Problem, ...]:
    """Return every problem of the node, each cause once, the worst first."""
    found = [
        *status.not_alive,
        *status.not_ready,
        *_gpus(status.inventory, now),
        *_kubelet(status),
        *_api_server(status.cluster, now),
        *_config(status),
        *_ledger(status.ledger),
        *_vanished(status),
        *_left_over(status),
        *_limits(status),
    ]
    # A failure often keeps a resource from being offered. Then the problem of that resource tells
    # it, and it is not told again.
    reasons = {problem.reason for problem in found}
    found += [problem for problem in _mps(status) if problem.reason not in reasons]
    said = " ".join(reasons)  # all that is told so far
    found += [problem for problem, error in _cdi(status) if error not in said]
    found += [
        problem
        for problem, failure in _files(status)
        if not (f"{failure.directory}/" in said and failure.error in said)
    ]
    return merged(found)


def merged(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Join problems of one kind that differ in the subject only, in the order of the first ones."""
    subjects: dict[tuple[ProblemKind, str, str], dict[str, None]] = {}
    for problem in problems:
        key = problem.kind, problem.text, problem.remedy
        subjects.setdefault(key, {}).update(dict.fromkeys((problem.subject, *problem.also)))
    return tuple(
        Problem(kind, subject=first, text=text, remedy=remedy, also=tuple(others))
        for (kind, text, remedy), (first, *others) in subjects.items()
    )


def _gpus(inventory: Inventory, now: float) -> Iterator[Problem]:
    for gpu in inventory.gpus:
        if not gpu.present or not gpu.health.ok:
            yield Problem(
                ProblemKind.GPU,
                subject=str(gpu.index),
                text=f"{gpu.uuid} {health.trouble_text(gpu.health, now, gone=not gpu.present)}",
                remedy=health.remedy(gpu.health, gpu.uuid),
            )
        else:
            for instance in gpu.mig_instances:
                if reason := mig.why_withheld(gpu, instance):
                    ill = instance.health
                    told = f"is not offered: {reason}" if ill.ok else health.trouble_text(ill, now)
                    text = f"MIG instance {instance.uuid} ({instance.profile}) {told}"
                    yield Problem(
                        ProblemKind.GPU,
                        subject=str(gpu.index),
                        text=text,
                        remedy=health.remedy(ill, gpu.uuid),
                    )
    gone = {str(gpu.index) for gpu in inventory.gpus if not gpu.present}
    for failure in inventory.failures:
        if failure.partition(": ")[0] not in gone:  # it begins with the index of the card
            yield Problem(ProblemKind.GPU, subject="", text=f"a GPU did not answer: {failure}")


def _kubelet(status: AgentStatus) -> Iterator[Problem]:
    # a kubelet that is away gives no records either
    away = any(plugin.state is PluginState.WAITING for plugin in status.plugins)
    if status.kubelet.records_trouble and not away:
        yield Problem(ProblemKind.KUBELET, subject="", text=status.kubelet.records_trouble)
    for plugin in status.plugins:
        if plugin.list_fault:  # the kubelet lacks ids, or has some of another plugin
            yield Problem(ProblemKind.RESOURCE, subject=plugin.resource, text=plugin.list_fault)


def _api_server(cluster: ClusterStatus, now: float) -> Iterator[Problem]:
    """Yield an outage of the API server. Known pods still start, so the agent stays ready."""
    # `essential`: not a watch of an object that need not exist
    failing = [watch for watch in cluster.watches if watch.failing_since and watch.essential]
    if failing:
        longest = min(failing, key=lambda watch: watch.failing_since)
        yield Problem(
            ProblemKind.API_SERVER,
            subject="",
            text=f"the watch of {longest.name} has been failing for "
            f"{now - longest.failing_since:.0f} s: {longest.last_error}; known pods are served, "
            "and writes wait",
            remedy="" if cluster.missing_rights else BRING_API_SERVER_BACK,
        )
    if cluster.missing_rights:
        manifests = sorted({f"manifests/{path}" for path in cluster.missing_rights.values()})
        yield Problem(
            ProblemKind.API_SERVER,
            subject="",
            text=f"the service account may not {', '.join(sorted(cluster.missing_rights))}",
            remedy=f"apply {' and '.join(manifests)}",
        )
    for writer in cluster.writers:
        if writer.oldest_pending_seconds >= _LATE_SECONDS:
            yield Problem(
                ProblemKind.API_SERVER,
                subject="",
                text=f"writes about {writer.name} wait: {writer.pending}, the oldest for "
                f"{writer.oldest_pending_seconds:.0f} s",
                remedy="the log says why under node., pods. or events.",
            )


def _config(status: AgentStatus) -> Iterator[Problem]:
    """Yield errors in files and settings, also settings by which some pods will not get what they
    ask for (cautions), and conflicts between families (collisions).
    """
    for text in (
        *status.binding.file_problems,
        *status.binding.cautions,
        *status.config_collisions,
    ):
        yield Problem(ProblemKind.CONFIG, subject="", text=text)
    for problem in status.config_problems:
        text = f"the newest configuration is not in force: {problem}"
        yield Problem(ProblemKind.CONFIG, subject="", text=text, remedy=CORRECT_CONFIGURATION)
    if status.config_needs_restart:
        yield Problem(
            ProblemKind.CONFIG,
            subject="",
            text=f"takes effect after a restart: {', '.join(status.config_needs_restart)}",
        )


def _ledger(ledger: LedgerStatus) -> Iterator[Problem]:
    for each in ledger.overcommitted:
        text = (
            f"scheduler overcommitted: more of {each.device} is allocated than it has: {each.text}"
        )
        yield Problem(ProblemKind.RESOURCE, subject=each.resource, text=text)
    if ledger.unknown_ids:
        more = (
            f" and {len(ledger.unknown_ids) - _SHOWN_IDS} more"
            if len(ledger.unknown_ids) > _SHOWN_IDS
            else ""
        )
        ids = ", ".join(ledger.unknown_ids[:_SHOWN_IDS])
        yield Problem(
            ProblemKind.LEDGER,
            subject="",
            text=f"the kubelet's records hold ids that this node does not offer: {ids}{more}",
        )


def _left_over(status: AgentStatus) -> Iterator[Problem]:
    """Yield directories of ended containers that cannot be removed, as one problem."""
    paths = list(status.binding.left_over)
    if paths:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        remedy = "an ended container has left it, remove it by hand"
        yield Problem(
            ProblemKind.FILES,
            subject="",
            text=f"{paths[0]}{more}: {status.binding.left_over[paths[0]]}",
            remedy=remedy,
        )


def _mps(status: AgentStatus) -> Iterator[Problem]:
    """Yield each MPS control daemon that failed, also one that has only to be ended."""
    for daemon in status.mps:
        if daemon.state is MpsState.FAILED:
            yield Problem(ProblemKind.MPS, subject=daemon.resource, text=daemon.trouble)
        # why a GPU that the daemon had may still be in the compute mode for the daemon alone
        if daemon.not_given_back and daemon.not_given_back != daemon.trouble:
            yield Problem(
                ProblemKind.MPS,
                subject=daemon.resource,
                text="a GPU that was shared may still be in the compute mode EXCLUSIVE_PROCESS: "
                f"{daemon.not_given_back}",
                remedy="set it back by hand: nvidia-smi -i GPU -c DEFAULT",
            )


def _cdi(status: AgentStatus) -> Iterator[tuple[Problem, str]]:
    """Yield each error of CDI specs, once for all specs of a directory; and the error itself."""
    errors: dict[str, CdiSpecStatus] = {}
    for spec in status.cdi.specs:
        if spec.error:
            errors.setdefault(spec.error.replace(spec.path, os.path.dirname(spec.path)), spec)
    for text, spec in errors.items():
        yield Problem(ProblemKind.CDI, subject="", text=text), spec.error


def _files(status: AgentStatus) -> Iterator[tuple[Problem, WriteFailure]]:
    """Yield the files that cannot be written, once for a directory and reason; with the first
    failure of them.
    """
    by_cause: dict[tuple[str, str], list[WriteFailure]] = {}
    for failure in status.write_failures:
        by_cause.setdefault((failure.directory, failure.error), []).append(failure)
    for (directory, error), failures in by_cause.items():
        files = ", ".join(failure.files for failure in failures)
        meanwhile = ", and ".join(dict.fromkeys(failure.meanwhile for failure in failures))
        problem = Problem(
            ProblemKind.FILES,
            subject="",
            text=f"cannot write {files} in {directory}: {error}",
            remedy=f"{MAKE_ROOM}; until then {meanwhile}",
        )
        yield problem, failures[0]


def _limits(status: AgentStatus) -> Iterator[Problem]:
    """Yield containers whose region is unreadable, such as that of a library of unknown layout."""
    if regions := status.unreadable_regions:
        container, reason = next(iter(regions.items()))
        more = f" and {len(regions) - 1} more containers" if len(regions) > 1 else ""
        yield Problem(
            ProblemKind.LIMITS,
            subject="",
            text=f"the region of {container}{more} cannot be read, so nothing shows that its "
            f"limits are in force: {reason}",
            remedy="compare the library in the container with the one that the agent has installed",
        )


def _vanished(status: AgentStatus) -> Iterator[Problem]:
    """Yield each grant on a GPU or MIG instance that the node no longer has."""
    for grant, device in mig.on_missing_devices(status):
        who = (
            grant.owner.pod_name
            if grant.owner
            else "a container that the kubelet has not named yet"
        )
        yield Problem(
            ProblemKind.RESOURCE,
            subject=grant.resource,
            text=f"{who} runs on {device}, which this node no longer has",
        )
