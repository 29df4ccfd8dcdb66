"""What is done to gradients on their way into a step."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import ConfigurationError, DecodeError, OptimizerError
from gradwire.optim.grad_transforms import CLAMP, SCALE, EditLog, edited
from gradwire.params.grads import are_finite, clip_factor, norm_of, total_norm


def test_edits_are_made_in_order_and_out_of_place() -> None:
    leaf, gradient = torch.zeros(3, requires_grad=True), torch.tensor([1.0, -4.0, 10.0])
    found = edited({leaf: gradient}, [(SCALE, 0.5), (CLAMP, 2.0), (SCALE, 2.0)])
    assert found[leaf].tolist() == [1.0, -4.0, 4.0]
    assert gradient.tolist() == [1.0, -4.0, 10.0]
    with pytest.raises(DecodeError, match="'erase'"):
        edited({leaf: gradient}, [("erase", 1.0)])


def test_edits_are_kept_for_contexts_that_are_used_together() -> None:
    over: set[int] = set()
    log = EditLog(over.__contains__)
    log.add((1, 2), (SCALE, 0.5))
    log.add((1, 2), (CLAMP, 1.0))
    assert log.of((1, 2)) == ((SCALE, 0.5), (CLAMP, 1.0))
    assert log.of((3,)) == ()
    for others in ((1,), (2, 1), (1, 2, 3)):
        with pytest.raises(ConfigurationError, match="used together"):
            log.of(others)
    over.add(2)
    assert log.of((1,)) == ()


def test_edits_end_with_the_step_they_were_for() -> None:
    log = EditLog(lambda _: False)
    log.add((1, 2), (SCALE, 0.5))
    log.add((3,), (CLAMP, 1.0))
    log.drop((1, 2))
    log.drop((4,))
    assert log.of((1,)) == log.of((1, 2)) == ()
    assert log.of((3,)) == ((CLAMP, 1.0),)


def test_other_threads_edit_and_forget_meanwhile() -> None:
    def is_over(context_id: int) -> bool:
        log._edits[(8,)] = ((SCALE, 0.5),)
        log._edits.pop((1,), None)
        return context_id == 1

    log = EditLog(is_over)
    log._edits[(1,)] = ((SCALE, 0.25),)
    assert log.of((7,)) == ()
    assert log.of((8,)) == ((SCALE, 0.5),)


def test_entries_of_one_place_are_clamped_together() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    gradient = torch.sparse_coo_tensor([[0, 0, 1]], [3.0, -2.5, -4.0], (2,), check_invariants=True)
    assert edited({leaf: gradient}, [(CLAMP, 1.0)])[leaf].to_dense().tolist() == [0.5, -1.0]


def test_norms() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], [3.0, 1.0], (2,), check_invariants=True)
    assert norm_of(sparse, 2.0) == 4.0  # entries of one place are one number
    assert norm_of(torch.empty(0, 3), float("inf")) == 0.0  # a shard without elements
    assert total_norm([torch.tensor(3.0), torch.tensor(4.0)], 2.0, True) == 5.0
    assert total_norm([], 2.0, True) == 0.0
    assert total_norm([torch.tensor(3.0), torch.tensor(4.0, dtype=torch.float64)], 2.0, True).dtype is torch.float64
    with pytest.raises(OptimizerError, match="non-finite"):
        total_norm([torch.tensor(float("inf"))], 2.0, True)
    assert clip_factor(torch.tensor(4.0), 1.0) == pytest.approx(0.25)
    assert clip_factor(torch.tensor(0.5), 1.0) == 1.0


def test_finite() -> None:
    good = torch.ones(3)
    sparse = torch.sparse_coo_tensor([[0]], [float("nan")], (2,), check_invariants=True)
    assert are_finite([good, good])
    assert are_finite([])
    assert not are_finite([good, torch.tensor([1.0, float("inf")])])
    assert not are_finite([sparse])
