"""`embedding_bag`: sums, means or maxima of bags of rows of a sharded table, for everybody's own bags.

Each block gets the ids in its rows, bag by bag, and how many there are in each bag that has any; it answers with one row for
each of these bags. The answers are added up, or the largest taken, and means are divided, by who asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from gradwire.shard.dispatch import implements
from gradwire.shard.engines import Question, Request
from gradwire.shard.ops import lookups
from gradwire.shard.tensor import ShardedTensor

Setting = tuple[str, bool, bool]
"""The mode; whether gradients are scaled by frequency; whether they are sparse."""


@dataclass(frozen=True)
class Bags:
    """Somebody's bags.

    Attributes:
        ids: Of all bags, one after the other.
        bags: The bag of each.
        number: How many bags there are.
        weights: Of the ids, if there are any.
    """

    ids: torch.Tensor
    bags: torch.Tensor
    number: int
    weights: torch.Tensor | None

    def without(self, row: int | None) -> Bags:
        """Without an id that does not count."""
        if row is None:
            return self
        kept = (self.ids != row).nonzero().view(-1)
        weights = None if self.weights is None else self.weights.index_select(0, kept)
        return Bags(self.ids.index_select(0, kept), self.bags.index_select(0, kept), self.number, weights)

    def counts(self) -> torch.Tensor:
        """How many ids are in each bag."""
        return torch.bincount(self.bags, minlength=self.number)


@implements(F.embedding_bag)
def _embedding_bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_embedding_bag(*args, **kwargs)


def _do_embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    table = lookups.check_table(weight, input, "embedding_bag")
    setting = (mode, scale_grad_by_freq, sparse)
    _check(setting, per_sample_weights)
    error: Exception | None
    try:
        _check_weights(table, input, per_sample_weights)
        bags = _read_bags(input, offsets, per_sample_weights, include_last_offset)
        error = lookups.find_problem(table, bags.ids, "embedding_bag")
    except (RuntimeError, ValueError) as failure:  # the bags of others may be right, and they must hear of it
        error = failure
    if error is not None:
        bags = _no_bags(input, per_sample_weights)
    if max_norm is not None:
        lookups.renormalize(table, bags.ids, max_norm, norm_type, error)
    return _look_up(table, bags.without(_padding_row(table, padding_idx)), setting, error)


def _check(setting: Setting, weights: torch.Tensor | None) -> None:
    mode, scale_grad_by_freq, sparse = setting
    if mode not in ("sum", "mean", "max"):
        raise ValueError("mode has to be one of sum, mean or max")
    if mode == "max" and scale_grad_by_freq:
        raise ValueError("max mode does not support scaling the gradient by the frequency")
    if mode == "max" and sparse:
        raise ValueError("max mode does not support sparse weights")
    if weights is not None and mode != "sum":
        raise NotImplementedError(
            f"embedding_bag: per_sample_weights is only supported for mode='sum' (got mode='{mode}')"
        )


def _padding_row(table: ShardedTensor, padding_idx: int | None) -> int | None:
    if padding_idx is None:
        return None
    if not -table.size(0) <= padding_idx < table.size(0):
        raise RuntimeError(
            f"padding_idx must be within the number of embeddings, {table.size(0)}, but is {padding_idx}"
        )
    return padding_idx % table.size(0)


# -- the bags ----------------------------------------------------------------------------------------------------------


def _read_bags(
    input: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None, include_last_offset: bool
) -> Bags:
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("if input is 2D, then offsets has to be None: each row is a bag")
        numbers = torch.arange(input.size(0), device=input.device)
        flat_weights = None if weights is None else weights.reshape(-1)
        return Bags(input.reshape(-1), numbers.repeat_interleave(input.size(1)), input.size(0), flat_weights)
    if input.dim() != 1:
        raise ValueError(f"input has to be 1D or 2D Tensor, but got Tensor of dimension {input.dim()}")
    if offsets is None or offsets.dim() != 1:
        raise ValueError(f"offsets has to be a 1D Tensor but got {offsets}")
    return _read_offsets(input, offsets, weights, include_last_offset)


def _check_weights(table: ShardedTensor, input: torch.Tensor, weights: torch.Tensor | None) -> None:
    if weights is None:
        return
    if weights.size() != input.size():
        raise ValueError(
            f"embedding_bag: If per_sample_weights ({weights.size()}) is not None, then it must have the same shape as "
            f"the input ({input.size()})"
        )
    if weights.dtype != table.dtype:
        raise RuntimeError(f"expected per_sample_weights of {table.dtype}, like the table, but found {weights.dtype}")


def _no_bags(input: torch.Tensor, weights: torch.Tensor | None) -> Bags:
    ids = input.reshape(-1)[:0]
    return Bags(ids, ids.to(torch.int64), 0, None if weights is None else weights.reshape(-1)[:0])


def _read_offsets(
    input: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, include_last_offset: bool
) -> Bags:
    starts = offsets.to(torch.int64)
    if include_last_offset and not starts.numel():
        raise RuntimeError("include_last_offset: number of offsets should be at least 1")
    if starts.numel() and int(starts[0]) != 0:
        raise RuntimeError(
            f"offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. However, "
            f"got {int(starts[0])}"
        )
    if starts.numel() and int(starts[-1]) > input.size(0):
        raise RuntimeError(
            f"offsets[-1] can not be greater than input's length {input.size(0)} but got offsets[-1] of {int(starts[-1])}"
        )
    if not include_last_offset:
        starts = torch.cat([starts, starts.new_tensor([input.size(0)])])
    sizes = starts.diff()
    if sizes.numel() and int(sizes.min()) < 0:
        raise RuntimeError("offsets must not decrease: each bag begins where the one before it ends")
    bags = torch.arange(sizes.numel(), device=input.device).repeat_interleave(sizes)
    used = bags.numel()  # what is behind the last offset, or before the first, is in no bag
    return Bags(input[:used], bags, sizes.numel(), None if weights is None else weights[:used])


# -- asking ------------------------------------------------------------------------------------------------------------


def _look_up(table: ShardedTensor, bags: Bags, setting: Setting, error: Exception | None) -> torch.Tensor:
    requests, rows = _requests(table, bags)
    boxes = table._layout.boxes
    question = Question(
        answer_bags,
        requests,
        [setting] * len(boxes),
        1,
        [box.sizes[1:] for box in boxes],
        table._like,
        error,
        asks_all=lookups.wants_gradient(table),
    )
    answers = table._engine.ask(question, table._layout, table._parts)
    size = (bags.number, table.size(1))
    if setting[0] == "max":
        return _largest(size, answers, rows, lookups.columns_of(table))
    total = lookups.assemble(size, answers, rows, lookups.columns_of(table), is_sum=True)
    if setting[0] == "mean":
        total = total / bags.counts().clamp(min=1).unsqueeze(1)
    return total


def _requests(table: ShardedTensor, bags: Bags) -> tuple[list[Request], list[torch.Tensor | None]]:
    """For each block: ids, how many in each bag that has any, weights; and which bags these are (None for all)."""
    found: dict[int, tuple[Request, torch.Tensor | None]] = {}  # blocks with the same rows share them
    requests, rows = [], []
    for wanted in lookups.by_rows(table, bags.ids):
        if id(wanted) not in found:
            found[id(wanted)] = _request(wanted, bags)
        request, present = found[id(wanted)]
        requests.append(request)
        rows.append(present)
    return requests, rows


def _request(wanted: lookups.Wanted, bags: Bags) -> tuple[Request, torch.Tensor | None]:
    counts = torch.bincount(wanted.of(bags.bags), minlength=bags.number)
    present: torch.Tensor | None = counts.nonzero().view(-1)
    assert present is not None
    if present.numel() == bags.number:
        present = None
    else:
        counts = counts.index_select(0, present)
    weights = () if bags.weights is None else (wanted.of(bags.weights),)
    return (wanted.ids, counts.to(torch.int32), *weights), present


def answer_bags(part: torch.Tensor, request: Request, lengths: Any, setting: Setting) -> torch.Tensor:
    """What a block has of each bag: a sum, or the largest; for all who ask in one lookup."""
    ids, counts, *weights = request
    mode, scale_grad_by_freq, sparse = setting
    offsets = counts.cumsum(0, dtype=counts.dtype) - counts
    if scale_grad_by_freq:
        part = _ScaledGradient.apply(part, torch.bincount(ids, minlength=part.size(0)))  # type: ignore[no-untyped-call]
    return F.embedding_bag(
        ids,
        part,
        offsets,
        mode="max" if mode == "max" else "sum",
        sparse=sparse,
        per_sample_weights=weights[0] if weights else None,
    )


class _ScaledGradient(torch.autograd.Function):
    """Divides the gradient of each row by how often it was looked up; what torch does for bags counts other rows, too."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.counts = counts
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        counts = ctx.counts.clamp(min=1).unsqueeze(1)
        if not gradient.is_sparse:
            return gradient / counts, None
        gradient = gradient.coalesce()
        values = gradient.values() / counts[gradient.indices()[0]]
        return torch.sparse_coo_tensor(gradient.indices(), values, gradient.size(), is_coalesced=True), None


def _largest(
    size: tuple[int, int],
    answers: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor | None],
    columns: Sequence[slice],
) -> torch.Tensor:
    """The largest of all answers, zero where there is none. Of equal ones that of the first block has the gradient."""
    lowest = torch.full(size, -torch.inf, dtype=answers[0].dtype, device=answers[0].device)
    winners = torch.full(size, -1, dtype=torch.int64, device=lowest.device)
    everywhere = torch.arange(size[0], device=lowest.device)
    for number, (answer, taken, of_block) in enumerate(zip(answers, rows, columns, strict=True)):
        at = everywhere if taken is None else taken
        known = lowest[at, of_block]
        is_larger = (answer.detach() > known) | (winners[at, of_block] < 0)
        lowest[at, of_block] = torch.where(is_larger, answer.detach(), known)
        winners[at, of_block] = torch.where(is_larger, number, winners[at, of_block])
    kept = [
        answer.where(winners[everywhere if taken is None else taken, of_block] == number, 0)
        for number, (answer, taken, of_block) in enumerate(zip(answers, rows, columns, strict=True))
    ]
    return lookups.assemble(size, kept, rows, columns, is_sum=True)
