"""The answers of early Allocates, the containers they were meant for, and whether an answer is
right for the container that has it.

The kubelet's records prove which container starts, and keep the answer that it has. It must be the
answer that this container should have got. Of two containers with equal shares that got each
other's answers, each may keep what it got. Where a backend limits containers, an answer mounts a
directory of the host that is made for one container alone (`Provision.own_directory`), which tells
the answers of equal shares apart.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vgpu_agent.families.family import Remark
    from vgpu_agent.isolation.edits import Edits, Provision
    from vgpu_agent.model import Grant, Share
    from vgpu_agent.pods import Pod

Key = tuple[str, str]  # (the kubelet's UID of the pod, container)


class Given(msgspec.Struct, frozen=True):
    """An early Allocate's answer, the container it was meant for,
    what that container was to have, and what its pod's owner is to be told once it has started.
    """

    decided_for: Key
    shares: tuple[Share, ...]
    provision: Provision
    remarks: tuple[Remark, ...] = ()


class Verdict(enum.StrEnum):
    """The relation of an answer to the container that has it."""

    RIGHT = "right"
    EXCHANGE = "exchange"  # another container's, with an equal share, and that one has this one's
    LATER = "later"  # it may still become one of the two above
    WRONG = "wrong"


class StartFacts(msgspec.Struct, frozen=True):
    """The facts about one container that is about to start.

    Attributes:
        key: the container that the ids are for.
        shares: what it should have.
        expected: the right answers for it and for each container before it with the same ids
            (an init container, whose ids the kubelet gives to a later one), by container name.
        answers: our answers to them as the kubelet keeps them, by container name; empty when its
            checkpoint cannot be read.
        elsewhere: the answers that the kubelet keeps for all other containers.
        has_init_requests: the pod has init containers that ask for the same resource.
    """

    key: Key
    shares: tuple[Share, ...]
    expected: Mapping[str, Provision]
    answers: Mapping[str, Edits]
    elsewhere: Collection[Edits]
    has_init_requests: bool


class Answers:
    """The answers of this process.

    State: `given`, by token, and `answered`, the containers that an answer was meant for or that
    have one, right or wrong; a restart derives the second from the kubelet's records and does
    without the first.

    Attributes:
        admitted_up_to: the highest `Pod.bound` (the position in the order of binds) of the pods to
            which the kubelet is known to have given ids.
    """

    def __init__(self) -> None:
        self.given: dict[str, Given] = {}
        self.answered: set[Key] = set()
        self.admitted_up_to = 0
        # those of `answered` that have ids in the kubelet's records, and so are not asked about
        # again
        self._holders: set[Key] = set()

    def note_answer(self, token: str, given: Given) -> None:
        """Note an answer that was given."""
        self.given[token] = given
        self.answered.add(given.decided_for)

    def note_admission(self, pod: Pod) -> None:
        """Note that the kubelet has given ids to ``pod``;
        by then it has admitted or rejected nearly all pods that were bound before.
        """
        self.admitted_up_to = max(self.admitted_up_to, pod.bound)

    def judge(self, token: str, facts: StartFacts, gone: Callable[[str], bool]) -> Verdict:
        """Tell whether the container may start with the answer it has; ``gone`` tells whether the
        pod with the given UID has ended or does not exist.
        """
        given, answers = self.given.get(token), facts.answers
        if answers and all(
            name in facts.expected and _is_of(answer, facts.expected[name])
            for name, answer in answers.items()
        ):
            return (
                Verdict.WRONG
                if any(_is_among(facts.expected[name], facts.elsewhere) for name in answers)
                else Verdict.RIGHT
            )
        if not answers and facts.has_init_requests:
            # each of its containers has an answer of its own, and which of them starts is not known
            return Verdict.LATER
        if (
            given is None
            or given.shares != facts.shares
            or any(answer != given.provision.edits for answer in answers.values())
        ):
            return Verdict.WRONG
        if given.decided_for == facts.key:
            return Verdict.RIGHT
        return self._judge_of_another(token, given, facts, gone(given.decided_for[0]))

    def _judge_of_another(self, token: str, given: Given, facts: StartFacts, gone: bool) -> Verdict:
        """Judge an answer that was meant for a container other than the one that has it, with an
        equal share. ``gone``: the pod of that other container has ended or does not exist.
        """
        if not facts.answers:
            return Verdict.LATER  # whether another container has this answer as well is not known
        if _is_among(given.provision, facts.elsewhere):
            return Verdict.WRONG  # two containers would share the directory of one
        for other, each in self.given.items():
            if other != token and each.decided_for == facts.key:
                # The holder of that one keeps it as its own, so its share must be equal as well.
                return Verdict.EXCHANGE if each.shares == given.shares else Verdict.WRONG
        # A pod that is gone for the kubelet and the API server may leave a container that has not
        # ended yet and uses the directory of this answer.
        return Verdict.WRONG if gone else Verdict.LATER

    def exchange(self, token: str, key: Key) -> Key:
        """Let ``key`` keep the answer of ``token``, and the container that has the answer meant for
        ``key`` keep that one; return the container that the answer of ``token`` was meant for.
        """
        given = self.given[token]
        remarks: tuple[Remark, ...] = ()
        for other, each in list(self.given.items()):
            if each.decided_for == key:
                remarks = each.remarks
                self.given[other] = msgspec.structs.replace(
                    each, decided_for=given.decided_for, remarks=given.remarks
                )
        self.given[token] = msgspec.structs.replace(given, decided_for=key, remarks=remarks)
        self._note_holder(key)
        return given.decided_for

    def take_remarks(self, token: str, key: Key) -> tuple[Remark, ...]:
        """Return what the owner of the container ``key``, which has started, was not told yet."""
        given = self.given.get(token)
        if given is None or given.decided_for != key:
            return ()
        self.given[token] = msgspec.structs.replace(given, remarks=())
        return given.remarks

    def note_wrong_answer(self, token: str, key: Key) -> Given | None:
        """Note that the answer of ``token`` is not for its holder ``key``; the container it was
        meant for may still wait for one. Return the answer; None if it is not known.
        """
        given = self.given.pop(token, None)
        self._note_holder(key)
        waiting = given is not None and given.decided_for not in self._holders
        if (
            given is not None
            and waiting
            and not any(each.decided_for == given.decided_for for each in self.given.values())
        ):
            self.answered.discard(given.decided_for)
        return given

    def learn(self, holders: Iterable[Key], grants: Iterable[Grant]) -> None:
        """Learn the holders of ids from the kubelet's records: they have their answers. The
        containers that Allocate took for the holders of ``grants`` (`Grant.decided_for`), and that
        are not, have none.
        """
        holding = set(holders)
        for grant in grants:
            if (
                grant.owner is not None
                and grant.decided_for
                and not grant.proven
                and grant.decided_for not in holding
            ):
                self.answered.discard(grant.decided_for)
        self._holders = holding
        self.answered |= holding

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget containers of pods other than ``uids``, those that are not gone;
        an answer that another container may have is kept as long as its ids are.
        """
        self.answered = {key for key in self.answered if key[0] in uids}
        self._holders &= self.answered

    def keep_tokens(self, tokens: Collection[str]) -> None:
        """Forget answers whose ids have no holder any more."""
        self.given = {token: given for token, given in self.given.items() if token in tokens}

    def _note_holder(self, key: Key) -> None:
        self._holders.add(key)
        self.answered.add(key)


