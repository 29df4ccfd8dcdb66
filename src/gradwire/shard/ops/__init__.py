"""What torch's functions do with sharded tensors. Importing it registers all of them in `dispatch`."""

from __future__ import annotations

from gradwire.shard import states, travel
from gradwire.shard.ops import (
    basics,
    copying,
    elementwise,
    embedding,
    embedding_bag,
    initialization,
    linear,
    losses,
    normalization,
    reductions,
    views,
)

__all__ = [
    "basics",
    "copying",
    "elementwise",
    "embedding",
    "embedding_bag",
    "initialization",
    "linear",
    "losses",
    "normalization",
    "reductions",
    "states",
    "travel",
    "views",
]
