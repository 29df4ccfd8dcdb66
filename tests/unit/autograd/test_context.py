"""The contexts of a worker: what is recorded in them, ids, and what is remembered of those that are over."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import functions
from gradwire.autograd.context import (
    MAX_WORKER,
    CallSite,
    DistAutogradContainer,
    DistAutogradContext,
    IdSource,
    RecordedSend,
    find_call_site,
)
from gradwire.config import WorkerConfig
from gradwire.errors import AutogradError, UnknownContext
from gradwire.rpc import Agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.testing import wait_until
from gradwire.types import MAX_COUNTER, WorkerInfo, creator_of, first_counter
from unit.autograd.layers import context_of, engine_of, layer

# -- What a context records, and what it says about it ------------------------------------------------------------------


SITE = CallSite("", 0, "")


def make_send(*tensors: torch.Tensor) -> RecordedSend:
    return RecordedSend(0xABC, 1, "layers:layer", SITE, list(tensors))


def test_messages_are_kept_in_the_order_in_which_they_were_made() -> None:
    context = DistAutogradContext(77)
    x = torch.ones(2, requires_grad=True)
    context.record_send(1, 4, "f", [x * 2])
    (received,) = context.record_recv(2, 5, "g", [torch.ones(2)])
    context.record_send(3, 4, "h", [received])
    assert [(item.message_id, item.peer, item.is_send) for item in context.exchanges] == [
        (1, 4, True),
        (2, 5, False),
        (3, 4, True),
    ]
    assert context._context_id() == 77
    assert set(context._send_functions()) == {1, 3}
    assert set(context._recv_functions()) == {2}
    assert context._known_worker_ids() == {4, 5}
    assert repr(context) == "<DistAutogradContext 77: 2 sends, 1 recv, 0 passes in progress>"


def test_functions_of_sends_and_recvs_are_those_of_the_graph() -> None:
    """PyTorch's own tests walk them."""
    context = DistAutogradContext(77)
    x = torch.ones(2, requires_grad=True)
    sent = x * 2
    (received,) = context.record_recv(2, 5, "g", [torch.ones(2)])
    context.record_send(1, 4, "f", [sent, received])
    functions = [function for function, _ in context._send_functions()[1].next_functions]
    assert functions == [sent.grad_fn, received.grad_fn]
    assert context._recv_functions()[2] is received.grad_fn


