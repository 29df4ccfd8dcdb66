"""What torch's functions do with sharded tensors. Importing it registers all of them in `dispatch`."""

from __future__ import annotations

from gradwire.shard import states, travel
from gradwire.shard.ops import basics, elementwise, linear

__all__ = ["basics", "elementwise", "linear", "states", "travel"]
