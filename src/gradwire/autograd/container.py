"""All contexts of one worker.

Ids have 64 bits: the rank of the worker that made them, and a counter of 48 bits. The counter begins at a number that rises
with the worker's incarnation, so a restarted worker never gives out an id that its predecessor did.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

from gradwire.autograd.context import DistAutogradContext
from gradwire.errors import AutogradError, UnknownContext
from gradwire.rpc._ids import COUNTER_BITS, MAX_COUNTER, creator_of, first_counter

MAX_WORKER = (1 << 16) - 1
_NUM_SHARDS = 16
_MEMORY = 16_384  # released contexts that are remembered, so that a late message does not revive one


class IdSource:
    """Gives out ids of one kind.

    Args:
        worker: This worker's rank.
        first: The counter's first value.

    Raises:
        AutogradError: The rank does not fit into 16 bits.
    """

    def __init__(self, worker: int, first: int = 0) -> None:
        if not 0 <= worker <= MAX_WORKER:
            raise AutogradError(f"the rank of a worker must be between 0 and {MAX_WORKER}, not {worker}")
        self._base = worker << COUNTER_BITS
        self._next = max(1, first)
        self._lock = threading.Lock()  # guards _next

    def next(self) -> int:
        """An id never given out before.

        Raises:
            AutogradError: There are none left.
        """
        with self._lock:
            counter, self._next = self._next, self._next + 1
        if counter > MAX_COUNTER:
            raise AutogradError("We have run out of autograd context and message ids: all 48 bits are used up")
        return self._base | counter


class _Shard:
    """Some of the contexts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards the two below
        self.contexts: dict[int, DistAutogradContext] = {}
        self.released: collections.OrderedDict[int, str] = collections.OrderedDict()


class DistAutogradContainer:
    """The contexts of one worker, by id.

    Args:
        worker: Its rank.
        incarnation: Of the worker.
    """

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        first = first_counter(incarnation)
        self._context_ids = IdSource(worker, first)
        self._message_ids = IdSource(worker, first)
        self._shards = [_Shard() for _ in range(_NUM_SHARDS)]
        self.new_message_id = self._message_ids.next

    def __repr__(self) -> str:
        return f"<DistAutogradContainer of worker {self.worker}, {len(self)} contexts>"

    def __len__(self) -> int:
        return sum(len(shard.contexts) for shard in self._shards)

    def __iter__(self) -> Iterator[DistAutogradContext]:
        for shard in self._shards:
            with shard.lock:
                found = list(shard.contexts.values())
            yield from found

    @property
    def max_id(self) -> int:
        """The highest id that this worker can give out."""
        return (self.worker << COUNTER_BITS) | MAX_COUNTER

    def _shard(self, context_id: int) -> _Shard:
        return self._shards[context_id % _NUM_SHARDS]

    def new_context(self) -> DistAutogradContext:
        """Makes a context."""
        context = DistAutogradContext(self._context_ids.next())
        shard = self._shard(context.context_id)
        with shard.lock:
            shard.contexts[context.context_id] = context
        return context

    def find(self, context_id: int) -> DistAutogradContext | None:
        """The context of that id, if it is here."""
        return self._shard(context_id).contexts.get(context_id)

    def retrieve(self, context_id: int) -> DistAutogradContext:
        """The context of that id.

        Raises:
            UnknownContext: It was released, or was never here.
        """
        context = self.find(context_id)
        if context is None:
            where = self.where_released(context_id)
            raise UnknownContext(
                f"Could not find autograd context with id: {context_id}. "
                + (
                    f"It was released {where}"
                    if where
                    else f"Worker {self.worker} has never had to do with it; pass the id that autograd.context() gave"
                )
            )
        return context

    def get_or_create(self, context_id: int) -> DistAutogradContext | None:
        """The context of that id, made here if another worker made it; None if it was released."""
        shard = self._shard(context_id)
        found = shard.contexts.get(context_id)
        if found is not None:
            return found
        with shard.lock:
            if context_id in shard.released or creator_of(context_id) == self.worker:
                return shard.contexts.get(context_id)
            return shard.contexts.setdefault(context_id, DistAutogradContext(context_id))

    def release(self, context_id: int, where: str) -> DistAutogradContext | None:
        """Forgets a context, and remembers that it must not come back; None if it was not here."""
        shard = self._shard(context_id)
        with shard.lock:
            context = shard.contexts.pop(context_id, None)
            shard.released.setdefault(context_id, where)
            while len(shard.released) > _MEMORY // _NUM_SHARDS:
                shard.released.popitem(last=False)
        if context is not None:
            context.on_released(where)
        return context

    def where_released(self, context_id: int) -> str | None:
        """Who released a context, and where; None if nobody did, as far as is remembered."""
        shard = self._shard(context_id)
        with shard.lock:
            return shard.released.get(context_id)
