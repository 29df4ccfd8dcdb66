"""One context on one worker: the messages recorded in it, its passes and its gradients."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from gradwire.autograd.functions import Gradients, make_recv, make_send
from gradwire.errors import AutogradError, UnknownContext
from gradwire.rpc._ids import creator_of

if TYPE_CHECKING:
    from gradwire.autograd.guards import Group
    from gradwire.autograd.passes import BackwardPass

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