def test_a_send_of_leaves_has_a_node_once_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(message_id: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        made.append(message_id)
        return functions.make_send(message_id, tensors)

    monkeypatch.setattr(sys.modules[RecordedSend.__module__], "make_send", noted)
    context = DistAutogradContext(77)
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    context.record_send(1, 4, "f", [x, y])
    context.record_send(2, 4, "f", [x, y * 2])  # what its node keeps may change
    assert made == [2]
    assert context.sends[1].start == [x, y]
    y.requires_grad_(False)
    node = context._send_functions()[1]
    assert made == [2, 1]
    assert context._send_functions()[1] is node
    (first, _), (second, _) = node.next_functions
    assert first.variable is x
    assert second.variable is not y  # it was frozen, so it gets nothing


def test_a_send_of_leaves_begins_at_its_node_for_hooks() -> None:
    x = torch.ones(2, requires_grad=True)
    send = make_send(x)
    handle = x.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert send.start is send.output.grad_fn
    handle.remove()
    (found,) = send.start
    assert found is x


def test_what_was_recorded_is_a_copy() -> None:
    context = DistAutogradContext(77)
    known = context._known_worker_ids()
    known.add(12)
    assert context._known_worker_ids() == set()


def test_touched_workers_are_known_until_the_release() -> None:
    context = DistAutogradContext(77)
    assert context.touch(3)
    assert context.touch(3)
    context.released = "here"
    assert context.touch(3)
    assert not context.touch(4)
    assert context._known_worker_ids() == {3}
    assert "released here" in repr(context)


def test_recording_is_safe_between_threads() -> None:
    context = DistAutogradContext(77)
    x = torch.ones(2, requires_grad=True)

    def record(first: int) -> None:
        for number in range(first, first + 50):
            context.record_send(number, number % 7, "f", [x])

    threads = [threading.Thread(target=record, args=(start,), name=f"records-{start}") for start in range(0, 400, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(context.sends) == len(context.exchanges) == 400
    assert context._known_worker_ids() == set(range(7))


def test_call_site_is_the_users_line() -> None:
    site = find_call_site()
    assert str(site).startswith("test_context.py:")
    assert str(site).endswith("in test_call_site_is_the_users_line")
    assert str(SITE) == "its result"


def test_send_is_recorded_with_the_line_of_the_call(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(x,))
        (send,) = context_of(trio[0], ctx).sends.values()
        assert str(send.site).endswith("in test_send_is_recorded_with_the_line_of_the_call")
        assert send.function == "unit.autograd.layers:layer"
        (reply,) = context_of(trio[1], ctx).sends.values()
        assert reply.peer == 0


# -- gradients that cannot be for a send ---------------------------------------------------------------------------


def test_right_gradients_are_taken() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    send = make_send(x * 2, y * 2)
    send.check([torch.ones(2), torch.ones(3, 1)])
    send.check([None, torch.ones(3, 1)])
    assert list(send.no_gradients) == [None, None]


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ([torch.ones(2)], "got 1 for 2 tensors"),
        ([torch.ones(2), torch.ones(3, 1), None], "got 3 for 2 tensors"),
        ([], "got 0 for 2 tensors"),
        ([None, None], "all of them are undefined"),
        ([torch.ones(3), None], r"gradient 0 has shape \(3,\), not \(2,\)"),
        ([None, torch.ones(1, 3)], r"gradient 1 has shape \(1, 3\), not \(3, 1\)"),
        ([torch.ones(()), None], r"gradient 0 has shape \(\), not \(2,\)"),
        ([torch.ones(2, dtype=torch.float64), None], "gradient 0 has dtype torch.float64, not torch.float32"),
        ([None, torch.ones(3, 1, dtype=torch.int64)], "gradient 1 has dtype torch.int64, not torch.float32"),
    ],
    ids=["too few", "too many", "none", "undefined", "shape", "transposed", "no dimension", "double", "integers"],
)
def test_wrong_gradients_are_refused(gradients: list[torch.Tensor | None], words: str) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    with pytest.raises(AutogradError, match=words) as caught:
        make_send(x * 2, y * 2).check(gradients)
    assert all(word in str(caught.value) for word in ("0xabc", "layers:layer", "its result"))


# -- The contexts of one worker: ids, shards, release and what is remembered of it --------------------------------------


YEAR_2026_NS = 1_767_225_600_000_000_000
TICK_NS = 10_000_000


@pytest.mark.parametrize("rank", [0, 1, 513, MAX_WORKER])
def test_ids_hold_the_worker_and_a_counter(rank: int) -> None:
    container = DistAutogradContainer(rank, incarnation=0)
    first, second = container.new_message_id(), container.new_message_id()
    assert (first >> 48, first & MAX_COUNTER) == (rank, 1)
    assert second == first + 1
    assert creator_of(first) == creator_of(container.new_context().context_id) == rank
    assert container.max_id == (rank << 48) + 2**48 - 1
    assert container.max_id < 2**64


@pytest.mark.parametrize("rank", [-1, MAX_WORKER + 1])
def test_rank_must_fit_into_16_bits(rank: int) -> None:
    with pytest.raises(AutogradError, match=f"between 0 and 65535, not {rank}"):
        DistAutogradContainer(rank, incarnation=0)


def test_counter_ends_with_an_error_not_with_an_id_of_the_next_worker() -> None:
    source = IdSource(3, MAX_COUNTER)
    assert source.next() == (3 << 48) | MAX_COUNTER
    for _ in range(2):
        with pytest.raises(AutogradError, match="run out of autograd context and message ids"):
            source.next()


def test_no_id_is_zero() -> None:
    """Zero stands for no context and no message."""
    assert IdSource(0, first_counter(0)).next() == 1


def test_restarted_worker_begins_above_everything_its_predecessor_gave_out() -> None:
    """As long as that was no more than 512 ids in a hundredth of a second, for as long as it lived."""
    old = IdSource(7, first_counter(YEAR_2026_NS))
    given_out = [old.next() for _ in range(512)]
    new = IdSource(7, first_counter(YEAR_2026_NS + TICK_NS))
    assert new.next() > max(given_out)


def test_worker_restarted_after_the_clock_was_set_back_repeats_no_ids() -> None:
    """Others remember what its predecessor released, and would take its new contexts for those."""
    before = time.time_ns() + 3600 * 10**9
    old = IdSource(0, first_counter(before))
    given_out = [old.next() for _ in range(100_000)]
    config = WorkerConfig(transports=("inproc",), token=b"secret")
    agent = start_worker(WorkerInfo("a", 0), config, StaticDirectory(), after=before)
    try:
        container = engine_of(agent).container
        assert container.new_message_id() > given_out[-1]
        assert agent.address.incarnation > before
    finally:
        agent.close()


def test_counters_last_for_decades() -> None:
    in_100_years = YEAR_2026_NS + 100 * 365 * 86_400 * 10**9
    assert 0 < first_counter(YEAR_2026_NS) < first_counter(in_100_years) < MAX_COUNTER


def test_ids_of_contexts_cannot_be_guessed() -> None:
    """Who knows the ids of all contexts before cannot name the next one."""
    container = DistAutogradContainer(2, YEAR_2026_NS)
    found = sorted(container.new_context().context_id & MAX_COUNTER for _ in range(256))
    assert len(set(found)) == 256
    assert min(found) < MAX_COUNTER // 4 < 3 * (MAX_COUNTER // 4) < max(found)
    assert min(after - before for before, after in itertools.pairwise(found)) > 256


def test_ids_are_unique_between_threads() -> None:
    container = DistAutogradContainer(1, YEAR_2026_NS)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: container.new_context().context_id, range(400)))
    assert len(set(made)) == 400
    assert len(container) == 400
    assert sorted(context.context_id for context in container) == sorted(made)


