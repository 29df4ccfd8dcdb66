"""All contexts of one worker.

Ids have 64 bits: the rank of the worker that made them, and 48 bits more. Those of messages and passes are a counter, which
begins at a number that rises with the worker's incarnation, so a restarted worker never gives out an id that its predecessor
did. Those of contexts are random: only workers that a context has reached can name it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.quotas import CONTEXT_BYTES, Quotas
from gradwire.config import Limits
from gradwire.errors import AutogradError, UnknownContext
from gradwire.rpc._ids import COUNTER_BITS, MAX_COUNTER, creator_of, first_counter, make_secret_id

MAX_WORKER = (1 << 16) - 1
_NUM_SHARDS = 16
_MEMORY = 16_384  # of each worker: contexts it released that are remembered, so that a late message does not revive one


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
        self.lock = threading.Lock()  # guards everything below
        self.contexts: dict[int, DistAutogradContext] = {}
        self.released: dict[int, str] = {}
        self._released_by: dict[int, collections.deque[int]] = {}

    def remember(self, context_id: int, where: str, worker: int) -> None:
        """Remember that a context is over; under `lock`. What one worker says pushes out its own oldest words alone."""
        if context_id in self.released:
            return
        latest = self._released_by.setdefault(worker, collections.deque())
        latest.append(context_id)
        self.released[context_id] = where
        if len(latest) > _MEMORY // _NUM_SHARDS:
            del self.released[latest.popleft()]


class DistAutogradContainer:
    """The contexts of one worker, by id.

    Args:
        worker: Its rank.
        incarnation: Of the worker.
        limits: What it keeps for other workers.
    """

    def __init__(self, worker: int, incarnation: int, limits: Limits = Limits()) -> None:  # noqa: B008  (frozen)
        self.worker = worker
        self.quotas = Quotas(worker, limits.autograd_bytes)
        self._message_ids = IdSource(worker, first_counter(incarnation))
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
        while True:
            context = DistAutogradContext(make_secret_id(self.worker))
            shard = self._shard(context.context_id)
            with shard.lock:
                if context.context_id not in shard.released and context.context_id not in shard.contexts:
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

    def get_or_create(self, context_id: int, sender: int) -> DistAutogradContext | None:
        """The context of that id, made here if another worker made it; None if it was released.

        Args:
            context_id: The context.
            sender: Rank of the worker whose message is about it.

        Raises:
            LimitExceeded: That worker has brought too much here already.
        """
        shard = self._shard(context_id)
        found = shard.contexts.get(context_id)
        if found is not None:
            return found
        with shard.lock:
            found = shard.contexts.get(context_id)
            if found is not None or context_id in shard.released or creator_of(context_id) == self.worker:
                return found
            made = DistAutogradContext(context_id)
            self.quotas.charge(sender, made, CONTEXT_BYTES)
            made.known_workers.add(sender)
            shard.contexts[context_id] = made
            return made

    def release(self, context_id: int, where: str, worker: int | None = None) -> DistAutogradContext | None:
        """Forgets a context, and remembers that it must not come back; None if it was not here.

        Args:
            context_id: The context.
            where: Where it was released.
            worker: Rank of the worker that says so; this one if not given.
        """
        shard = self._shard(context_id)
        with shard.lock:
            context = shard.contexts.pop(context_id, None)
            shard.remember(context_id, where, self.worker if worker is None else worker)
        if context is not None:
            self.quotas.settle(context)
            context.on_released(where)
        return context

    def where_released(self, context_id: int) -> str | None:
        """Who released a context, and where; None if nobody did, as far as is remembered."""
        shard = self._shard(context_id)
        with shard.lock:
            return shard.released.get(context_id)
