"""`embedding` and `embedding_bag`: rows of a sharded table, for every participant's own ids.

Each block of the table is asked for the ids in its rows, and answers with these rows or, for bags, with their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from gradwire.shard.backend import Backend, Question, Request
from gradwire.shard.dispatch import implements
from gradwire.shard.layout import Layout, stack_rows
from gradwire.shard.ops.pointwise import needs_gradient
from gradwire.shard.tensor import ShardedTensor

Setting = tuple[int | None, bool, bool]
"""The row without a gradient, counted from the block's first; whether gradients are scaled by frequency; are sparse."""


@implements(F.embedding)
def _embedding(
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    table = check_table(weight, input, "embedding")
    padding = _padding_row(table, padding_idx, AssertionError("Padding_idx must be within num_embeddings"))
    ids = input.reshape(-1).to(table._like.device)
    error = find_problem(table, ids, "embedding")
    if max_norm is not None:
        renormalize(table, ids, max_norm, norm_type, error)
    wanted = by_rows(table, ids if error is None else ids[:0])
    paddings = [_row_in_block(padding, box.offsets[0], box.sizes[0]) for box in table._layout.boxes]
    settings = [(row, scale_grad_by_freq, sparse) for row in paddings]
    answers = _ask(table, answer_rows, [(item.ids,) for item in wanted], settings, error)
    size = (ids.numel(), table.size(1))
    rows = [item.positions for item in wanted]
    return assemble(size, answers, rows, columns_of(table), is_sum=False).view(*input.size(), size[1])


def _padding_row(table: ShardedTensor, padding_idx: int | None, error: Exception) -> int | None:
    if padding_idx is None:
        return None
    if not -table.size(0) <= padding_idx < table.size(0):
        raise error
    return padding_idx % table.size(0)


def _row_in_block(row: int | None, first: int, number: int) -> int | None:
    return row - first if row is not None and first <= row < first + number else None


def _ask(
    table: ShardedTensor,
    function: Any,
    requests: Sequence[Request],
    settings: Sequence[Any],
    error: Exception | None,
    along: int = 0,
    width: int | None = None,
) -> list[torch.Tensor]:
    """Ask all blocks; answers are as wide as the blocks unless a width is given."""
    rests = [[box.sizes[1] if width is None else width] for box in table._layout.boxes]
    # Blocks without requested rows get a gradient of zero, so that optimizers step all blocks in the same way.
    asks_all = needs_gradient(table)
    question = Question(function, requests, settings, along, rests, table._like, error, asks_all)
    return table._backend.ask(question, table._layout, table._parts)


def answer_rows(part: torch.Tensor, request: Request, setting: Setting) -> torch.Tensor:
    """Return rows of a block; those of all participants in one lookup, so that frequencies count over all of them."""
    (ids,) = request
    padding, scale_grad_by_freq, sparse = setting
    if not part.numel() and not sparse:  # torch cannot differentiate that twice
        return part.new_zeros(ids.numel(), part.size(1)) + part.sum()  # it has its place in the graph
    return F.embedding(ids, part, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


BagSetting = tuple[str, bool, bool]
"""The mode; whether gradients are scaled by frequency; whether they are sparse."""


@dataclass(frozen=True)
class Bags:
    ids: torch.Tensor  # of all bags, one after the other
    bags: torch.Tensor  # the bag of each id
    number: int  # how many bags there are
    weights: torch.Tensor | None  # of the ids, if there are any

    def without(self, row: int | None) -> Bags:
        """Return the bags without the padding id."""
        if row is None:
            return self
        kept = (self.ids != row).nonzero().view(-1)
        weights = None if self.weights is None else self.weights.index_select(0, kept)
        return Bags(self.ids.index_select(0, kept), self.bags.index_select(0, kept), self.number, weights)

    def counts(self) -> torch.Tensor:
        return torch.bincount(self.bags, minlength=self.number)


@implements(F.embedding_bag)
def _embedding_bag(
    func: Any,
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
    table = check_table(weight, input, "embedding_bag")
    setting = (mode, scale_grad_by_freq, sparse)
    _check(setting, per_sample_weights)
    error: Exception | None
    try:
        if per_sample_weights is not None:
            _check_weights(table, input, per_sample_weights)
        bags = _read_bags(input, offsets, per_sample_weights, include_last_offset)
        error = find_problem(table, bags.ids, "embedding_bag")
    except (RuntimeError, ValueError) as failure:  # the bags of other ranks may be right, and they must learn of it
        error = failure
    if error is not None:
        no_ids = input.reshape(-1)[:0]
        no_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)[:0]
        bags = Bags(no_ids, no_ids.to(torch.int64), 0, no_weights)
    if max_norm is not None:
        renormalize(table, bags.ids, max_norm, norm_type, error)
    limit = f"padding_idx must be within the number of embeddings, {table.size(0)}, but is {padding_idx}"
    padding = _padding_row(table, padding_idx, RuntimeError(limit))
    return _look_up(table, bags.without(padding), setting, error)


def _check(setting: BagSetting, weights: torch.Tensor | None) -> None:
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
    starts = offsets.to(torch.int64)
    if include_last_offset and not starts.numel():
        raise RuntimeError("include_last_offset: number of offsets should be at least 1")
    if starts.numel() and int(starts[0]) != 0:
        raise RuntimeError(
            f"offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. "
            f"However, got {int(starts[0])}"
        )
    if starts.numel() and int(starts[-1]) > input.size(0):
        raise RuntimeError(
            f"offsets[-1] can not be greater than input's length {input.size(0)} but got offsets[-1] of "
            f"{int(starts[-1])}"
        )
    if not include_last_offset:
        starts = torch.cat([starts, starts.new_tensor([input.size(0)])])
    sizes = starts.diff()
    if sizes.numel() and int(sizes.min()) < 0:
        raise RuntimeError("offsets must not decrease: each bag begins where the one before it ends")
    bags = torch.arange(sizes.numel(), device=input.device).repeat_interleave(sizes)
    used = bags.numel()  # what is behind the last offset, or before the first, is in no bag
    return Bags(input[:used], bags, sizes.numel(), None if weights is None else weights[:used])


def _check_weights(table: ShardedTensor, input: torch.Tensor, weights: torch.Tensor) -> None:
    if weights.size() != input.size():
        raise ValueError(
            f"embedding_bag: If per_sample_weights ({weights.size()}) is not None, then it must have the same shape as "
            f"the input ({input.size()})"
        )
    if weights.dtype != table.dtype:
        raise RuntimeError(f"expected per_sample_weights of {table.dtype}, like the table, but found {weights.dtype}")


def _look_up(table: ShardedTensor, bags: Bags, setting: BagSetting, error: Exception | None) -> torch.Tensor:
    by_block = by_rows(table, bags.ids)
    made = {id(wanted): _request(wanted, bags) for wanted in by_block}  # blocks with the same rows share them
    requests, rows = zip(*(made[id(wanted)] for wanted in by_block), strict=True)
    answers = _ask(table, answer_bags, requests, [setting] * len(requests), error, along=1)
    size = (bags.number, table.size(1))
    if setting[0] == "max":
        return _largest(size, answers, rows, columns_of(table))
    total = assemble(size, answers, rows, columns_of(table), is_sum=True)
    if setting[0] == "mean":
        total = total / bags.counts().clamp(min=1).unsqueeze(1)
    return total


def _request(wanted: Wanted, bags: Bags) -> tuple[Request, torch.Tensor | None]:
    """Return ids, the number in each nonempty bag, and weights; and which bags these are (None for all)."""
    counts = torch.bincount(wanted.select(bags.bags), minlength=bags.number)
    present = counts.nonzero().view(-1)
    is_complete = present.numel() == bags.number
    counts = counts if is_complete else counts.index_select(0, present)
    weights = () if bags.weights is None else (wanted.select(bags.weights),)
    return (wanted.ids, counts.to(torch.int32), *weights), None if is_complete else present


def answer_bags(part: torch.Tensor, request: Request, setting: BagSetting) -> torch.Tensor:
    """Return a block's contribution to each bag, a sum or a maximum, for all participants in one lookup."""
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
    """Divides the gradient of each row by how often it was looked up; torch's scaling for bags counts other rows, too."""

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
    """Return the maximum of all answers, zero where there is none. Of equal ones, the first block gets the gradient."""
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
    return assemble(size, kept, rows, columns, is_sum=True)


@dataclass(frozen=True)
class Wanted:
    """A participant's ids that lie in some rows."""

    ids: torch.Tensor  # counted from the first of these rows
    positions: torch.Tensor | None  # where they are among all; None if they are all of them

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values that belong to these ids, from those of all."""
        return values if self.positions is None else values.index_select(0, self.positions)


def by_rows(table: ShardedTensor, ids: torch.Tensor) -> list[Wanted]:
    """Return for each block the ids in its rows; blocks with the same rows share them."""
    rows = [(box.offsets[0], box.sizes[0] if box.sizes[1] else 0) for box in table._layout.boxes]
    found = {}
    for first, number in set(rows):
        local, positions = ids - first if first else ids, None
        if number != table.size(0):
            positions = ((local >= 0) & (local < number)).nonzero().view(-1)
            local = local.index_select(0, positions)
        found[first, number] = Wanted(local.to(torch.int32), positions)
    return [found[item] for item in rows]


def find_problem(table: ShardedTensor, ids: torch.Tensor, name: str) -> Exception | None:
    """Return the error for ids that are not integers or not rows of the table; those of other ranks may be right."""
    if ids.dtype not in (torch.int64, torch.int32):
        return RuntimeError(
            f"Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
            f"{ids.dtype} instead (while checking arguments for {name})"
        )
    if not ids.numel():
        return None
    smallest, largest = (int(item) for item in torch.aminmax(ids))
    if smallest >= 0 and largest < table.size(0):
        return None
    bad = smallest if smallest < 0 else largest
    return IndexError(f"index out of range in self: {bad} is not a row of a table with {table.size(0)} rows")


def check_table(table: torch.Tensor, ids: torch.Tensor, name: str) -> ShardedTensor:
    if isinstance(ids, ShardedTensor) or not isinstance(table, ShardedTensor):
        raise TypeError(f"{name}: the weight must be sharded, and the input a plain tensor: each rank's own ids")
    if table.dim() != 2:
        raise RuntimeError(f"{name}: 'weight' must be 2-D, but has {table.dim()} dimensions")
    return table


def columns_of(table: ShardedTensor) -> list[slice]:
    return [slice(box.offsets[1], box.offsets[1] + box.sizes[1]) for box in table._layout.boxes]


def assemble(
    size: tuple[int, int],
    answers: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor | None],
    columns: Sequence[slice],
    is_sum: bool,
) -> torch.Tensor:
    """Combine the answers of all blocks to a matrix.

    Each row of an answer goes to the row that `rows` tells; None is for all rows, in order. With `is_sum` answers for the
    same element add up; else each element is answered once.
    """
    found: torch.Tensor = _Assemble.apply(size, rows, columns, is_sum, *answers)  # type: ignore[no-untyped-call]
    return found


class _Assemble(torch.autograd.Function):
    """Return for each answer the gradient of its place in the matrix."""

    @staticmethod
    def forward(ctx: Any, size: Any, rows: Any, columns: Any, is_sum: bool, *answers: torch.Tensor) -> torch.Tensor:
        ctx.where = rows, columns
        full = [number for number, answer in enumerate(answers) if answer.numel()]
        if is_sum and full and rows[full[0]] is None and answers[full[0]].size() == torch.Size(size):
            made = answers[full.pop(0)].clone()
        else:
            made = (torch.zeros if is_sum else torch.empty)(size, dtype=answers[0].dtype, device=answers[0].device)
        for number in full:
            target, taken, answer = made[:, columns[number]], rows[number], answers[number]
            if taken is None:
                target.add_(answer) if is_sum else target.copy_(answer)
            else:
                target.index_add_(0, taken, answer) if is_sum else target.index_copy_(0, taken, answer)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        found = [
            gradient[:, of_block] if taken is None else gradient[:, of_block].index_select(0, taken)
            for taken, of_block in zip(*ctx.where, strict=True)
        ]
        return None, None, None, None, *found


def renormalize(table: ShardedTensor, ids: torch.Tensor, max_norm: float, norm_type: float, error: Any) -> None:
    """Scale the rows that any participant looks up and whose norm is larger to that norm, in place, each once.

    A block that has whole rows needs no help. If rows are cut, each participant adds up the norms of what the blocks have
    of its rows, and then tells the blocks.
    """
    unique = torch.unique(ids) if error is None else ids[:0]
    wanted = by_rows(table, unique)
    requests, num_blocks = [(item.ids,) for item in wanted], len(wanted)
    table._backend.settle()  # no function reads what is being changed
    with torch.no_grad():
        if table._layout.is_whole_along(1, table.size(1)):
            _ask(table, scale_whole_rows, requests, [(max_norm, norm_type)] * num_blocks, error, width=0)
            return
        answers = _ask(table, sum_powers, requests, [norm_type] * num_blocks, error, width=1)
        norms = _join_norms(table, wanted, answers, unique.numel(), norm_type)
        scales = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        scaled = [(item.ids, item.select(scales)) for item in wanted]
        _ask(table, scale_rows, scaled, [None] * num_blocks, None, width=0)


def _join_norms(
    table: ShardedTensor, wanted: Sequence[Wanted], answers: Sequence[torch.Tensor], number: int, norm_type: float
) -> torch.Tensor:
    powers = torch.zeros(number, dtype=table.dtype, device=table._like.device)
    for item, answer in zip(wanted, answers, strict=True):
        rows = torch.arange(number, device=powers.device) if item.positions is None else item.positions
        if norm_type == float("inf"):
            powers[rows] = torch.maximum(powers[rows], answer.view(-1))
        else:
            powers.index_add_(0, rows, answer.view(-1))
    return powers if norm_type == float("inf") else powers.pow(1 / norm_type)


def scale_whole_rows(part: torch.Tensor, request: Request, setting: Sequence[float]) -> torch.Tensor:
    """Renormalize rows where they are; answer nothing."""
    (ids,) = request
    if ids.numel():
        max_norm, norm_type = setting
        torch.embedding_renorm_(part.detach(), ids.to(torch.int64), max_norm, norm_type)
    return part.new_empty(ids.numel(), 0)


def sum_powers(part: torch.Tensor, request: Request, norm_type: float) -> torch.Tensor:
    """Return a block's contribution to the norms of rows."""
    (ids,) = request
    rows = part.detach().index_select(0, ids).abs()
    if norm_type == float("inf"):
        return rows.amax(1, keepdim=True) if rows.size(1) else rows.new_zeros(ids.numel(), 1)
    return rows.pow(norm_type).sum(1, keepdim=True)


def scale_rows(part: torch.Tensor, request: Request, setting: Any) -> torch.Tensor:
    """Scale rows; all participants send the same scale for a row, as all add up in the same order."""
    ids, scales = request
    values = part.detach()
    rows, which = torch.unique(ids, return_inverse=True)
    once = torch.ones(rows.numel(), dtype=scales.dtype, device=scales.device).index_copy_(0, which, scales)
    values.index_copy_(0, rows.to(torch.int64), values.index_select(0, rows) * once.unsqueeze(1))
    return part.new_empty(ids.numel(), 0)


MAX_DIMS = 8
"""Most dimensions of rows, together with the one along which they are counted."""

_FAILED = -1


def join_rows(rows: torch.Tensor, backend: Backend, problem: Exception | None) -> tuple[torch.Tensor, Layout]:
    """Return the rows, and whose rows are where if those of all participants are put together.

    The rows get a gradient if another participant's have one: all take part in backward then.
    """
    sizes = [rows.dim(), *rows.size(), *(0 for _ in range(MAX_DIMS - rows.dim()))]
    wants_gradient = rows.requires_grad and torch.is_grad_enabled()
    told = [*sizes, int(wants_gradient)] if problem is None else [_FAILED] * (MAX_DIMS + 2)
    gathered = backend.gather_numbers(told)
    if problem is not None:
        raise problem
    for place, other in zip(backend.participants, gathered, strict=True):
        if other[0] == _FAILED:
            raise RuntimeError(
                f"the operation on a sharded tensor failed on rank {place}, which raised the original error; no rank "
                "returned a result"
            )
        if other[0] != sizes[0] or other[2 : other[0] + 1] != sizes[2 : sizes[0] + 1]:
            raise ValueError(
                f"rows must have the same size on every rank: {list(rows.size()[1:])} on {backend.own_place}, "
                f"{other[2 : other[0] + 1]} on {place}"
            )
    if not wants_gradient and any(other[-1] for other in gathered):
        rows = rows.detach().requires_grad_(torch.is_grad_enabled())
    return rows, stack_rows([other[1] for other in gathered], rows.size()[1:], backend.participants)