def test_contexts_of_others_are_counted() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    for number in range(1, 65):
        container.get_or_create((5 << 48) | number, 5)
    assert len(container) == len(list(container)) == 64
    assert "64 contexts" in repr(container)


def test_retrieve() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    context = container.new_context()
    assert container.retrieve(context.context_id) is context
    assert container.find(context.context_id) is context
    assert container.find(4711) is None
    with pytest.raises(UnknownContext, match=r"Could not find autograd context with id: 4711\. Rank 1 has never"):
        container.retrieve(4711)


def test_context_of_another_worker_is_made_once() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    foreign = (5 << 48) | 9
    barrier = threading.Barrier(8)

    def get(_: int) -> DistAutogradContext | None:
        barrier.wait(10)
        return container.get_or_create(foreign, 5)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(get, range(8)))
    assert found == {container.retrieve(foreign)}


def test_own_context_is_never_made_by_a_message() -> None:
    """An id of this worker that it does not know is over, or was never given out."""
    container = DistAutogradContainer(1, incarnation=0)
    own = container.new_context()
    assert container.get_or_create(own.context_id, 5) is own
    assert container.get_or_create(own.context_id ^ 1, 5) is None
    assert len(container) == 1


def test_released_context_is_gone_and_says_where() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    context = container.new_context()
    assert container.where_released(context.context_id) is None
    assert container.release(context.context_id, "on worker a at train.py:12") is context
    assert context.released == "on worker a at train.py:12"
    assert container.release(context.context_id, "somewhere else") is None
    assert container.where_released(context.context_id) == "on worker a at train.py:12"
    with pytest.raises(UnknownContext, match=r"It was released on worker a at train\.py:12"):
        container.retrieve(context.context_id)
    with pytest.raises(UnknownContext, match=r"It was released on worker a at train\.py:12"):
        context.check_alive()


def test_late_message_does_not_revive_a_context() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    foreign = (5 << 48) | 9
    assert container.get_or_create(foreign, 5) is not None
    container.release(foreign, "there")
    assert container.get_or_create(foreign, 5) is None
    never_seen = (5 << 48) | 10
    container.release(never_seen, "there")  # its release came before its first message
    assert container.get_or_create(never_seen, 5) is None
    assert len(container) == 0


def test_releases_are_remembered_for_a_while_and_no_longer() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    foreign = [(5 << 48) | number for number in range(1, 20_001)]
    for context_id in foreign:
        container.release(context_id, "there")
    assert container.where_released(foreign[-16_000]) == "there"
    assert container.where_released(foreign[0]) is None
    assert len(container._released) == 16_384


def test_a_worker_that_releases_many_contexts_pushes_out_its_own_words_alone() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    honest = (5 << 48) | 7
    container.release(honest, "by an honest worker", 5)
    for number in range(1, 20_001):
        container.release((6 << 48) | number, "there", 6)
    assert container.where_released(honest) == "by an honest worker"
    assert container.where_released((6 << 48) | 1) is None
    assert len(container._released) == 16_385


def test_whoever_waits_for_a_context_is_told_of_its_release() -> None:
    container = DistAutogradContainer(1, incarnation=0)
    context = container.new_context()
    seen: list[str | None] = []

    class Undecided:
        is_undecided = True

    context.passes[1] = Undecided()  # type: ignore[assignment]

    def wait() -> None:
        try:
            context.wait_gradients(10)
        except UnknownContext:
            seen.append(context.released)

    thread = threading.Thread(target=wait, name="waits")
    thread.start()
    wait_until(lambda: context._changed is not None)
    context.passes.clear()
    container.release(context.context_id, "here")
    thread.join(10)
    assert seen == ["here"]
