"""The nodes that stand for messages in the local graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import _torch, rpc
from gradwire.autograd.current_context import begin_run, current_run
from gradwire.autograd.functions import ANCHOR, Gradients, RecvNode, make_gates, make_recv, make_send
from gradwire.errors import AutogradError
from gradwire.rpc import Agent
from unit.autograd.layers import layer


class Run:
    """A run of the local engine that notes what the nodes tell it."""

    def __init__(self, arrived: dict[int, Gradients] | None = None) -> None:
        self.arrived = arrived or {}
        self.fired: dict[int, tuple[int, Gradients]] = {}
        self.waited: list[int] = []
        self.thread = self.ambient_id = 0

    def fire(self, context_id: int, message_id: int, gradients: Gradients) -> None:
        self.fired[message_id] = (context_id, gradients)

    def gradients_of(self, message_id: int) -> Gradients:
        return self.arrived[message_id]

    def wait_settled(self, message_id: int) -> None:
        self.waited.append(message_id)


def call_engine(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    handles = [torch.ones_like(output) for output in outputs]
    arguments = tuple(outputs), tuple(handles), True, False, (*inputs, ANCHOR)
    return list(_torch.run_backward(*arguments, allow_unreachable=True, accumulate_grad=False))


def run_backward(run: Run, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    outer = begin_run(run)
    try:
        return call_engine(outputs, inputs)
    finally:
        current_run.set(outer)


# -- send ------------------------------------------------------------------------------------------------------------


def test_send_hands_on_what_came_for_it() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    output = make_send(7, [x * 2, y * 3])
    assert output.numel() == 0
    run = Run({7: (torch.tensor([1.0, 10.0]), None)})
    of_x, of_y, anchor = run_backward(run, [output], [x, y])
    assert of_x is not None
    assert of_x.tolist() == [2.0, 20.0]
    assert of_y is None
    assert anchor is None


def test_send_is_recorded_whatever_the_grad_mode() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        output = make_send(7, [x])
    node: Any = output.grad_fn
    assert [following.variable for following, _ in node.next_functions if following is not None] == [x]


@pytest.mark.parametrize(
    "gradients",
    [(torch.ones(2),), (torch.ones(2), None, torch.ones(1)), (torch.ones(5), None)],
    ids=["few", "many", "shape"],
)
def test_torch_itself_refuses_what_does_not_fit_a_send(gradients: Gradients) -> None:
    """`RecordedSend.check` says it better, and before; this is what would happen without it."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients|invalid gradient at index"):
        run_backward(Run({7: gradients}), [make_send(7, [x * 2, y * 3])], [x, y])


# -- recv ------------------------------------------------------------------------------------------------------------


def test_received_tensors_are_no_leaves_and_may_be_changed() -> None:
    came = torch.ones(2)
    (received,) = make_recv(5, 8, [came])
    assert type(received.grad_fn) is RecvNode
    assert not received.is_leaf
    assert received.data_ptr() == came.data_ptr()
    received.mul_(3)
    run = Run()
    run_backward(run, [received.sum()], [])
    context_id, (gradient,) = run.fired[8]
    assert context_id == 5
    assert gradient is not None
    assert gradient.tolist() == [3.0, 3.0]


def test_one_node_for_a_message_that_fires_once_with_all_its_gradients() -> None:
    first, second, third = make_recv(5, 8, [torch.ones(2), torch.ones(3), torch.ones(1)])
    assert first.grad_fn is second.grad_fn
    run = Run()
    run_backward(run, [(first * 2).sum(), third.sum(), first.sum()], [])
    _, gradients = run.fired[8]
    assert [None if item is None else item.tolist() for item in gradients] == [[3.0, 3.0], None, [1.0]]


def test_recv_is_recorded_whatever_the_grad_mode() -> None:
    with torch.no_grad():
        (received,) = make_recv(5, 8, [torch.ones(2)])
    assert received.requires_grad
    assert (received * 2).requires_grad


def test_parameter_that_arrives_is_an_ordinary_tensor() -> None:
    (received,) = make_recv(5, 8, [torch.nn.Parameter(torch.ones(2))])
    assert type(received) is torch.Tensor
    assert not received.is_leaf


