"""What contexts see of shared parameters, and how a step leaves the others alone."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from conftest import MakeAgents
from gradwire.autograd.context import DistAutogradContext
from gradwire.errors import AutogradError, ConfigurationError, RpcTimeout, UnknownContext
from gradwire.params import rwlock as guards
from gradwire.params import rwlock as reading
from gradwire.params import snapshots as sharing
from gradwire.params.rwlock import Group, Mode, ReadingCall
from gradwire.params.snapshots import saving

# -- What is saved of parameters and of everything else, without workers ------------------------------------------------


def make_weight(mode: Mode = "snapshot") -> nn.Parameter:
    weight = nn.Parameter(torch.tensor([0.5, -0.25, 2.0]))
    sharing.guard([weight], mode)
    return weight


def run(context: DistAutogradContext, function: Any, *args: Any) -> Any:
    """As a call that is served within a context."""
    with saving(context):
        return function(*args)


def step(weight: nn.Parameter, *context_ids: int) -> None:
    with sharing.stepping([weight], context_ids), torch.no_grad():
        weight.add_(1.0)


USES = {
    "itself": lambda w: (w * w).sum(),
    "a view": lambda w: (w.view(3, 1) @ w.view(1, 3)).sum(),
    "a slice": lambda w: (w[1:] * w[:2]).sum(),
    "detached": lambda w: (w * w.detach()).sum(),
    "twice": lambda w: torch.exp(w * w).sum(),
}


@pytest.mark.parametrize("name", USES)
def test_gradients_for_what_was_seen(name: str) -> None:
    weight, use = make_weight(), USES[name]
    (expected,) = torch.autograd.grad(use(weight), weight)
    first, second = DistAutogradContext(1), DistAutogradContext(2)
    result = run(first, use, weight)
    step(weight, 2)
    step(weight, 2)
    later = run(second, use, weight)
    step(weight, 7)
    assert torch.equal(torch.autograd.grad(result, weight)[0], expected)
    assert not torch.equal(torch.autograd.grad(later, weight)[0], expected)


def test_what_was_seen_is_kept_once() -> None:
    """However many steps others make while a context lives; what it uses afterwards is kept again."""
    weight, context = make_weight(), DistAutogradContext(1)
    results, expected = [], []
    for _ in range(2):
        expected += torch.autograd.grad(USES["itself"](weight), weight)
        results.append(run(context, USES["itself"], weight))
        before = weight.data_ptr()
        step(weight, 2)
        moved = weight.data_ptr()
        step(weight, 2)
        assert before != moved == weight.data_ptr()
    found = [torch.autograd.grad(result, weight)[0] for result in results]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", USES)
def test_gradients_of_gradients(name: str) -> None:
    weight, use = make_weight(), USES[name]

    def twice(result: torch.Tensor, between: Any) -> torch.Tensor:
        (slope,) = torch.autograd.grad(result, weight, create_graph=True)
        between()
        if not slope.requires_grad:
            return slope.detach()
        return torch.autograd.grad(slope.square().sum(), weight)[0]

    expected = twice(use(weight), lambda: None)
    context = DistAutogradContext(1)
    result = run(context, use, weight)
    with saving(context):  # a pass with create_graph saves like this
        found = twice(result, lambda: step(weight, 2))
    assert torch.equal(found, expected)


def test_a_step_of_the_same_context_is_an_error_afterwards() -> None:
    weight, context = make_weight(), DistAutogradContext(1)
    result = run(context, USES["itself"], weight)
    step(weight, 1)
    with pytest.raises(AutogradError, match=r"modified by an inplace operation: torch.float32 tensor of shape \[3\]"):
        result.backward()


def test_an_own_step_is_not_forgotten_when_another_follows() -> None:
    """The second moves the parameter elsewhere, but the first has changed what was seen."""
    weight, context, other = make_weight(), DistAutogradContext(1), DistAutogradContext(2)
    result = run(context, USES["itself"], weight)
    step(weight, 1)
    run(other, USES["itself"], weight)
    step(weight, 3)
    with pytest.raises(AutogradError, match="modified by an inplace operation"):
        result.backward()


def test_intermediate_results_are_checked() -> None:
    weight, context = make_weight(), DistAutogradContext(1)

    def careless(w: torch.Tensor) -> torch.Tensor:
        hidden = torch.exp(w)
        total = (hidden * hidden).sum()
        hidden.detach().zero_()
        return total

    result = run(context, careless, weight)
    with pytest.raises(AutogradError, match="modified by an inplace operation"):
        result.backward()


def test_hogwild_moves_nothing_and_checks_nothing() -> None:
    weight, context = make_weight("hogwild"), DistAutogradContext(1)
    where = weight.data_ptr()
    result = run(context, USES["itself"], weight)
    step(weight, 2)
    assert weight.data_ptr() == where
    (found,) = torch.autograd.grad(result, weight)
    assert torch.equal(found, 2 * weight.detach())  # those of the values that are there now


def test_parameters_in_one_buffer_give_an_error_rather_than_a_wrong_gradient() -> None:
    buffer = torch.tensor([1.0, 2.0, 3.0, 4.0])
    one, two = nn.Parameter(buffer[:2]), nn.Parameter(buffer[2:])
    sharing.guard([one, two], "snapshot")
    context = DistAutogradContext(1)
    direct = run(context, USES["itself"], two)
    detached = run(context, USES["detached"], two)
    step(two, 2)
    assert torch.equal(torch.autograd.grad(direct, two)[0], torch.tensor([6.0, 8.0]))
    with pytest.raises(AutogradError, match="modified by an inplace operation"):
        detached.backward()


def test_a_parameter_keeps_what_was_said_first() -> None:
    weight = make_weight("serialize")
    group = sharing.guard([weight], "serialize")
    assert sharing.mode_of(weight) == "serialize"
    sharing.guard([weight], "snapshot")
    assert sharing.mode_of(weight) == "serialize"
    assert sharing.guard([weight], "serialize") is group
    assert sharing.mode_of(nn.Parameter(torch.ones(1))) is None
    with pytest.raises(ConfigurationError, match="concurrency must be one of"):
        sharing.guard([weight], "always")  # type: ignore[arg-type]


def test_contexts_that_are_over_or_have_stepped_hold_up_nothing() -> None:
    weight = make_weight()
    where = weight.data_ptr()
    over, stepped = DistAutogradContext(1), DistAutogradContext(2)
    for context in (over, stepped):
        run(context, USES["itself"], weight)
    over.on_released("by a test")
    step(weight, 2)
    assert weight.data_ptr() == where
    step(weight, 3)
    assert weight.data_ptr() == where
    run(stepped, USES["itself"], weight)
    step(weight, 3)
    assert weight.data_ptr() != where


def test_nothing_is_kept_of_parameters_that_are_gone() -> None:
    gc.collect()
    before = len(guards.guarded_params)
    weights = [make_weight() for _ in range(10)]
    context = DistAutogradContext(1)
    for weight in weights:
        run(context, USES["itself"], weight)
    assert len(guards.guarded_params) == before + 10
    del weights, weight
    gc.collect()
    assert len(guards.guarded_params) == before
    sharing.guard([], "snapshot")
    assert len(guards._by_memory) <= before


def test_sparse_and_empty_parameters() -> None:
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    empty = nn.Parameter(torch.empty(0))
    sharing.guard([sparse, empty], "snapshot")
    context = DistAutogradContext(1)
    assert run(context, torch.square, empty).sum().item() == 0.0
    result = run(context, lambda: torch.sparse.mm(sparse, torch.ones(3, 1)).sum())
    result.backward()
    assert sparse.grad is not None
    step(empty, 2)


# -- Trainers that get into each other's way, in one process: calls that come late, and steps at the same moment --------


WAIT_S = 20.0


def use(group: Group, context: DistAutogradContext) -> None:
    """As a forward call of a context."""
    with ReadingCall(context), sharing.using(group):
        pass


@pytest.mark.parametrize("is_anothers_turn", [False, True])
def test_a_late_call_of_a_context_that_is_over_takes_no_turn(
    is_anothers_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever end it, and all others would wait for it in vain."""
    monkeypatch.setattr(reading, "_WAIT_S", 0.0)
    weight = nn.Parameter(torch.zeros(1))
    group = sharing.guard([weight], "serialize")
    over, other, last = (DistAutogradContext(number) for number in (1, 2, 3))
    use(group, over)
    with sharing.stepping([weight], [1]):
        pass
    if is_anothers_turn:
        use(group, other)
    over.on_released("by a test")
    with pytest.raises(UnknownContext, match="It was released by a test"):
        use(group, over)  # it was found before that
    other.on_released("by a test")
    assert (group.turns.holder, group.turns.num_in_line) == (0, 0)
    use(group, last)
    assert group.turns.holder == 3


