"""`embedding`: rows of a sharded table, for everybody's own ids."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from gradwire.shard.dispatch import implements
from gradwire.shard.engines import Question, Request
from gradwire.shard.ops import lookups
from gradwire.shard.tensor import ShardedTensor

Setting = tuple[int | None, bool, bool]
"""The row without a gradient, counted from the block's first; whether gradients are scaled by frequency; are sparse."""


@implements(F.embedding)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_embedding(*args, **kwargs)


def _do_embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    table = lookups.check_table(weight, input, "embedding")
    padding = _padding_row(table, padding_idx)
    ids = input.reshape(-1)
    error = lookups.find_problem(table, ids, "embedding")
    if max_norm is not None:
        lookups.renormalize(table, ids, max_norm, norm_type, error)
    wanted = lookups.by_rows(table, ids if error is None else ids[:0])
    boxes = table._layout.boxes
    settings = [
        (lookups.row_in_block(padding, (box.offsets[0], box.sizes[0])), scale_grad_by_freq, sparse) for box in boxes
    ]
    question = Question(
        answer_rows,
        [(item.ids,) for item in wanted],
        settings,
        0,
        [box.sizes[1:] for box in boxes],
        table._like,
        error,
        asks_all=lookups.wants_gradient(table),
    )
    answers = table._engine.ask(question, table._layout, table._parts)
    size = (ids.numel(), table.size(1))
    rows = [item.positions for item in wanted]
    return lookups.assemble(size, answers, rows, lookups.columns_of(table), is_sum=False).view(*input.size(), size[1])


def _padding_row(table: ShardedTensor, padding_idx: int | None) -> int | None:
    if padding_idx is None:
        return None
    if not -table.size(0) <= padding_idx < table.size(0):
        raise AssertionError("Padding_idx must be within num_embeddings")
    return padding_idx % table.size(0)


def answer_rows(part: torch.Tensor, request: Request, lengths: Any, setting: Setting) -> torch.Tensor:
    """Rows of a block; those of all who ask in one lookup, so that frequencies count over all of them."""
    (ids,) = request
    padding, scale_grad_by_freq, sparse = setting
    if not part.numel() and not sparse:  # torch cannot differentiate that twice
        return part.new_zeros(ids.numel(), part.size(1)) + part.sum()  # it has its place in the graph
    return F.embedding(ids, part, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
