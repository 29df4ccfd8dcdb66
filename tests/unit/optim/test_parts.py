"""Names and states of parts, and of the parameters that they are parts of."""

from __future__ import annotations

import torch

from gradwire.optim.parameters import PartOf, divide_states, fold_groups, join_states
from gradwire.shard.layout import Box

SIZE = (3, 2)
PARTS = {part.name: part for part in (PartOf("w", Box((0, 0), (1, 2)), SIZE), PartOf("w", Box((1, 0), (2, 2)), SIZE))}
WHOLE = torch.arange(6.0).view(SIZE)


def test_groups_have_one_name_for_each_parameter() -> None:
    groups = [{"param_names": ["w[0, 0]", "w[1, 0]", "b"], "params": [1, 2, 3], "lr": 0.1}]
    assert fold_groups(groups, PARTS) == [{"param_names": ["w", "b"], "params": ["w", "b"], "lr": 0.1}]


def test_states_are_divided_and_joined_again() -> None:
    whole = {"w": {"step": torch.tensor(3.0), "sum": WHOLE, "kind": "text"}, "b": {"sum": torch.ones(2)}}
    divided = divide_states(whole, PARTS)
    assert set(divided) == {"w[0, 0]", "w[1, 0]", "b"}
    assert divided["w[1, 0]"]["sum"].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert divided["w[0, 0]"]["step"] is not divided["w[1, 0]"]["step"]  # steps are counted in place
    joined = join_states(divided, PARTS)
    assert torch.equal(joined["w"]["sum"], WHOLE)
    assert joined["w"]["step"] == 3.0
    assert joined["w"]["kind"] == "text"
    assert joined["b"] is whole["b"]


def test_parts_without_state_count_as_zero_and_sparse_state_as_dense() -> None:
    (_, second) = PARTS
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (2, 2), check_invariants=True)
    joined = join_states({second: {"momentum_buffer": sparse}}, PARTS)
    assert joined["w"]["momentum_buffer"].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert divide_states({}, PARTS) == {}
