"""The verbs of the webhook: mutate completes a new pod, validate refuses one that can never run
(vgpu-manager §6).

Both take a review (an `AdmissionReview` of the API server) in JSON and return the answer in JSON,
whatever the review is. They handle only the creation of pods: schedulers and agents change pods
later, and their annotations must stay.

A review that cannot be read is refused with the reason. The API server sends no such review, so it
comes from another client, or a tenant has found a pod that the API server can read and this code
cannot. If that pod were admitted, its forged scheduler annotations would be, too. A pod on which
the code fails is refused for the same reason.
"""

from __future__ import annotations

import collections
import traceback
from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.webhook.messages import (
    BAD_REQUEST,
    INTERNAL_ERROR,
    KIND,
    TOO_LARGE,
    allowed,
    cut_review,
    denied,
    read_review,
)
from vgpu_agent.webhook.new_pod import NewPod, Pinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.families.admission import AdmissionFamily, LargestNode
    from vgpu_agent.journal import Journal
    from vgpu_agent.webhook.messages import Review

    _Decide = Callable[[Review, NewPod], tuple[str, bytes]]  # → the outcome, and the answer

MUTATE, VALIDATE = "mutate", "validate"
# the outcomes of a review, as the metrics name them
ALLOWED, CHANGED, DENIED = "allowed", "changed", "denied"
UNREADABLE, LARGE, SLOW, FAILED = "unreadable", "too_large", "too_slow", "failed"
_FAILED_TEXT = "the webhook failed on this pod; its log has the reason (webhook.failed)"
_LAST_FRAMES = 8  # of a traceback, in the log


class Reviewer:
    """The verbs; see the module.

    State: counts only.

    Attributes:
        counts: answers by verb and outcome.
    """

    def __init__(
        self,
        family: AdmissionFamily,
        *,
        journal: Journal,
        largest_node: Callable[[], LargestNode],
        pinned: Pinned = Pinned.AFFINITY,
    ) -> None:
        """Build it.

        Args:
            family: the rules for new pods.
            journal: records denied and failed reviews.
            largest_node: returns the largest amounts that a Node offers, as far as they are known.
            pinned: the treatment of ``spec.nodeName``, which binds a pod without a scheduler; by
                default a node affinity replaces it.
        """
        self._family, self._journal = family, journal
        self._largest_node, self._pinned = largest_node, pinned
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def mutate(self, body: bytes) -> bytes:
        """Answer with the changes to a new pod."""
        return self._answer(MUTATE, body, self._completed)

    def validate(self, body: bytes) -> bytes:
        """Answer whether a new pod may be created."""
        return self._answer(VALIDATE, body, self._judged)

    def too_large(self, verb: str, start: bytes, most_bytes: int, client: str) -> bytes:
        """Refuse a review that is larger than ``most_bytes``.

        Args:
            verb: `MUTATE` or `VALIDATE`.
            start: its first bytes, at least `messages.START_BYTES`, which may have its UID.
            most_bytes: the limit.
            client: the address of the sender.
        """
        problem = f"the {KIND} is larger than {most_bytes} bytes; make the pod smaller"
        review = cut_review(start, problem)
        self._journal.record(
            "webhook.too_large", level="warning", verb=verb, uid=review.uid, client=client
        )
        self.counts[verb, LARGE] += 1
        return denied(review, problem, code=TOO_LARGE)

    def too_slow(self, verb: str, client: str) -> None:
        """Record that a review of ``client`` did not arrive in time."""
        self._journal.record("webhook.too_slow", level="warning", verb=verb, client=client)
        self.counts[verb, SLOW] += 1

    def _answer(self, verb: str, body: bytes, decide: _Decide) -> bytes:
        review = read_review(body)
        try:
            outcome, answer = self._outcome(verb, review, decide)
        except Exception as err:  # noqa: BLE001 - a failed call could let the pod pass unchecked
            self._journal.record(
                "webhook.failed",
                level="error",
                verb=verb,
                error=f"{type(err).__name__}: {err}",
                traceback=traceback.format_tb(err.__traceback__, limit=-_LAST_FRAMES),
            )
            outcome, answer = FAILED, denied(review, _FAILED_TEXT, code=INTERNAL_ERROR)
        self.counts[verb, outcome] += 1
        return answer

    def _outcome(self, verb: str, review: Review, decide: _Decide) -> tuple[str, bytes]:
        error, new = review.problem, None
        if review.request is not None and review.request.is_new_pod:
            try:
                new = NewPod(review.request.object, review.request.namespace or "")
            except RequestRefusedError as err:
                error = str(err)
        if error:
            self._journal.record("webhook.unreadable", level="warning", verb=verb, error=error)
            return UNREADABLE, denied(review, error, code=BAD_REQUEST)
        if new is None:
            return ALLOWED, allowed(review)
        return decide(review, new)

    def _completed(self, review: Review, new: NewPod) -> tuple[str, bytes]:
        patch = new.patch(self._family.changes(new.pod), self._pinned)
        return CHANGED if patch else ALLOWED, allowed(review, patch)

    def _judged(self, review: Review, new: NewPod) -> tuple[str, bytes]:
        judgement = self._family.judge(new.pod, self._largest_node())
        if not judgement.refusals:
            return ALLOWED, allowed(review, warnings=judgement.warnings)
        reason = "; ".join(judgement.refusals)
        self._journal.record("webhook.denied", pod=new.pod.full_name, reason=reason)
        return DENIED, denied(review, reason)
