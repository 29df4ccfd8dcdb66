"""Rows of a sharded table: which ids go to which block, and where the answers go.

Everybody looks up ids of their own. Each block gets those that lie in its rows, counted from the first of them, and answers
with its columns:

    ids  3 0 5 3        block 0: rows 0-3, columns 0-1    gets 3 0 3
                        block 1: rows 0-3, column  2      gets 3 0 3
                        block 2: rows 4-5, columns 0-2    gets 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.shard.engines import Question, Request
from gradwire.shard.tensor import ShardedTensor

Rows = tuple[int, int]
"""The first row of a block, and how many it has."""


@dataclass(frozen=True)
class Wanted:
    """Those of somebody's ids that lie in some rows.

    Attributes:
        ids: Counted from the first of these rows.
        positions: Where they are among all; None if they are all of them.
    """

    ids: torch.Tensor
    positions: torch.Tensor | None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The values that belong to these ids, from those of all."""
        return values if self.positions is None else values.index_select(0, self.positions)


def by_rows(table: ShardedTensor, ids: torch.Tensor) -> list[Wanted]:
    """For each block, the ids in its rows; blocks with the same rows share them."""
    found: dict[Rows, Wanted] = {}
    for rows in _rows_of_blocks(table):
        if rows not in found:
            found[rows] = _find(ids, rows, table.size(0))
    return [found[rows] for rows in _rows_of_blocks(table)]


def _rows_of_blocks(table: ShardedTensor) -> list[Rows]:
    """Blocks without columns get no ids."""
    return [(box.offsets[0], box.sizes[0] if box.sizes[1] else 0) for box in table._layout.boxes]


def _find(ids: torch.Tensor, rows: Rows, num_rows: int) -> Wanted:
    first, number = rows
    if number == num_rows:
        return Wanted(ids.to(torch.int32), None)
    local = ids - first
    positions = ((local >= 0) & (local < number)).nonzero().view(-1)
    return Wanted(local.index_select(0, positions).to(torch.int32), positions)


def find_problem(table: ShardedTensor, ids: torch.Tensor, name: str) -> Exception | None:
    """The error for ids that are no integers, or for one that is no row of the table. Others' ids may be right."""
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
    return IndexError(f"index out of range in self: {bad} is no row of a table that has {table.size(0)}")


def check_table(table: torch.Tensor, ids: torch.Tensor, name: str) -> ShardedTensor:
    """The table, if it is one, and the ids are plain.

    Raises:
        TypeError: The ids are sharded, or the table is not.
        RuntimeError: The table has not two dimensions.
    """
    if isinstance(ids, ShardedTensor) or not isinstance(table, ShardedTensor):
        raise TypeError(f"{name}: the weight is to be sharded, the input is to be a plain tensor: everybody's own ids")
    if table.dim() != 2:
        raise RuntimeError(f"{name}: 'weight' must be 2-D, but has {table.dim()} dimensions")
    return table


def row_in_block(row: int | None, rows: Rows) -> int | None:
    """A row, counted from the first one of a block; None if it is not in there."""
    return row - rows[0] if row is not None and rows[0] <= row < rows[0] + rows[1] else None


def wants_gradient(table: ShardedTensor) -> bool:
    """Whether blocks of which nobody wants anything get a gradient, too, which is zero: all are stepped alike then."""
    return torch.is_grad_enabled() and table.requires_grad


def columns_of(table: ShardedTensor) -> list[slice]:
    """Those of each block."""
    return [slice(box.offsets[1], box.offsets[1] + box.sizes[1]) for box in table._layout.boxes]


# -- what comes back ---------------------------------------------------------------------------------------------------


def assemble(
    size: tuple[int, int],
    answers: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor | None],
    columns: Sequence[slice],
    is_sum: bool,
) -> torch.Tensor:
    """A matrix of answers.

    Args:
        size: Of the matrix.
        answers: Those of all blocks.
        rows: Where each row of an answer goes; None if it is for all rows, in order.
        columns: Where its columns go.
        is_sum: Whether answers for the same element add up; else each element is answered once.
    """
    found: torch.Tensor = _Assemble.apply(size, rows, columns, is_sum, *answers)  # type: ignore[no-untyped-call]
    return found


