"""Trainers that get into each other's way, in one process: calls that come late, and steps at the same moment."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.autograd import reading, sharing
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.guards import Group
from gradwire.autograd.reading import Call
from gradwire.errors import UnknownContext


def use(group: Group, context: DistAutogradContext) -> None:
    """As a forward call of a context."""
    with Call(context), sharing.using(group):
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
