"""What a context records, and what it says about it."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.context import CallSite, DistAutogradContext, RecordedSend, find_call_site
from gradwire.errors import AutogradError
from gradwire.rpc import Agent
from unit.autograd.layers import context_of, layer

SITE = CallSite("", 0, "")


def make_send(*tensors: torch.Tensor) -> RecordedSend:
    return RecordedSend(0xABC, 1, "layers:layer", SITE, tensors)


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
    assert repr(context) == "<DistAutogradContext 77: 2 sends, 1 recvs, 0 passes under way>"


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
        ([torch.ones(2)], "there are 1, but 2 tensors were sent"),
        ([torch.ones(2), torch.ones(3, 1), None], "there are 3, but 2 tensors were sent"),
        ([], "there are 0, but 2 tensors were sent"),
        ([None, None], "all are undefined"),
        ([torch.ones(3), None], r"number 0 has shape \(3,\), not \(2,\)"),
        ([None, torch.ones(1, 3)], r"number 1 has shape \(1, 3\), not \(3, 1\)"),
        ([torch.ones(()), None], r"number 0 has shape \(\), not \(2,\)"),
        ([torch.ones(2, dtype=torch.float64), None], "number 0 has dtype torch.float64, not torch.float32"),
        ([None, torch.ones(3, 1, dtype=torch.int64)], "number 1 has dtype torch.int64, not torch.float32"),
    ],
    ids=["too few", "too many", "none", "undefined", "shape", "transposed", "no dimension", "double", "integers"],
)
def test_wrong_gradients_are_refused(gradients: list[torch.Tensor | None], words: str) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    with pytest.raises(AutogradError, match=words) as caught:
        make_send(x * 2, y * 2).check(gradients)
    assert all(word in str(caught.value) for word in ("0xabc", "layers:layer", "its result"))
