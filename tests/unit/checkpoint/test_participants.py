"""A step of many workers: all of them end before it does, and one error stands for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from gradwire import rpc
from gradwire.checkpoint.participants import Ranks, Workers, worker_name
from gradwire.errors import CheckpointError, CheckpointWriteFailed

MakeAgents = Callable[..., list[rpc.Agent]]


@rpc.expose(name="test_participants.double")
def double(number: int) -> int:
    return 2 * number


@rpc.expose(name="test_participants.fail")
def fail(is_ours: bool) -> None:
    raise CheckpointWriteFailed("the disk is full", "some-file") if is_ours else KeyError("oops")


@pytest.fixture
def workers(make_agents: MakeAgents) -> Iterator[Workers]:
    """What worker a asks b and c with."""
    rpc.set_current_agent(make_agents(3, trust="data")[0])
    yield Workers("saving to /x", 10.0)
    rpc.set_current_agent(None)


def test_answers_come_in_the_order_of_the_calls(workers: Workers) -> None:
    ended: list[int] = []
    calls = [(name, "test_participants.double", (number,)) for number, name in enumerate(["c", "b", "c"])]
    own, answers = workers.ask(calls, worker_name, on_answer=ended.append)
    assert own == "a"
    assert answers == [("c", 0), ("b", 2), ("c", 4)]
    assert sorted(ended) == [0, 1, 2]


def test_an_error_names_the_worker_and_counts_the_others(workers: Workers) -> None:
    calls = [(name, "test_participants.fail", (False,)) for name in ("b", "c")]
    with pytest.raises(
        CheckpointError, match=r"(?m)^saving to /x failed on worker b \(and on 1 more\): KeyError: 'oops'$"
    ):
        workers.ask(calls, lambda: None)


def test_an_error_of_a_checkpoint_comes_before_others(workers: Workers) -> None:
    calls = [("b", "test_participants.fail", (False,)), ("c", "test_participants.fail", (True,))]
    with pytest.raises(CheckpointWriteFailed, match="the disk is full") as caught:
        workers.ask(calls, lambda: None)
    assert caught.value.file == "some-file"


def test_an_error_here_waits_for_the_others(workers: Workers) -> None:
    ended = threading.Event()

    def fail_here() -> None:
        raise ValueError("not here")

    calls = [("b", "test_participants.double", (1,)), ("unknown", "test_participants.double", (1,))]
    with pytest.raises(CheckpointError, match=r"failed on worker a \(and on 1 more\): ValueError: not here"):
        workers.ask(calls, fail_here, on_answer=lambda _: ended.set())
    assert ended.is_set()


def test_without_a_group_there_is_one_rank() -> None:
    ranks = Ranks(None, "saving to /x")
    assert (ranks.rank, ranks.name) == (0, "local")
    assert (ranks.first(lambda: 1), ranks.each(lambda: 2), ranks.all(lambda: 3)) == (1, 2, [3])
    with pytest.raises(KeyError):
        ranks.each(lambda: {}["as it is"])