def test_a_parameter_that_is_guarded_while_another_leaves_its_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that moves a parameter; the memory that it had is another's by then."""
    is_leaving, may_leave = threading.Event(), threading.Event()
    table_lock = guards.lock

    class Slow(dict[int, Any]):
        """Stands still before it forgets an address, if somebody else could change it meanwhile."""

        def __delitem__(self, address: int) -> None:
            is_leaving.set()
            if not table_lock._is_owned():  # type: ignore[attr-defined]
                assert may_leave.wait(WAIT_S)
            super().__delitem__(address)

    memory = bytearray(16)
    one, two = (nn.Parameter(torch.frombuffer(memory, dtype=torch.float32)) for _ in range(2))
    sharing.guard([one], "snapshot")
    monkeypatch.setattr(guards, "_by_memory", Slow(guards._by_memory))
    context = DistAutogradContext(1)
    found = guards.find(one)
    assert found is not None
    found.users = [weakref.ref(context)]

    def step() -> None:
        with sharing.stepping([one], [2]):
            pass

    stepper = threading.Thread(target=step)
    stepper.start()
    assert is_leaving.wait(WAIT_S)
    sharing.guard([two], "snapshot")
    may_leave.set()
    stepper.join(WAIT_S)
    assert [item.is_of(two) for item, _ in guards.find_by_memory(two.detach())] == [True]


def test_a_step_that_is_interrupted_before_it_waits_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls let steps go first that wait: one that was counted for ever would cost each of them a second."""
    weight = nn.Parameter(torch.zeros(1))
    group = sharing.guard([weight], "snapshot")
    call = ReadingCall(None)
    monkeypatch.setattr(reading, "_wait_begun", interrupt)
    with call:
        call.read(group)
        monkeypatch.setattr(reading._served, "call", None)  # the step is another thread's
        with pytest.raises(KeyboardInterrupt), sharing.stepping([weight], ()):
            pass
        assert [turns.num_pending for turns in (group.turns, guards.EVERYTHING.turns)] == [0, 0]
    assert group.turns.can_read(is_patient=True)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


busy = threading.Lock()


def use_busy() -> None:
    with sharing.Held(busy, "another operation is using this optimizer"):
        pass


def test_an_operation_that_waits_too_long_for_another_names_its_worker(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_WAIT_S", 0.0)
    a, _b = make_agents(2)
    words = r"use_busy on worker b timed out waiting: another operation is using this optimizer \(phase: run\)"
    with busy, pytest.raises(RpcTimeout, match=words):
        a.call("b", use_busy)
