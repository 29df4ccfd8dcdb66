"""The contexts of one worker: the messages recorded in each, its passes and its gradients."""

from __future__ import annotations

import collections
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec
import torch

from gradwire import _interrupts
from gradwire._torch import leaf_hooks
from gradwire.autograd._graph_text import count
from gradwire.autograd.functions import Gradients, make_recv, make_send
from gradwire.config import Limits
from gradwire.errors import AutogradError, LimitExceeded, RpcTimeout, UnknownContext
from gradwire.observe import events
from gradwire.params.grads import GradientTable, add_gradient
from gradwire.rpc.connection import while_waiting
from gradwire.types import COUNTER_BITS, MAX_COUNTER, creator_of, first_counter, make_secret_id
from gradwire.wire.devices import copy_to, move
from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass
    from gradwire.params.rwlock import Group


EXTENSION = "autograd"
"""Name of the extension under which an agent keeps its `DistEngine`."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_SLICE_S = 0.2  # how often a waiting thread checks its deadline


class CallSite(msgspec.Struct, frozen=True):
    """A line of the user's code, formatted only when it is shown."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition(os.sep)[2]}:{self.line}, in {self.function}" if self.file else "its result"


RESULT = CallSite("", 0, "")
"""Stands for the result of a function, which no line of the user's code sent."""

_is_ours: dict[str, bool] = {}  # by file; at most one entry for each file whose code has called gradwire