def test_anchor_never_gets_a_gradient() -> None:
    (received,) = make_recv(5, 8, [torch.ones(2)])
    assert run_backward(Run(), [received.sum()], []) == [None]
    assert ANCHOR.grad is None


def test_local_backward_through_a_received_tensor_says_what_to_do() -> None:
    (received,) = make_recv(5, 8, [torch.ones(2)])
    words = r"from another worker: use gradwire.autograd.backward\(context_id, \[loss\]\) instead of loss.backward\(\)"
    with pytest.raises(AutogradError, match=words):
        torch.autograd.backward(received.sum())


def test_plain_backward_of_a_remote_result_says_what_to_do(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        with pytest.raises(RuntimeError, match=r"use gradwire\.autograd\.backward") as caught:
            torch.autograd.backward(loss, retain_graph=True)
        assert isinstance(caught.value, AutogradError)
        assert x.grad is None
        ctx.backward(loss)
        assert x in ctx.gradients()


def test_plain_backward_in_a_hook_does_not_answer_for_the_run(trio: list[Agent]) -> None:
    """It sent its own gradient to the other worker, in the place of the one that the run computed."""
    x = torch.ones(3, requires_grad=True)
    seen: list[Exception] = []

    def call_backward(_: torch.Tensor) -> None:
        with torch.enable_grad():
            loss = (received * 5).sum()
        try:
            torch.autograd.backward(loss)
        except AutogradError as error:
            seen.append(error)

    with gw.autograd.context() as ctx:
        received = rpc.rpc_sync("b", torch.mul, args=(x, 3))
        doubled = received * 2
        doubled.register_hook(call_backward)
        ctx.backward(doubled.sum())
        assert torch.equal(ctx.gradients()[x], torch.full((3,), 6.0))
    assert "use gradwire.autograd.backward" in str(seen[0])


# -- gates -------------------------------------------------------------------------------------------------------------


def test_gates_wait_for_the_send_made_last_first() -> None:
    x = torch.ones(2, requires_grad=True)
    sends = [(number, make_send(number, [x * number])) for number in (1, 2, 3)]
    run = Run({number: (torch.ones(2),) for number in (1, 2, 3)})
    (of_x, _) = run_backward(run, [make_gates(sends)], [x])
    assert run.waited == [3, 2, 1]
    assert of_x is not None
    assert of_x.tolist() == [6.0, 6.0]


def test_gates_come_after_all_other_ready_work() -> None:
    """A recv that is behind the loss fires before anybody waits."""
    x = torch.ones(2, requires_grad=True)
    (received,) = make_recv(5, 8, [torch.ones(2)])
    gate = make_gates([(1, make_send(1, [x * 2]))])
    seen: list[Any] = []

    class Watching(Run):
        def wait_settled(self, message_id: int) -> None:
            seen.append(list(self.fired))
            super().wait_settled(message_id)

    run = Watching({1: (torch.ones(2),)})
    run_backward(run, [gate, (received * 2).sum()], [x])
    assert seen == [[8]]
    assert run.waited == [1]


def test_gradients_that_came_as_nothing_pass_a_gate() -> None:
    x = torch.ones(2, requires_grad=True)
    gate = make_gates([(1, make_send(1, [x * 2])), (2, make_send(2, [x * 5]))])
    (of_x, _) = run_backward(Run({1: (None,), 2: (torch.ones(2),)}), [gate], [x])
    assert of_x is not None
    assert of_x.tolist() == [5.0, 5.0]


# -- which run the nodes report to -----------------------------------------------------------------------------------


def test_runs_nest_and_belong_to_one_thread() -> None:
    """A node that waits may let its thread serve another pass meanwhile."""
    outer, inner = Run(), Run()
    (received,) = make_recv(5, 8, [torch.ones(2)])
    errors: list[BaseException] = []

    def run_elsewhere() -> None:
        try:
            call_engine([received.sum()], [])
        except AutogradError as error:
            errors.append(error)

    before = begin_run(outer)
    try:
        run_backward(inner, [received.sum()], [])
        thread = threading.Thread(target=run_elsewhere, name="has-no-run")
        thread.start()
        thread.join(10)
        call_engine([received.sum()], [])
    finally:
        current_run.set(before)
    assert set(inner.fired) == {8}
    assert set(outer.fired) == {8}
    assert len(errors) == 1