class _Assemble(torch.autograd.Function):
    """Each answer gets the gradient of where it went."""

    @staticmethod
    def forward(ctx: Any, size: Any, rows: Any, columns: Any, is_sum: bool, *answers: torch.Tensor) -> torch.Tensor:
        ctx.where = rows, columns
        full = [number for number, answer in enumerate(answers) if answer.numel()]
        if is_sum and full and rows[full[0]] is None and answers[full[0]].size() == torch.Size(size):
            made = answers[full.pop(0)].clone()
        else:
            made = (torch.zeros if is_sum else torch.empty)(size, dtype=answers[0].dtype, device=answers[0].device)
        for number in full:
            _put(made[:, columns[number]], rows[number], answers[number], is_sum)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        found = [
            gradient[:, of_block] if taken is None else gradient[:, of_block].index_select(0, taken)
            for taken, of_block in zip(*ctx.where, strict=True)
        ]
        return None, None, None, None, *found


def _put(target: torch.Tensor, rows: torch.Tensor | None, answer: torch.Tensor, is_sum: bool) -> None:
    if rows is None:
        target.add_(answer) if is_sum else target.copy_(answer)
    elif is_sum:
        target.index_add_(0, rows, answer)
    else:
        target.index_copy_(0, rows, answer)


# -- max_norm ----------------------------------------------------------------------------------------------------------


def renormalize(table: ShardedTensor, ids: torch.Tensor, max_norm: float, norm_type: float, error: Any) -> None:
    """Scales the rows that anybody looks up and whose norm is larger to that norm, in place, each once.

    A block that has whole rows sees to itself. If rows are cut, everybody adds up the norms of what the blocks have of
    their rows, and then tells the blocks.
    """
    unique = torch.unique(ids) if error is None else ids[:0]
    wanted = by_rows(table, unique)
    table._engine.settle()  # nobody reads what is being changed
    with torch.no_grad():
        if table._layout.is_whole_along(1, table.size(1)):
            _ask(table, [(item.ids,) for item in wanted], scale_whole_rows, [max_norm, norm_type], 0, error)
            return
        answers = _ask(table, [(item.ids,) for item in wanted], sum_powers, [norm_type], 1, error)
        norms = _join_norms(table, wanted, answers, unique.numel(), norm_type)
        scales = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        _ask(table, [(item.ids, item.of(scales)) for item in wanted], scale_rows, [], 0, None)


def _ask(
    table: ShardedTensor, requests: Sequence[Request], function: Any, setting: Any, width: int, error: Any
) -> list[torch.Tensor]:
    num_blocks = len(table._layout.boxes)
    question = Question(function, requests, [setting] * num_blocks, 0, [[width]] * num_blocks, table._like, error)
    return table._engine.ask(question, table._layout, table._parts)


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


def scale_whole_rows(part: torch.Tensor, request: Request, lengths: Any, setting: Sequence[float]) -> torch.Tensor:
    """Renormalizes rows where they are; answers nothing."""
    (ids,) = request
    if ids.numel():
        max_norm, norm_type = setting
        torch.embedding_renorm_(part.detach(), ids.to(torch.int64), max_norm, norm_type)
    return part.new_empty(ids.numel(), 0)


def sum_powers(part: torch.Tensor, request: Request, lengths: Any, setting: Sequence[float]) -> torch.Tensor:
    """What a block contributes to the norms of rows."""
    (ids,) = request
    rows = part.detach().index_select(0, ids).abs()
    (norm_type,) = setting
    if norm_type == float("inf"):
        return rows.amax(1, keepdim=True) if rows.size(1) else rows.new_zeros(ids.numel(), 1)
    return rows.pow(norm_type).sum(1, keepdim=True)


def scale_rows(part: torch.Tensor, request: Request, lengths: Any, setting: Any) -> torch.Tensor:
    """Scales rows; who asks for the same row says the same, as everybody adds up in the same order."""
    ids, scales = request
    values = part.detach()
    rows, which = torch.unique(ids, return_inverse=True)
    once = torch.ones(rows.numel(), dtype=scales.dtype, device=scales.device).index_copy_(0, which, scales)
    values.index_copy_(0, rows.to(torch.int64), values.index_select(0, rows) * once.unsqueeze(1))
    return part.new_empty(ids.numel(), 0)
