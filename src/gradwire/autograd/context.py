"""One context on one worker: the messages recorded in it, its passes and its gradients."""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import torch

from gradwire.autograd.functions import Gradients, make_recv, make_send
from gradwire.config import Limits
from gradwire.errors import AutogradError, LimitExceeded, UnknownContext
from gradwire.types import COUNTER_BITS, MAX_COUNTER, creator_of, first_counter, make_secret_id

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass
    from gradwire.params.rwlock import Group

    pass


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class CallSite(msgspec.Struct, frozen=True):
    """A line of the user's code, formatted only when somebody asks."""

    code: CodeType | None
    line: int

    def __str__(self) -> str:
        if self.code is None:
            return "its result"
        return f"{os.path.basename(self.code.co_filename)}:{self.line}, in {self.code.co_name}"


RESULT = CallSite(None, 0)
"""What a function returned was sent by no line of anybody's code."""


def find_call_site() -> CallSite:
    """The innermost line outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return CallSite(frame.f_code, frame.f_lineno) if frame is not None else RESULT


class RecordedSend:
    """A message that left, with the gradient edges of its tensors.

    Attributes:
        peer: Rank of the receiver.
        function: The called function, or the one whose result it is.
        site: Where in the user's code it was made.
        output: Handle on the node; see `SendFunction`.
    """

    __slots__ = ("_metadata", "function", "message_id", "output", "peer", "site")
    is_send = True

    def __init__(
        self, message_id: int, peer: int, function: str, site: CallSite, tensors: Sequence[torch.Tensor]
    ) -> None:
        self.message_id = message_id
        self.peer = peer
        self.function = function
        self.site = site
        self._metadata = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.output = make_send(message_id, tensors)

    @property
    def no_gradients(self) -> Gradients:
        """As many as tensors were sent, all undefined."""
        return (None,) * len(self._metadata)

    def check(self, gradients: Gradients) -> None:
        """Refuses gradients that cannot be those of the tensors that were sent.

        Raises:
            AutogradError: Their number, a shape or a dtype is wrong, or none is defined.
        """
        if len(gradients) != len(self._metadata):
            raise self._refuse(f"there are {len(gradients)}, but {len(self._metadata)} tensors were sent")
        is_any_defined = False
        for number, (gradient, (shape, dtype)) in enumerate(zip(gradients, self._metadata, strict=True)):
            if gradient is None:
                continue
            is_any_defined = True
            if gradient.shape != shape:
                raise self._refuse(f"number {number} has shape {tuple(gradient.shape)}, not {tuple(shape)}")
            if gradient.dtype != dtype:
                raise self._refuse(f"number {number} has dtype {gradient.dtype}, not {dtype}")
        if not is_any_defined:
            raise self._refuse("all are undefined; that there is none must be said as such")

    def _refuse(self, reason: str) -> AutogradError:
        return AutogradError(
            f"wrong gradients for send {self.message_id:#x} of {self.function} ({self.site}): {reason}"
        )


class RecordedRecv(msgspec.Struct, frozen=True):
    """A message that arrived.

    Attributes:
        peer: Rank of the sender.
        function: The called function, or the one whose result it is.
        node: The gradient function of the received tensors.
        outputs: Those tensors; the graph must not keep them.
    """

    message_id: int
    peer: int
    function: str
    node: Any
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()
    is_send: ClassVar[bool] = False

    @property
    def num_tensors(self) -> int:
        """How many tensors came."""
        return len(self.outputs)

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to see the gradients of the received tensors here: hooks, or `Tensor.retain_grad`."""
        if self.node.is_watched:
            return True
        return any((tensor := output()) is not None and tensor.retains_grad for output in self.outputs)


