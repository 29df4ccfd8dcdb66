"""The hook with which upper layers attach data to messages, so that rpc does not depend on them.

    caller                                         callee
    outgoing(call, tensors) -> note  --- Call --->  incoming(call, note, tensors) -> tensors
                                                    around(note, function) -> what is called in its place
    incoming(reply, ...) -> tensors  <--- Reply --  outgoing(reply, tensors) -> note

Replies are passed only to interceptors that attached a note to the call. A call that no interceptor wants costs one check
per interceptor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import torch

from gradwire.types import WorkerInfo
from gradwire.wire.messages import prepare


class Envelope(msgspec.Struct, frozen=True):
    """A message as seen by an interceptor.

    Attributes:
        kind: ``call`` or ``reply``.
        peer: The worker at the other end.
        function: The called function's name.
        note: For replies, the note that the interceptor attached to the call; None for calls.
        call_id: For outgoing calls, their number in this process; 0 for all others.
    """

    kind: Literal["call", "reply"]
    peer: WorkerInfo
    function: str
    note: Any = None
    call_id: int = 0


class Interceptor:
    """Base class of interceptors, which does nothing.

    Notes must be plain data or msgspec structs, because they are part of the message's header.

    Attributes:
        name: The name of its notes in messages.
        note_type: The type, as msgspec supports it, against which received notes are validated before the interceptor
            sees them. With `Any` they are passed on as decoded, without validation.
    """

    name = "interceptor"
    note_type: ClassVar[Any] = Any

    def __init_subclass__(cls) -> None:
        """Make the type of its notes known before there are threads."""
        prepare(cls.note_type)

    def wants_calls(self) -> bool:
        """Return whether a call made now, in this thread, is of interest. Runs for every call, so it must be quick."""
        return True

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Any:
        """Inspect the tensors of an outgoing message; return a note to attach, or None."""
        return None

    def on_untracked(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> None:
        """Inspect tensors of an outgoing message that require grad but are not passed to `outgoing`.

        Raises:
            CannotSend: They must not be sent.
        """

    def incoming(self, envelope: Envelope, note: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Handle a received message with a note; return the tensors to use in place of the received ones."""
        return tensors

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in place of the given one, for a call with a note.

        If the function is marked with `async_execution`, it returns a future, and so must its replacement.
        """
        return function
