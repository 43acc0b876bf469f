"""The check of an early answer against the container that has it."""

from __future__ import annotations

import msgspec

from tests.golden import U0, U1
from vgpu_agent.allocation.early.answers import Answers, Given, StartFacts, Verdict
from vgpu_agent.isolation.edits import Edits, Mount, Provision
from vgpu_agent.model import Grant, Owner, Share

A, B = ("uid-a", "main"), ("uid-b", "main")
SHARES = (Share(U0, 1000),)


def provision(of: tuple[str, str], gpu: str = U0) -> Provision:
    """Return the right provision of a container: its GPU, and a folder of its own."""
    return Provision(Edits({"GPU": gpu, "OWN": "/".join(of)}))


def facts(key: tuple[str, str], answer: Edits | None, **more: object) -> StartFacts:
    """A container of one pod that has ``answer``."""
    answers = {key[1]: answer} if answer is not None else {}
    found = StartFacts(
        key, SHARES, {key[1]: provision(key)}, answers, elsewhere=(), has_init_requests=False
    )
    return msgspec.structs.replace(found, **more)  # the fields of StartFacts


def alive(_: str) -> bool:
    """No container is gone."""
    return False


def test_the_answer_that_it_should_have_is_right_whoever_remembers_it() -> None:
    """After a restart nothing is remembered, and kubelet's copy is enough."""
    assert Answers().judge("t", facts(A, provision(A).edits), alive) is Verdict.RIGHT


def test_every_container_with_the_ids_must_have_its_own_answer() -> None:
    """An init container and the one behind it get their own answers.
    A third one's answer to either is wrong.
    """
    expected = {"init": provision(("uid-a", "init")), "main": provision(A)}
    right = facts(
        A,
        None,
        expected=expected,
        answers={name: each.edits for name, each in expected.items()},
        has_init_requests=True,
    )
    assert Answers().judge("t", right, alive) is Verdict.RIGHT
    wrong = msgspec.structs.replace(
        right, answers={"init": provision(B).edits, "main": provision(A).edits}
    )
    assert Answers().judge("t", wrong, alive) is Verdict.WRONG


def test_without_the_checkpoint_memory_speaks_but_not_for_init_containers() -> None:
    """Memory holds one answer for the ids. Which of the pod's containers starts
    with it would be a guess.
    """
    guesses = Answers()
    guesses.note_answer("t", Given(A, SHARES, provision(A)))
    assert guesses.judge("t", facts(A, None), alive) is Verdict.RIGHT
    assert guesses.judge("t", facts(A, None, has_init_requests=True), alive) is Verdict.LATER
    assert Answers().judge("t", facts(A, None), alive) is Verdict.WRONG
    # another pod may have this answer, too
    assert guesses.judge("t", facts(B, None), lambda _: True) is Verdict.LATER


def test_equal_shares_are_exchanged_when_the_other_has_this_ones_answer() -> None:
    """Before the other is admitted, its share of the answer is unknown.
    Afterwards both are right.
    """
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    assert guesses.judge("t1", facts(B, provision(A).edits), alive) is Verdict.LATER
    guesses.note_answer("t2", Given(B, SHARES, provision(B)))
    assert guesses.judge("t1", facts(B, provision(A).edits), alive) is Verdict.EXCHANGE
    assert guesses.exchange("t1", B) == A
    assert guesses.judge("t1", facts(B, provision(A).edits), alive) is Verdict.RIGHT
    assert guesses.judge("t2", facts(A, provision(B).edits), alive) is Verdict.RIGHT


def test_what_was_meant_for_a_pod_that_is_gone_is_not_kept() -> None:
    """Deleted by force, its container may still run in the folder that the answer names."""
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    assert (
        guesses.judge("t1", facts(B, provision(A).edits), lambda uid: uid == "uid-a")
        is Verdict.WRONG
    )


def test_an_answer_that_somebody_else_has_is_not_shared() -> None:
    """Two containers would have one folder."""
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    guesses.note_answer("t2", Given(B, SHARES, provision(B)))
    crowded = facts(B, provision(A).edits, elsewhere=(provision(A).edits,))
    assert guesses.judge("t1", crowded, alive) is Verdict.WRONG


