"""The probes ``/livez``, ``/healthz`` and ``/readyz``.

``/livez`` (and its old name ``/healthz``) fails when the kubelet should restart the agent.
``/readyz`` fails when the agent cannot offer the node's resources. A missing kubelet or a hung
driver makes the agent not ready, but a restart would not help. So only a stuck task makes it not
alive. A stuck event loop gives no answer at all, which the kubelet counts as a failure too.

`agent` decides both (`AgentStatus.not_alive` and `not_ready`). This module writes the answers:
plain text, one line for each reason. ``/readyz`` also lists the node's other problems, which do not
make it fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.concurrency import TaskState
from vgpu_agent.status import NvmlState
from vgpu_agent.web import problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.status import AgentStatus, Problem


class Verdict(NamedTuple):
    """The answer of a probe.

    Attributes:
        ok: the probe succeeds (HTTP status 200); otherwise it fails (503).
        lines: each part with its mark, and its state or fault; at last the verdict. The marks are
            ``[-]`` a reason to fail, ``[+]`` good, and ``[~]`` a problem that decides nothing.
    """

    ok: bool
    lines: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(f"{name}: {state}\n" if state else f"{name}\n" for name, state in self.lines)

    @property
    def without_reasons(self) -> str:
        """The answer without states and faults, for readers who may not see the names of pods."""
        return "".join(f"{name}\n" for name, _ in self.lines)


class Check(NamedTuple):
    """One line of ``?verbose``. It informs only; the verdict does not depend on it."""

    part: str
    ok: bool
    state: str


def live(status: AgentStatus, now: float, *, verbose: bool) -> Verdict:
    """Answer ``/livez``, which fails only when a task of the agent is stuck."""
    return _verdict("alive", status.not_alive, (), _loop_checks(status, now), verbose=verbose)


def ready(status: AgentStatus, now: float, *, verbose: bool) -> Verdict:
    """Answer ``/readyz``, which fails while the agent starts or stops, the driver does not answer,
    nothing is offered, or a configured resource is not: it is held back for a reason that is named
    (such as a CDI spec that cannot be written), or not registered with an open stream.
    """
    checks = (*_node_checks(status), *_api_checks(status, now), *_loop_checks(status, now))
    # problems that differ in the resource or GPU only become one, as `known` lists them
    reasons = problems.merged(status.not_ready)
    others = tuple(each for each in problems.known(status, now) if each not in reasons)
    return _verdict("ready", reasons, others, checks, verbose=verbose)


def _verdict(
    word: str,
    reasons: tuple[Problem, ...],
    others: tuple[Problem, ...],
    checks: tuple[Check, ...],
    *,
    verbose: bool,
) -> Verdict:
    # "-" marks a reason why the probe fails. Other problems ("~") and the checks, good ("+") or not
    # ("~"), decide nothing.
    lines = [("-", problem.part, problem.reason) for problem in reasons]
    lines += [("~", problem.part, problem.reason) for problem in others]
    if verbose:
        lines += [("+" if check.ok else "~", check.part, check.state) for check in checks]
    printed = ((f"[{mark}] {_one_line(part)}", _one_line(state)) for mark, part, state in lines)
    return Verdict(ok=not reasons, lines=(*printed, (f"not {word}" if reasons else word, "")))


def _node_checks(status: AgentStatus) -> tuple[Check, ...]:
    nvml = status.nvml
    state = f"{nvml.state.value}{f', in {nvml.call}' if nvml.state is NvmlState.HUNG else ''}"
    kubelet = (
        "socket present"
        if status.kubelet.socket_present
        else status.kubelet.directory_trouble or f"no socket in {status.kubelet.directory}"
    )
    plugins = (
        Check(
            f"resource {plugin.resource}",
            ok=plugin.ready,
            state=f"{plugin.state.value}, stream {'open' if plugin.stream_open else 'closed'}, "
            f"{plugin.healthy_sent} of {plugin.ids_sent} ids healthy",
        )
        for plugin in status.plugins
    )
    config = "the newest configuration is not in force" if status.config_problems else "in force"
    return (
        # a Tegra GPU is used without NVML
        Check("nvml", ok=nvml.state in {NvmlState.ANSWERING, NvmlState.UNUSED}, state=state),
        Check("kubelet", ok=status.kubelet.socket_present, state=kubelet),
        *plugins,
        Check("config", ok=not status.config_problems, state=config),
    )


def _api_checks(status: AgentStatus, now: float) -> Iterator[Check]:
    """Check the watches that the matching of containers with pods depends on.

    An outage of the API server does not make the agent unready: the objects that are already known
    stay in use.
    """
    for watch in status.cluster.watches:
        if watch.essential:
            state = "complete" if watch.synced else "no answer yet"
            if watch.failing_since:
                state = f"failing for {now - watch.failing_since:.0f} s: {watch.last_error}"
            yield Check(
                f"watch of {watch.name}", ok=watch.synced and not watch.failing_since, state=state
            )


def _loop_checks(status: AgentStatus, now: float) -> tuple[Check, ...]:
    lag = (
        f"{status.loop_lag_seconds * 1000:.1f} ms late (99th percentile), "
        f"{status.loop_lag_max_seconds * 1000:.1f} ms at worst"
    )
    return (Check("event loop", ok=True, state=lag), *_task_checks(status, now))


def _task_checks(status: AgentStatus, now: float) -> Iterator[Check]:
    for task in status.tasks:
        stuck = task.stuck_for(now)
        text = f"no heartbeat for {stuck:.0f} s longer than allowed" if stuck else task.state.value
        if task.last_error and task.state is not TaskState.RUNNING:
            text += f" ({task.last_error})"
        yield Check(
            f"task {task.name}",
            ok=not stuck and task.state in (TaskState.RUNNING, TaskState.ENDED),
            state=text,
        )


def _one_line(text: str) -> str:
    """Join the lines of ``text``: reasons quote messages of other software, which may have line
    breaks.
    """
    return " ".join(text.split())