class DistAutogradContext:
    """What one worker keeps for one context.

    Attributes:
        gradients: By leaf tensor; what committed passes have gathered.
        passes: Those that are not over.
        known_workers: Ranks of the workers this one exchanged messages with inside the context.
        turns: Groups of shared parameters that it has had a turn with.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.lock = threading.Lock()  # guards everything below
        self._changed: threading.Condition | None = None  # made by who waits; told when a pass or the context is over
        self.sends: dict[int, RecordedSend] = {}
        self.recvs: dict[int, RecordedRecv] = {}
        self.exchanges: list[RecordedSend | RecordedRecv] = []  # in the order in which they were made
        self.known_workers: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[int, BackwardPass] = {}
        self.ended_passes: dict[int, bool] = {}  # whether they were committed; their late messages are ignored
        self.released: str | None = None  # where it was released
        self._at_end: list[Callable[[], None]] = []
        self.turns: set[Group] = set()
        self.charges: dict[int, int] | None = {}  # guarded by `Quotas`: bytes by the worker that made them necessary

    def __repr__(self) -> str:
        state = f"released {self.released}" if self.released else f"{len(self.passes)} passes under way"
        return f"<DistAutogradContext {self.context_id}: {len(self.sends)} sends, {len(self.recvs)} recvs, {state}>"

    # -- recording -----------------------------------------------------------------------------------------------

    def record_send(
        self, message_id: int, peer: int, function: str, tensors: Sequence[torch.Tensor], site: CallSite | None = None
    ) -> None:
        """Records tensors that leave in a message; the site is the caller's line unless given."""
        send = RecordedSend(message_id, peer, function, site or find_call_site(), tensors)
        with self.lock:
            self.sends[message_id] = send
            self.exchanges.append(send)
            self.known_workers.add(peer)

    def record_recv(
        self, message_id: int, peer: int, function: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Records tensors that arrived in a message; returns those to use in their place."""
        outputs = make_recv(self.context_id, message_id, tensors)
        recv = RecordedRecv(message_id, peer, function, outputs[0].grad_fn, tuple(map(weakref.ref, outputs)))
        with self.lock:
            self.recvs[message_id] = recv
            self.exchanges.append(recv)
            self.known_workers.add(peer)
        return outputs

    def touch(self, peer: int) -> bool:
        """A message of the context goes to or comes from a worker, which must hear of the context's end, too.

        Returns:
            False if the context is over: nobody would tell that worker any more.
        """
        if peer not in self.known_workers:
            with self.lock:
                if self.released:
                    return False
                self.known_workers.add(peer)
        return True

    def knows(self, worker: int) -> bool:
        """Whether a worker has a part in the context, as far as is known here: it made it, or exchanged messages in it."""
        return worker in self.known_workers or worker == creator_of(self.context_id)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Calls back when the context is released; at once if it is."""
        with self.lock:
            if self.released is None:
                self._at_end.append(callback)
                return
        callback()

    def on_released(self, where: str) -> None:
        """The context is over."""
        with self.lock:
            self.released = where
            self.wake()
            callbacks, self._at_end = self._at_end, []
        for callback in callbacks:
            callback()

    def wait_changed(self, seconds: float) -> None:
        """Waits until a pass is decided, or the context released, or so long; under `lock`."""
        self._changed = self._changed or threading.Condition(self.lock)
        self._changed.wait(seconds)

    def wake(self) -> None:
        """A pass was decided; under `lock`."""
        if self._changed is not None:
            self._changed.notify_all()

    def check_alive(self) -> None:
        """Raises if the context is over.

        Raises:
            UnknownContext: It was released; says where.
        """
        if self.released:
            raise UnknownContext(
                f"Could not find autograd context with id: {self.context_id}. It was released {self.released}"
            )

    @property
    def has_undecided_pass(self) -> bool:
        """Whether a pass is done here and its root has not said yet whether it counts."""
        return any(item.is_undecided for item in list(self.passes.values()))

    # -- PyTorch's names -----------------------------------------------------------------------------------------

    def _context_id(self) -> int:
        return self.context_id

    def _send_functions(self) -> Mapping[int, Any]:
        with self.lock:
            return {message_id: send.output.grad_fn for message_id, send in self.sends.items()}

    def _recv_functions(self) -> Mapping[int, Any]:
        with self.lock:
            return {message_id: recv.node for message_id, recv in self.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.known_workers)


CONTEXT_BYTES: Final = 4096
MESSAGE_BYTES: Final = 2048
PASS_BYTES: Final = 8192
PASS_BYTES_PER_MESSAGE: Final = 256
"""A pass looks at every message of its context."""
ENDED_PASS_BYTES: Final = 256
"""Stays until the context is released: late messages must not begin the pass again."""


class Quotas:
    """What each worker has used of its budget.

    Args:
        own: This worker's rank, whose own messages are not counted.
        limit_bytes: The budget of every other worker.
    """

    def __init__(self, own: int, limit_bytes: int) -> None:
        self._own = own
        self._limit = limit_bytes
        self._lock = threading.Lock()  # guards the table below and the `charges` of all contexts
        self._used: dict[int, int] = {}

    def charge(self, worker: int, context: DistAutogradContext, num_bytes: int) -> None:
        """Count memory that a worker's message is about to take, until the context is released.

        Raises:
            LimitExceeded: The worker has used up its budget.
        """
        if worker == self._own:
            return
        with self._lock:
            if context.charges is None:  # released: nothing is kept
                return
            used = self._used.get(worker, 0) + num_bytes
            if used > self._limit:
                raise LimitExceeded(
                    f"the autograd contexts, messages and backward passes of worker {worker} would take more than "
                    f"{self._limit} bytes here (Limits.autograd_bytes). Release contexts that are no longer needed, or "
                    f"raise that limit on rank {self._own}"
                )
            self._used[worker] = used
            context.charges[worker] = context.charges.get(worker, 0) + num_bytes

    def charge_pass(self, worker: int, context: DistAutogradContext) -> Callable[[], None]:
        """Count a pass that a worker begins here; returns what to call at its end.

        Raises:
            LimitExceeded: The worker has used up its budget.
        """
        num_bytes = PASS_BYTES + PASS_BYTES_PER_MESSAGE * len(context.exchanges)
        self.charge(worker, context, num_bytes + ENDED_PASS_BYTES)
        return functools.partial(self.refund, worker, context, num_bytes)

    def refund(self, worker: int, context: DistAutogradContext, num_bytes: int) -> None:
        """Give back part of what was charged, because it ended before its context."""
        if worker == self._own:
            return
        with self._lock:
            if context.charges is not None:
                context.charges[worker] -= num_bytes
                self._give_back(worker, num_bytes)

    def settle(self, context: DistAutogradContext) -> None:
        """Give back all that was charged for a context, which was released."""
        with self._lock:
            charges, context.charges = context.charges, None
            for worker, num_bytes in (charges or {}).items():
                self._give_back(worker, num_bytes)

    def used_by(self, worker: int) -> int:
        """Return how many bytes of its budget a worker has used."""
        with self._lock:
            return self._used.get(worker, 0)

    def _give_back(self, worker: int, num_bytes: int) -> None:
        self._used[worker] -= num_bytes
        if not self._used[worker]:
            del self._used[worker]


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
