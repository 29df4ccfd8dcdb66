"""A step that is asked for twice is done once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import OptimizerError
from gradwire.optim.local import StepMemory


def test_what_was_done_is_remembered() -> None:
    memory = StepMemory()
    assert memory.find(0) is None
    memory.add(0, 3)
    memory.add(1, 0)
    assert (memory.find(0), memory.find(1), memory.find(2)) == (3, 0, None)


def test_what_is_too_old_is_refused() -> None:
    memory = StepMemory(size=2)
    for step in range(3):
        memory.add(step, step)
    assert memory.find(2) == 2
    with pytest.raises(OptimizerError, match="step 0 is too old"):
        memory.find(0)


@given(st.lists(st.integers(0, 30), max_size=200))
def test_no_step_is_done_twice(asked: list[int]) -> None:
    """Requests that are repeated and out of order; ids rise, so a new one is never below what was forgotten."""
    memory, done = StepMemory(size=4), []
    for step in asked:
        try:
            if memory.find(step) is None:
                done.append(step)
                memory.add(step, 1)
        except OptimizerError:
            pass
    assert len(done) == len(set(done))
    assert len(memory._done) <= 4