def _is_among(provision: Provision, answers: Collection[Edits]) -> bool:
    """Tell whether any of ``answers`` mounts the directory of the provision's own container: the
    present one (``own_directory``), or that of an earlier version of the agent
    (``earlier_directory``).

    Other parts of the answer may differ: an agent that has forgotten its guesses can answer for the
    same container again, with another GPU.
    """
    return any(
        answer == provision.edits
        or leads_into(provision.own_directory, answer)
        or leads_into(provision.earlier_directory, answer)
        for answer in answers
    )


def _is_of(answer: Edits, provision: Provision) -> bool:
    """Tell whether ``answer`` is that of ``provision``,
    or one for the same share by an agent with other mounts or variables.

    The container's own directory identifies the answer. An upgrade, another library or another way
    of binding changes the rest.
    """
    wanted = provision.edits
    if answer == wanted or not (
        leads_into(provision.own_directory, answer)
        or leads_into(provision.earlier_directory, answer)
    ):
        return answer == wanted
    environment_known = answer.environment.items() <= wanted.environment.items()
    same = msgspec.structs.replace(
        answer,
        environment=wanted.environment,
        mounts=wanted.mounts,
        memory_mounts=wanted.memory_mounts,
    )
    return environment_known and same == wanted


def leads_into(directory: str, answer: Edits) -> bool:
    """Tell whether a mount of ``answer`` comes from ``directory`` or from below it;
    an empty ``directory`` is none.
    """
    return bool(directory) and any(
        f"{mount.host_path}/".startswith(f"{directory}/") for mount in answer.mounts
    )
