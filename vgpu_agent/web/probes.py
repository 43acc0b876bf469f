"""``/livez``, ``/healthz`` and ``/readyz``:
whether the kubelet should restart us, and whether the node's resources can be had.

`agent` decides (`AgentStatus.not_alive` and `not_ready`); this module only words it: plain text,
one line a reason. The two must not be mixed up: a missing kubelet or a hung driver makes the agent
not ready, but no restart would mend it, so only a truly stuck loop makes it not alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.concurrency import TaskState
from vgpu_agent.status import NvmlState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_agent.status import AgentStatus, Problem


class Verdict(NamedTuple):
    """The answer of a probe: whether it succeeds (200) or not (503), and for each part a line with
    its name and its state or fault.
    """

    ok: bool
    lines: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(f"{name}: {state}\n" if state else f"{name}\n" for name, state in self.lines)

    @property
    def without_reasons(self) -> str:
        """The answer with the names of the affected parts alone,
        because a reason may name a pod.
        """
        return "".join(f"{name}\n" for name, _ in self.lines)


class Check(NamedTuple):
    """One line of ``?verbose``: informational, the verdict is `agent`'s."""

    part: str
    ok: bool
    state: str


def live(status: AgentStatus, now: float, *, verbose: bool) -> Verdict:
    """``/livez``: fails only when the event loop or an owner task is stuck."""
    return _verdict("alive", status.not_alive, _loop_checks(status, now), verbose=verbose)


def ready(status: AgentStatus, now: float, *, verbose: bool) -> Verdict:
    """``/readyz``: fails while a resource is not registered or the GPUs cannot be asked."""
    checks = (*_node_checks(status), *_api_checks(status, now), *_loop_checks(status, now))
    return _verdict("ready", status.not_ready, checks, verbose=verbose)


def _verdict(
    word: str, problems: tuple[Problem, ...], checks: tuple[Check, ...], *, verbose: bool
) -> Verdict:
    lines = [("-", problem.part, problem.reason) for problem in problems]
    if verbose:
        # "~" marks a fault that is no reason for this probe to fail.
        lines += [("+" if check.ok else "~", check.part, check.state) for check in checks]
    shown = ((f"[{mark}] {_one_line(part)}", _one_line(state)) for mark, part, state in lines)
    return Verdict(not problems, (*shown, (f"not {word}" if problems else word, "")))


def _node_checks(status: AgentStatus) -> tuple[Check, ...]:
    nvml = status.nvml
    state = f"{nvml.state.value}{f', in {nvml.call}' if nvml.state is NvmlState.HUNG else ''}"
    kubelet = (
        "socket present"
        if status.kubelet.socket_present
        else f"no socket in {status.kubelet.directory}"
    )
    plugins = (
        Check(
            f"resource {plugin.resource}",
            plugin.ready,
            f"{plugin.state.value}, stream {'open' if plugin.stream_open else 'closed'}, "
            f"{plugin.healthy_sent} of {plugin.ids_sent} ids healthy",
        )
        for plugin in status.plugins
    )
    refused = "; ".join(status.config_problems)
    config = f"the newest configuration is not in force: {refused}" if refused else "in force"
    return (
        Check("nvml", nvml.state in {NvmlState.ANSWERING, NvmlState.UNUSED}, state),
        Check("kubelet", status.kubelet.socket_present, kubelet),
        *plugins,
        Check("config", not status.config_problems, config),
    )


def _api_checks(status: AgentStatus, now: float) -> Iterator[Check]:
    """Check the watches that binding waits for.
    An outage is no reason to be unready, because known objects are still served.
    """
    for watch in status.cluster.watches:
        if watch.essential:
            state = "complete" if watch.synced else "no answer yet"
            if watch.failing_since:
                state = f"failing for {now - watch.failing_since:.0f} s: {watch.last_error}"
            yield Check(f"watch of {watch.name}", watch.synced and not watch.failing_since, state)


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
            not stuck and task.state in (TaskState.RUNNING, TaskState.ENDED),
            text,
        )


def _one_line(text: str) -> str:
    """Reasons quote foreign messages, which may have line breaks."""
    return " ".join(text.split())
