"""Everybody's own rows, where they meet a sharded tensor: what all must know of them before anything moves.

Rows of one rank may be wrong while those of the others are right, and may need a gradient while others do not. Nobody may
go on alone, forward or backward. So everybody says, in one exchange, how many rows there are, whether they need a gradient,
and whether something is wrong.
"""

from __future__ import annotations

import torch

from gradwire.shard.engines import Engine
from gradwire.shard.layouts import Layout, stack_rows

MAX_DIMS = 8
"""Of rows, together with the dimension along which they are counted."""

_FAILED = -1


def join_rows(rows: torch.Tensor, engine: Engine, problem: Exception | None) -> tuple[torch.Tensor, Layout]:
    """The rows, and whose rows are where if all are put together.

    The rows get a gradient if those of somebody else have one: all take part in backward then.

    Args:
        rows: One's own.
        engine: Knows who everybody is.
        problem: Why this process cannot go on, if it cannot.

    Raises:
        Exception: The problem.
        RuntimeError: Somebody else has one.
        ValueError: Rows have different sizes.
    """
    sizes = [rows.dim(), *rows.size(), *(0 for _ in range(MAX_DIMS - rows.dim()))]
    wants_gradient = rows.requires_grad and torch.is_grad_enabled()
    told = [*sizes, int(wants_gradient)] if problem is None else [_FAILED] * (MAX_DIMS + 2)
    everybody = engine.gather_numbers(told)
    if problem is not None:
        raise problem
    for place, other in zip(engine.askers, everybody, strict=True):
        if other[0] == _FAILED:
            raise RuntimeError(f"rank {place} could not go on, so no rank can; it has raised an error that says why")
        if other[0] != sizes[0] or other[2 : other[0] + 1] != sizes[2 : sizes[0] + 1]:
            raise ValueError(
                f"rows must have the same size on every rank: {list(rows.size()[1:])} on {engine.here}, "
                f"{other[2 : other[0] + 1]} on {place}"
            )
    if not wants_gradient and any(other[-1] for other in everybody):
        rows = rows.detach().requires_grad_(torch.is_grad_enabled())
    return rows, stack_rows([other[1] for other in everybody], rows.size()[1:], engine.askers)
