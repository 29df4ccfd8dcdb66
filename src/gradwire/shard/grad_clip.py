"""Clipping of gradients, those of shards included, on the ranks of a process group.

    rank 0: shard 0 of w, a copy of b        norm of all gradients = norm of (all shards of w, b once)
    rank 1: shard 1 of w, a copy of b

Over RPC workers the gradients are in contexts: see `gradwire.optim.DistributedOptimizer.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from gradwire.errors import ConfigurationError
from gradwire.params.grads import clamped, norm_of, total_norm
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.rank_loss import collective
from gradwire.shard.tensor import ShardedTensor

Parameters = torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients in place so that their total norm is at most `max_norm`.

    Every rank must call it with the same parameters. A parameter that is not sharded counts once, and its gradient must
    be the same on all ranks.

    Args:
        parameters: Parameters, sharded or not.
        max_norm: Upper limit of the norm.
        norm_type: 2 for the Euclidean norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: Raise if the norm is infinite or NaN; nothing is scaled then.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        ConfigurationError: A parameter is sharded over RPC workers.
        OptimizerError: The norm is not finite, and `error_if_nonfinite` is set.
    """
    found, norm_type = _as_list(parameters), float(norm_type)
    total = total_norm(_norms(found, norm_type), norm_type, error_if_nonfinite)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in _parts(found):
        if part.grad is not None:
            part.grad.mul_(factor.to(part.grad.device, part.grad.dtype))
    return total


def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Clamp all gradients of this rank to ``[-clip_value, clip_value]``.

    Args:
        parameters: Parameters, sharded or not.
        clip_value: Largest magnitude of an element.

    Raises:
        ConfigurationError: A parameter is sharded over RPC workers.
    """
    for part in _parts(_as_list(parameters)):
        if part.grad is not None:
            part.grad = clamped(part.grad, float(clip_value))


def _as_list(parameters: Parameters) -> list[torch.Tensor]:
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for item in found:
        if isinstance(item, ShardedTensor) and not isinstance(item._backend, GroupBackend):
            raise ConfigurationError(
                "gradients of a parameter that is sharded over RPC workers are kept in contexts; use clip_grad_norm_ "
                "and clip_grad_value_ of gradwire.optim.DistributedOptimizer"
            )
    return found


def _parts(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    parts = [part for item in parameters for part in (item._parts if isinstance(item, ShardedTensor) else [item])]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _norms(parameters: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each parameter's gradient; the same numbers on every rank."""
    backends = dict.fromkeys(item._backend for item in parameters if isinstance(item, ShardedTensor))
    plain = [item for item in parameters if not isinstance(item, ShardedTensor)]
    norms: list[torch.Tensor] = []
    for backend in backends:
        assert isinstance(backend, GroupBackend)  # checked above
        sharded = [item for item in parameters if isinstance(item, ShardedTensor) and item._backend == backend]
        norms += _reduced(backend, sharded, plain, norm_type)
        plain = []  # they go along with the first: small differences between ranks must not make factors differ
    return norms + [norm_of(item.grad, norm_type) for item in plain if item.grad is not None]


def _reduced(
    backend: GroupBackend, sharded: Sequence[ShardedTensor], plain: Sequence[torch.Tensor], norm_type: float
) -> list[torch.Tensor]:
    """Return norms of sharded parameters over all ranks, and of plain ones as rank 0 has them, in one message."""
    device = sharded[0].device
    powers = [_power_of(_parts([item]), norm_type, device) for item in sharded]
    powers += [_power_of([item] if backend.own_place == 0 else [], norm_type, device) for item in plain]
    total = torch.stack(powers)
    with collective(backend.group, "adding up the norms of all ranks"):
        dist.all_reduce(total, _REDUCTIONS.get(norm_type, dist.ReduceOp.SUM), group=backend.group)
    if norm_type and not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    dtypes = [item.dtype.to_real() if item.is_complex() else item.dtype for item in [*sharded, *plain]]
    return [norm.to(dtype) for norm, dtype in zip(total, dtypes, strict=True)]


_REDUCTIONS = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}


def _power_of(parts: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return what this rank's parts of one parameter add to its norm, before the root, in double precision."""
    gradients = [part.grad for part in parts if part.grad is not None]
    nothing = torch.full((1,), math.inf if norm_type < 0 else 0.0, dtype=torch.float64, device=device)
    norms = torch.cat([nothing, *(norm_of(item, norm_type).to(nothing).reshape(1) for item in gradients)])
    if math.isinf(norm_type):
        return norms.max() if norm_type > 0 else norms.min()
    return (norms**norm_type if norm_type else norms).sum()
