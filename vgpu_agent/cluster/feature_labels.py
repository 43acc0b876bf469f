"""Keep the labels of GPU Feature Discovery (GFD) on our Node, unless GFD itself runs.

The names of the labels that were written are in an annotation of the Node. So labels of an earlier
configuration, or of a setting that was switched off, are removed, also after a restart, and labels
of others never are.

GFD is recognised by a label that only it writes, or by another client that keeps changing the
agent's values. Then the agent gives its labels up: they are GFD's from that moment on.

Called for each desired state of `node_publisher`.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from vgpu_agent.nodes import DesiredNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vgpu_agent.journal import Journal
    from vgpu_agent.nodes import Node

ANNOTATION = "vgpu-agent.internal/feature-labels"
# This many changes of our values by another writer within this time come from a program, not from a
# person.
_CHANGES, _CHANGES_SECONDS = 3, 3600.0


class FeatureLabels:
    """The desired labels.

    State: the changes by another writer, and that the agent has given up; both end with the
    process. A new process that finds the labels of GFD gives up again.
    """

    def __init__(
        self,
        labels: Callable[[], Mapping[str, str] | None] | None,
        foreign: str,
        journal: Journal,
    ) -> None:
        """Build it.

        Args:
            labels: returns the labels; None while the GPUs do not answer. None in its place where
                the setting is off.
            foreign: the label that only GFD writes.
            journal: records that the labels are left to GFD.
        """
        self._labels, self._foreign, self._journal = labels, foreign, journal
        # labels that the Node had with the agent's values when it was last seen
        self._ours: Mapping[str, str] = {}
        # when another writer changed such a label, in seconds of the event loop's clock
        self._changed_at: collections.deque[float] = collections.deque(maxlen=_CHANGES)
        self._contested = False  # given up because of those changes, and so until the next start
        self._given_up = ""

    def desired_node(self, node: Node) -> DesiredNode:
        """Return the desired labels, and the annotation with their names."""
        if self._labels is None:
            return cleanup(node, keep_labels=self._foreign in node.labels)
        self._notice(node)
        if self._given_up:
            return cleanup(node, keep_labels=True)
        labels = self._labels()
        if labels is None:
            return DesiredNode()  # leaves the Node as it is
        self._ours = {key: value for key, value in labels.items() if node.labels.get(key) == value}
        # None: the label must not be there
        stale = dict.fromkeys(key for key in _written(node) if key not in labels)
        return DesiredNode(
            annotations={ANNOTATION: ",".join(labels)},
            labels={**stale, **labels},
        )

    def _notice(self, node: Node) -> None:
        """Notice GFD by what it has written, and its end by the absence of that."""
        if self._foreign in node.labels:
            self._give_up(
                f"the Node has the label {self._foreign}, so GPU Feature Discovery runs; if it "
                "does not any more, remove that label from the Node"
            )
            return
        if self._given_up and not self._contested:
            self._given_up = ""  # because of that label alone, which is gone
        changed = [key for key, value in self._ours.items() if node.labels.get(key) != value]
        if changed and not self._given_up:
            self._ours = {}
            now = asyncio.get_running_loop().time()
            self._changed_at.append(now)
            if len(self._changed_at) == _CHANGES and now - self._changed_at[0] < _CHANGES_SECONDS:
                self._contested = True
                self._give_up(
                    f"another client keeps changing {changed[0]} of the Node, as GPU Feature "
                    "Discovery does; remove it, or set nodeStatus.featureLabels to false. The "
                    "agent writes these labels again after a restart"
                )

    def _give_up(self, reason: str) -> None:
        if self._given_up != reason:
            self._given_up = reason
            self._journal.record("node.feature_labels_left", level="warning", reason=reason)


def cleanup(node: Node, *, keep_labels: bool = False) -> DesiredNode:
    """Return the desired state of a Node that this agent labels no longer. With ``keep_labels`` the
    labels are another writer's now.
    """
    if ANNOTATION not in node.annotations:
        return DesiredNode()
    return DesiredNode(
        annotations={ANNOTATION: None},
        labels={} if keep_labels else dict.fromkeys(_written(node)),
    )


def _written(node: Node) -> tuple[str, ...]:
    """Return the names of the labels that an agent has written."""
    return tuple(filter(None, node.annotations.get(ANNOTATION, "").split(",")))
