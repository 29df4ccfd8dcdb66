"""The hook that lets upper layers attach to messages, so that rpc knows nothing of them.

    caller                                         callee
    outgoing(call, tensors) -> note  --- Call --->  incoming(call, note, tensors) -> tensors
                                                    around(note, function) -> what is called in its place
    incoming(reply, ...) -> tensors  <--- Reply --  outgoing(reply, tensors) -> note

Replies are shown to those alone that attached a note to the call. A call that no interceptor wants to see pays for one
question to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import torch

from gradwire.types import WorkerInfo
from gradwire.wire.messages import prepare


class Envelope(msgspec.Struct, frozen=True):
    """What an interceptor is told about a message.

    Attributes:
        kind: ``call`` or ``reply``.
        peer: The worker at the other end.
        function: The called function's name.
        note: What the interceptor attached to the call, on its way back with the reply; None for calls.
    """

    kind: Literal["call", "reply"]
    peer: WorkerInfo
    function: str
    note: Any = None


class Interceptor:
    """Base class: does nothing. Notes must be plain data or msgspec structs: they are part of the message's header.

    Attributes:
        name: Its notes travel under this name.
        note_type: What its notes are checked against when they arrive, before it sees them: any type that msgspec knows.
            With `Any` they come as msgpack has them, unchecked.
    """

    name = "interceptor"
    note_type: ClassVar[Any] = Any

    def __init_subclass__(cls) -> None:
        """Make the type of its notes known before there are threads."""
        prepare(cls.note_type)

    def wants_calls(self) -> bool:
        """Return whether a call that is made now, in this thread, is of interest. Asked for every call: be quick."""
        return True

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Any:
        """See the tensors of a message that leaves; return a note to attach, or None."""
        return None

    def on_untracked(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> None:
        """See tensors of a message that leaves that require grad, but are not among those that `outgoing` sees.

        Raises:
            CannotSend: They must not leave.
        """

    def incoming(self, envelope: Envelope, note: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See a message that came with a note; return the tensors to use in place of those that came."""
        return tensors

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of the function, in a call that came with a note.

        A function marked with `async_execution` returns a future, and so must what replaces it.
        """
        return function
