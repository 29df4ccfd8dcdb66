"""Implementations of torch's functions for sharded tensors. Importing this registers all of them in `dispatch`."""

from __future__ import annotations

from gradwire.shard.ops import attributes, conversion, embedding, matmul, normalization, pointwise, reductions, views

__all__ = ["attributes", "conversion", "embedding", "matmul", "normalization", "pointwise", "reductions", "views"]