def find_call_site() -> CallSite:
    """Return the innermost line outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in _is_ours:
            _is_ours[file] = file.startswith(_PACKAGE)
        if not _is_ours[file]:
            return CallSite(file, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return RESULT


class RecordedSend:
    """A sent message, with the gradient edges of its tensors.

    A tensor's history may change after this, so the node that keeps it is made at once. The edge of a leaf is the leaf: if
    the message has nothing else, its node is made only where one is asked for.
    """

    __slots__ = ("_leaves", "_metadata", "_output", "at_ns", "function", "is_on_device", "message_id", "peer", "site")
    is_send = True

    def __init__(self, message_id: int, peer: int, function: str, site: CallSite, tensors: list[torch.Tensor]) -> None:
        self.message_id = message_id
        self.peer = peer  # the receiver
        self.function = function  # the called function, or the one whose result it is
        self.site = site
        self.at_ns = time.monotonic_ns() if events.sink is not None else 0
        self._metadata: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._leaves: list[torch.Tensor] | None = tensors
        self.is_on_device = False
        for tensor in tensors:
            if not tensor.is_cpu:
                self.is_on_device = True
            self._metadata.append((tensor.shape, tensor.dtype, tensor.device))
            if not tensor.is_leaf:
                self._leaves = None
        self._output = make_send(message_id, tensors) if self._leaves is None else None

    @property
    def output(self) -> torch.Tensor:
        """The handle on the node; see `SendFunction`."""
        output = self._output
        if output is None:
            assert self._leaves is not None
            # A tensor that was frozen since then has no edge; the others keep their places.
            edges = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in self._leaves]
            output = self._output = make_send(self.message_id, edges)
        return output

    @property
    def start(self) -> Any:
        """Where a pass continues: the leaves, if there is nothing else and no hook is registered; else the node."""
        leaves = self._leaves
        if leaves is not None:
            for leaf in leaves:
                if leaf_hooks(leaf):
                    break
            else:
                return leaves
        return self.output.grad_fn

    @property
    def behind(self) -> Sequence[Any]:
        """Return the nodes or leaves that its tensors come from, without creating a node."""
        output = self._output
        if output is None or self._leaves is not None:
            return self._leaves or ()
        return [node for node, _ in output.grad_fn.next_functions if node is not None]  # type: ignore[union-attr]

    @property
    def num_tensors(self) -> int:
        return len(self._metadata)

    @property
    def num_bytes(self) -> int:
        """Size of the recorded tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in self._metadata)

    @property
    def no_gradients(self) -> Gradients:
        return (None,) * len(self._metadata)

    def place(self, defined: Sequence[bool], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients, of those tensors that have one, on the devices of the tensors."""
        devices = self._devices_of(defined)
        return move(gradients, devices[: len(gradients)]) + gradients[len(devices) :]  # `check` compares the numbers

    def capture(self, defined: Sequence[bool], gradients: list[torch.Tensor], deadline: float) -> list[torch.Tensor]:
        """Return copies of gradients as `place` does, for a message to oneself.

        As if they had come from another worker: any thread can use them, and two leaves, or a leaf and the caller's gradient
        do not share memory.
        """
        devices = self._devices_of(defined)
        return copy_to(gradients, devices + [item.device for item in gradients[len(devices) :]], deadline)

    def _devices_of(self, defined: Sequence[bool]) -> list[torch.device]:
        return [device for is_defined, (_, _, device) in zip(defined, self._metadata, strict=False) if is_defined]

    def check(self, gradients: Gradients) -> None:
        """Raise `AutogradError` if gradients do not fit the tensors that were sent."""
        if len(gradients) != len(self._metadata):
            raise self._refuse(f"got {len(gradients)} for {len(self._metadata)} tensors")
        is_any_defined = False
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            is_any_defined = True
            shape, dtype, device = self._metadata[number]
            if gradient.shape != shape:
                raise self._refuse(f"gradient {number} has shape {tuple(gradient.shape)}, not {tuple(shape)}")
            if gradient.dtype != dtype:
                raise self._refuse(f"gradient {number} has dtype {gradient.dtype}, not {dtype}")
            if self.is_on_device and gradient.device != device:
                raise self._refuse(f"gradient {number} is on {gradient.device}, not on {device}")
        if not is_any_defined:
            raise self._refuse("all of them are undefined; the peer must report no gradient instead")

    def _refuse(self, reason: str) -> AutogradError:
        return AutogradError(
            f"invalid gradients for send {self.message_id:#x} of {self.function} ({self.site}): {reason}"
        )


class RecordedRecv(msgspec.Struct, frozen=True):
    """A message that arrived."""

    message_id: int
    peer: int  # the sender
    function: str  # the called function, or the one whose result it is
    node: Any  # the gradient function of the received tensors
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()  # those tensors; the graph must not keep them
    at_ns: int = 0  # when it was recorded, if that was observed
    is_send: ClassVar[bool] = False

    @property
    def num_tensors(self) -> int:
        return len(self.outputs)

    @property
    def is_watched(self) -> bool:
        """Whether hooks or `Tensor.retain_grad` want to see the gradients of the received tensors here."""
        if self.node.is_watched:
            return True
        return any((tensor := output()) is not None and tensor.retains_grad for output in self.outputs)


class ContextObserver(Protocol):
    """Looks at contexts that were made on this worker; called in the thread of the program. Must not raise."""

    def before_backward(self, context_id: int, roots: Sequence[torch.Tensor]) -> None: ...

    def before_release(self, context_id: int) -> None: ...


class DistAutogradContext:
    """One worker's part of an autograd context.

    Attributes:
        gradients: Sums of committed passes, by leaf tensor. Replaced, never changed.
        passes: Those that are running.
        known_workers: Ranks of the workers this one exchanged messages with inside the context.
        released: Where the context was released; None while it is open.
        turns: Groups of shared parameters that it has taken a turn with.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self._lock = threading.Lock()  # guards changes of everything below
        self._changed: threading.Condition | None = None  # made by a thread that waits until a pass or this is over
        self.sends: dict[int, RecordedSend] = {}
        self.recvs: dict[int, RecordedRecv] = {}
        self.exchanges: list[RecordedSend | RecordedRecv] = []  # in the order in which they were made
        self.known_workers: set[int] = set()
        self.gradients: GradientTable = {}
        self.passes: dict[int, BackwardPass] = {}
        self.ended_passes: dict[int, bool] = {}  # whether they were committed; their late messages are ignored
        self.released: str | None = None
        self._at_end: list[Callable[[], None]] = []
        self.turns: set[Group] = set()
        self.charges: dict[int, int] | None = {}  # guarded by `Quotas`: bytes by the worker that made them necessary

    def __repr__(self) -> str:
        state = (
            f"released {self.released}" if self.released else f"{count(len(self.passes), 'pass', 'passes')} in progress"
        )
        messages = f"{count(len(self.sends), 'send')}, {count(len(self.recvs), 'recv')}"
        return f"<DistAutogradContext {self.context_id}: {messages}, {state}>"

    # -- recording -----------------------------------------------------------------------------------------------

    def record_send(
        self, message_id: int, peer: int, function: str, tensors: list[torch.Tensor], site: CallSite | None = None
    ) -> None:
        """Record tensors that leave in a message; the site is the caller's line unless given."""
        send = RecordedSend(message_id, peer, function, site or find_call_site(), tensors)
        with self._lock:
            self.sends[message_id] = send
            self.exchanges.append(send)
            self.known_workers.add(peer)

    def record_recv(
        self, message_id: int, peer: int, function: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Record tensors that arrived in a message; return the tensors to use in their place."""
        outputs = make_recv(self.context_id, message_id, tensors)
        at_ns = time.monotonic_ns() if events.sink is not None else 0
        recv = RecordedRecv(message_id, peer, function, outputs[0].grad_fn, tuple(map(weakref.ref, outputs)), at_ns)
        with self._lock:
            self.recvs[message_id] = recv
            self.exchanges.append(recv)
            self.known_workers.add(peer)
        return outputs

    def touch(self, peer: int) -> bool:
        """Note that a message of the context goes to or comes from a worker; False if the context was released."""
        if peer not in self.known_workers:
            with self._lock:
                if self.released:  # too late to tell that worker
                    return False
                self.known_workers.add(peer)  # and must be told of the context's end, too
        return True

    def knows(self, worker: int) -> bool:
        """Return whether a worker is known here to take part: it created the context, or exchanged messages in it."""
        return worker in self.known_workers or worker == creator_of(self.context_id)

    # -- passes ------------------------------------------------------------------------------------------------------

    def begin_pass(self, pass_id: int, make: Callable[[], BackwardPass]) -> BackwardPass | None:
        """Return the pass of that id, created if it is new; None if it or the context is over."""
        with self._lock:
            if self.released or pass_id in self.ended_passes:
                return None
            current = self.passes.get(pass_id)
            if current is None:
                current = self.passes[pass_id] = make()  # while nothing else can be recorded in the context
            return current

    def bar_pass(self, pass_id: int, charge: Callable[[], None]) -> bool:
        """Remember that a pass ended that never started here; False if it did. `charge` may refuse by raising."""
        with self._lock:
            if pass_id in self.passes:
                return False
            if pass_id not in self.ended_passes:
                charge()
                self.ended_passes[pass_id] = False
            return True

    def end_pass(self, current: BackwardPass, is_committed: bool) -> None:
        """End a decided pass: all of its gradients join the context, or none."""
        with self._lock:
            if is_committed and current.roots.joins_context and not self.released and current.gradients:
                joined = dict(self.gradients)
                for leaf, counted in current.totals.items():
                    known = joined.pop(leaf, None)
                    if known is not None and known is not counted:  # other passes were committed since
                        joined[leaf] = known
                        if counted is not None:
                            add_gradient(joined, leaf, -counted, current.options.create_graph)
                for leaf, gradient in current.gradients.items() if joined else ():
                    if leaf in joined:
                        add_gradient(joined, leaf, gradient, current.options.create_graph)
                    else:
                        joined[leaf] = gradient
                self.gradients = joined or dict(current.gradients)  # a copy needs no hashes of tensors
            self.ended_passes[current.pass_id] = is_committed
            self.passes.pop(current.pass_id, None)
            if self._changed is not None:
                self._changed.notify_all()

    @property
    def has_undecided_pass(self) -> bool:
        return bool(self._undecided_passes())

    def _undecided_passes(self) -> list[BackwardPass]:
        """Return the passes that have finished here, but whose root has not reported yet whether they were committed."""
        return [item for item in list(self.passes.values()) if item.is_undecided]

    def wait_gradients(self, timeout_s: float) -> GradientTable:
        """Return the sums of committed passes. Wait for a pass that has finished here but is not decided yet."""
        if self.passes and self.has_undecided_pass:
            deadline = time.monotonic() + timeout_s
            with while_waiting(), self._lock:
                self._changed = self._changed or threading.Condition(self._lock)
                while undecided := self._undecided_passes():
                    if time.monotonic() > deadline:
                        raise RpcTimeout(
                            f"timed out after {timeout_s:g} s waiting for rank {undecided[0].root}, which started a "
                            f"backward pass of context {self.context_id}, to commit or abort it; call "
                            f"gradwire.autograd.explain({self.context_id}) to see what it waits for"
                        )
                    _interrupts.wait(self._changed, _SLICE_S)
        self.check_alive()
        return dict(self.gradients)

    # -- end ---------------------------------------------------------------------------------------------------------

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call back when the context is released, or at once if it was."""
        with self._lock:
            if self.released is None:
                self._at_end.append(callback)
                return
        callback()

    def on_released(self, where: str) -> None:
        with self._lock:
            self.released = where
            if self._changed is not None:
                self._changed.notify_all()
            callbacks, self._at_end = self._at_end, []
        for callback in callbacks:
            callback()

    def check_alive(self) -> None:
        if self.released:
            raise UnknownContext(
                f"Could not find autograd context with id: {self.context_id}. It was released {clean(self.released)}"
            )

    # -- PyTorch's names -----------------------------------------------------------------------------------------

    def _context_id(self) -> int:
        return self.context_id

    def _send_functions(self) -> Mapping[int, Any]:
        with self._lock:
            return {message_id: send.output.grad_fn for message_id, send in self.sends.items()}

    def _recv_functions(self) -> Mapping[int, Any]:
        with self._lock:
            return {message_id: recv.node for message_id, recv in self.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        with self._lock:
            return set(self.known_workers)


@dataclass(frozen=True, slots=True)
class AutogradStatistics:
    """A snapshot of one worker's distributed autograd."""

    num_contexts: int
    num_passes_under_way: int
    num_passes: int
    num_sends: int
    num_recvs: int
    num_refused: int


CONTEXT_BYTES: Final = 4096
MESSAGE_BYTES: Final = 2048
PASS_BYTES: Final = 8192
PASS_BYTES_PER_MESSAGE: Final = 256
"""A pass looks at every message of its context."""
ENDED_PASS_BYTES: Final = 256
"""Stays until the context is released: late messages must not begin the pass again."""


class Quotas:
    """How much of its budget each worker has used."""

    def __init__(self, own: int, limit_bytes: int) -> None:
        self._own = own  # whose own messages are not counted
        self._limit = limit_bytes  # the budget of every other worker
        self._lock = threading.Lock()  # guards the table below and the `charges` of all contexts
        self.used: dict[int, int] = {}  # by rank; at most one entry for each worker

    def charge(self, worker: int, context: DistAutogradContext, num_bytes: int) -> None:
        """Count memory that a worker's message is about to use, until the context is released."""
        if worker == self._own:
            return
        with self._lock:
            if context.charges is None:  # released: nothing is kept
                return
            used = self.used.get(worker, 0) + num_bytes
            if used > self._limit:
                raise LimitExceeded(
                    f"the autograd contexts, messages and backward passes of rank {worker} would take more than "
                    f"{self._limit} bytes here (Limits.autograd_bytes). Release contexts that are no longer needed, or "
                    f"raise that limit on rank {self._own}"
                )
            self.used[worker] = used
            context.charges[worker] = context.charges.get(worker, 0) + num_bytes

    def refund(self, context: DistAutogradContext, worker: int, num_bytes: int) -> None:
        """Give back part of what was charged, because it ended before its context."""
        if worker == self._own:
            return
        with self._lock:
            if context.charges is not None:
                context.charges[worker] -= num_bytes
                self.used[worker] -= num_bytes

    def settle(self, context: DistAutogradContext) -> None:
        """Give back everything that was charged for a released context."""
        with self._lock:
            charges, context.charges = context.charges, None
            if charges:
                for worker, num_bytes in charges.items():
                    self.used[worker] -= num_bytes


MAX_WORKER = (1 << 16) - 1
_MEMORY = 16_384  # released contexts remembered for each worker, so that a late message does not revive one


class IdSource:
    """Generates ids of one kind."""

    def __init__(self, worker: int, first: int = 0) -> None:
        if not 0 <= worker <= MAX_WORKER:
            raise AutogradError(f"the rank of a worker must be between 0 and {MAX_WORKER}, not {worker}")
        self._base = worker << COUNTER_BITS
        self._counter = itertools.count(max(1, first))  # thread-safe: each number is used once

    def next(self) -> int:
        counter = next(self._counter)
        if counter > MAX_COUNTER:
            raise AutogradError("We have run out of autograd context and message ids: all 48 bits are used up")
        return self._base | counter


class DistAutogradContainer:
    """The contexts of one worker, by id."""

    def __init__(self, worker: int, incarnation: int, limits: Limits = Limits()) -> None:  # noqa: B008  (frozen)
        self.worker = worker
        self.quotas = Quotas(worker, limits.autograd_bytes)
        self.new_message_id = IdSource(worker, first_counter(incarnation)).next
        self._lock = threading.Lock()  # guards changes of everything below
        self._contexts: dict[int, DistAutogradContext] = {}
        self.find: Callable[[int], DistAutogradContext | None] = self._contexts.get  # None if it is not here
        self._released: dict[int, str] = {}  # where
        # By rank: the latest contexts that it released.
        self._released_by: collections.defaultdict[int, collections.deque[int]] = collections.defaultdict(
            collections.deque
        )

    def __repr__(self) -> str:
        return f"<DistAutogradContainer of rank {self.worker}, {len(self)} contexts>"

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[DistAutogradContext]:
        with self._lock:
            return iter(list(self._contexts.values()))

    @property
    def max_id(self) -> int:
        """The highest id that this worker can generate."""
        return (self.worker << COUNTER_BITS) | MAX_COUNTER

    def new_context(self) -> DistAutogradContext:
        while True:
            context_id = make_secret_id(self.worker)
            with self._lock:
                if context_id not in self._released and context_id not in self._contexts:
                    context = self._contexts[context_id] = DistAutogradContext(context_id)
                    return context

    def retrieve(self, context_id: int) -> DistAutogradContext:
        """Return the context of that id, or raise `UnknownContext`."""
        context = self.find(context_id)
        if context is None:
            where = self.where_released(context_id)
            raise UnknownContext(
                f"Could not find autograd context with id: {context_id}. "
                + (
                    f"It was released {where}"
                    if where
                    else f"Rank {self.worker} has never taken part in it; pass the id that autograd.context() returned"
                )
            )
        return context

    def get_or_create(self, context_id: int, sender: int) -> DistAutogradContext | None:
        """Return the context of that id, created if another worker owns the id; None if it was released."""
        found = self.find(context_id)
        if found is not None:
            return found
        with self._lock:
            found = self._contexts.get(context_id)
            if found is not None or context_id in self._released or creator_of(context_id) == self.worker:
                return found
            made = DistAutogradContext(context_id)
            self.quotas.charge(sender, made, CONTEXT_BYTES)
            made.known_workers.add(sender)
            self._contexts[context_id] = made
            return made

    def release(self, context_id: int, where: str, worker: int | None = None) -> DistAutogradContext | None:
        """Forget a context, and remember not to revive it; None if it was not here."""
        with self._lock:
            context = self._contexts.pop(context_id, None)
            if context_id not in self._released:
                # Releases of one worker evict only its own oldest contexts.
                latest = self._released_by[self.worker if worker is None else worker]
                latest.append(context_id)
                self._released[context_id] = where
                if len(latest) > _MEMORY:
                    del self._released[latest.popleft()]
        if context is not None:
            self.quotas.settle(context)
            context.on_released(where)
        return context

    def where_released(self, context_id: int) -> str | None:
        """Return which worker released a context, and where; None if that is not known."""
        with self._lock:
            where = self._released.get(context_id)
        return where if where is None else clean(where)
