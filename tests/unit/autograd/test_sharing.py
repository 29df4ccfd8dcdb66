"""Trainers that get into each other's way, in one process: calls that come late, and steps at the same moment."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.autograd.context import DistAutogradContext
from gradwire.errors import UnknownContext
from gradwire.params import rwlock as guards
from gradwire.params import rwlock as reading
from gradwire.params import snapshots as sharing
from gradwire.params.rwlock import Group, ReadingCall

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