def test_a_directory_is_never_shared_even_if_the_answers_differ() -> None:
    """An agent that was started anew has answered for A once more, with another GPU:
    both answers lead into A's directory.
    """
    own = Mount("/own", "/own/a/cache")
    before = Provision(Edits({"GPU": U1}, (own,)), own_directory="/own/a")
    again = Provision(Edits({"GPU": U0}, (own,)), own_directory="/own/a")
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, again))
    guesses.note_answer("t2", Given(B, SHARES, provision(B)))
    assert (
        guesses.judge("t1", facts(B, again.edits, elsewhere=(before.edits,)), alive)
        is Verdict.WRONG
    )
    own_answer = facts(A, again.edits, expected={"main": again}, elsewhere=(before.edits,))
    assert guesses.judge("t1", own_answer, alive) is Verdict.WRONG
    elsewhere = Edits({"GPU": U0}, (Mount("/own", "/own/ab/cache"),))
    assert (
        guesses.judge("t1", facts(B, again.edits, elsewhere=(elsewhere,)), alive)
        is Verdict.EXCHANGE
    )


def test_an_answer_of_an_earlier_agent_is_still_its_containers() -> None:
    """It mounted other things, and the kubelet keeps it: after an upgrade a container must start
    again. The directory names its owner.
    """
    now = Provision(
        Edits({"GPU": U0, "NEW": "1"}, (Mount("/region", "/new/a/cache"),)),
        own_directory="/new/a",
        earlier_directory="/old/a",
    )
    then = Edits({"GPU": U0}, (Mount("/tmp/vgpu", "/old/a"), Mount("/region", "/old/a/cache")))
    assert Answers().judge("t", facts(A, then, expected={"main": now}), alive) is Verdict.RIGHT
    another_gpu = msgspec.structs.replace(then, environment={"GPU": U1})
    assert (
        Answers().judge("t", facts(A, another_gpu, expected={"main": now}), alive) is Verdict.WRONG
    )
    anothers = msgspec.structs.replace(then, mounts=(Mount("/tmp/vgpu", "/old/ab"),))
    assert Answers().judge("t", facts(A, anothers, expected={"main": now}), alive) is Verdict.WRONG
    shared = facts(A, then, expected={"main": now}, elsewhere=(then,))
    assert Answers().judge("t", shared, alive) is Verdict.WRONG


def test_an_answer_with_another_share_is_not_left_to_somebody_else() -> None:
    """B could keep what was meant for A, but what was meant for B is not what A should have."""
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    guesses.note_answer("t2", Given(B, (Share(U1, 1000),), provision(B, U1)))
    assert guesses.judge("t1", facts(B, provision(A).edits), alive) is Verdict.WRONG


def test_unequal_shares_are_never_exchanged() -> None:
    """Another GPU, another limit: refused."""
    guesses = Answers()
    guesses.note_answer("t1", Given(A, (Share(U1, 1000),), provision(A, U1)))
    guesses.note_answer("t2", Given(B, SHARES, provision(B)))
    assert guesses.judge("t1", facts(B, provision(A, U1).edits), alive) is Verdict.WRONG


def test_whom_a_refuted_answer_was_meant_for_waits_again() -> None:
    """It has not been answered by it, and the one that has it has."""
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    assert guesses.note_wrong_answer("t1", B) is not None
    assert guesses.answered == {B}
    assert guesses.note_wrong_answer("t1", B) is None


def test_a_container_that_has_a_wrong_answer_waits_for_no_other() -> None:
    """The kubelet asks once for each container,
    so a third pod's call is not taken for one that has its answer, however wrong.
    """
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    guesses.note_answer("t2", Given(B, SHARES, provision(B)))
    guesses.note_wrong_answer("t2", A)  # A has the answer that was meant for B
    assert guesses.answered == {A}
    guesses.note_wrong_answer("t1", B)  # and B what was meant for A, which has its ids already
    assert guesses.answered == {A, B}


def test_kubelets_records_correct_who_was_answered() -> None:
    """Verification names the holder before it starts: the one that it was taken for has nothing."""
    guesses = Answers()
    guesses.note_answer("t1", Given(A, SHARES, provision(A)))
    grant = Grant(
        1, "f", "r", ("x",), SHARES, owner=Owner("main", "uid-b", "ns", "b"), decided_for=A
    )
    guesses.learn([B], [grant])
    assert guesses.answered == {B}
    guesses.keep_only({"uid-a"})
    guesses.keep_tokens(())
    assert (guesses.answered, guesses.given) == (set(), {})
