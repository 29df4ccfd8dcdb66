"""Optimizers for parameters that live on other workers.

opt = optim.DistributedOptimizer(torch.optim.AdamW, [encoder, head], lr=1e-3)
with autograd.context() as ctx:
    ctx.backward(loss_of(head(encoder(x)), y))
    opt.step(ctx)
"""

from __future__ import annotations

from gradwire.optim.distributed import DistributedOptimizer
from gradwire.optim.local import LocalOptimizer
from gradwire.optim.scaler import GradScaler
from gradwire.params.snapshots import stepping

__all__ = ["DistributedOptimizer", "GradScaler", "LocalOptimizer", "stepping"]
