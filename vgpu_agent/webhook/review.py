"""The verbs of the webhook: mutate completes a new pod, validate refuses one that can never run
(vgpu-manager §6).

Both take a review in JSON and return the answer in JSON, whatever comes. They judge pods that are
being created and nothing else: schedulers and agents change pods later, and what they write must
stay. A review that cannot be read is refused with the reason. The API server sends none, so it
comes from another client, or a tenant has found a pod that only the API server can read; to let
that pass would let its state pass as well.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.webhook.messages import (
    BAD_REQUEST,
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

MUTATE, VALIDATE = "mutate", "validate"
ALLOWED, CHANGED, DENIED = "allowed", "changed", "denied"
UNREADABLE, LARGE = "unreadable", "too_large"


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
        largest: Callable[[], LargestNode],
        pinned: Pinned = Pinned.AFFINITY,
    ) -> None:
        """Build it.

        Args:
            family: its rules.
            journal: what is denied is recorded there.
            largest: returns the largest of what the Nodes offer, as far as it is known.
            pinned: what becomes of ``spec.nodeName``.
        """
        self._family, self._journal = family, journal
        self._largest, self._pinned = largest, pinned
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def mutate(self, body: bytes) -> bytes:
        """Answer with what a new pod is to have."""
        return self._answer(MUTATE, body, self._completed)

    def validate(self, body: bytes) -> bytes:
        """Answer whether a new pod may be created."""
        return self._answer(VALIDATE, body, self._judged)

    def too_large(self, verb: str, start: bytes, most_bytes: int, client: str) -> bytes:
        """Refuse a review that is larger than ``most_bytes``.

        Args:
            verb: what was asked.
            start: its first bytes, at least `START_BYTES`.
            most_bytes: so many are read.
            client: who has sent it.
        """
        problem = f"the {KIND} is larger than {most_bytes} bytes; make the pod smaller"
        review = cut_review(start, problem)
        self._journal.record(
            "webhook.too_large", level="warning", verb=verb, uid=review.uid, client=client
        )
        self.counts[verb, LARGE] += 1
        return denied(review, problem, code=TOO_LARGE)

    def _answer(
        self, verb: str, body: bytes, decide: Callable[[Review, NewPod], tuple[str, bytes]]
    ) -> bytes:
        review = read_review(body)
        error, new = review.problem, None
        if review.request is not None and review.request.is_new_pod:
            try:
                new = NewPod(review.request.object, review.request.namespace or "")
            except RequestRefusedError as err:
                error = str(err)
        if error:
            self._journal.record("webhook.unreadable", level="warning", verb=verb, error=error)
            outcome, answer = UNREADABLE, denied(review, error, code=BAD_REQUEST)
        elif new is None:
            outcome, answer = ALLOWED, allowed(review)
        else:
            outcome, answer = decide(review, new)
        self.counts[verb, outcome] += 1
        return answer

    def _completed(self, review: Review, new: NewPod) -> tuple[str, bytes]:
        patch = new.patch(self._family.changes(new.pod), self._pinned)
        return CHANGED if patch else ALLOWED, allowed(review, patch)

    def _judged(self, review: Review, new: NewPod) -> tuple[str, bytes]:
        judgement = self._family.judge(new.pod, self._largest())
        if not judgement.refusals:
            return ALLOWED, allowed(review, warnings=judgement.warnings)
        reason = "; ".join(judgement.refusals)
        self._journal.record("webhook.denied", pod=new.pod.full_name, reason=reason)
        return DENIED, denied(review, reason)
