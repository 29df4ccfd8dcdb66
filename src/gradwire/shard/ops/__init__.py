"""What torch's functions do with sharded tensors. Importing it registers all of them in `dispatch`."""

from __future__ import annotations

from gradwire.shard import serialization as travel
from gradwire.shard import state_dict as states
from gradwire.shard.ops import attributes as basics
from gradwire.shard.ops import conversion as copying
from gradwire.shard.ops import conversion as initialization
from gradwire.shard.ops import embedding, normalization, reductions, views
from gradwire.shard.ops import embedding as embedding_bag
from gradwire.shard.ops import matmul as linear
from gradwire.shard.ops import pointwise as elementwise
from gradwire.shard.ops import reductions as losses

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
