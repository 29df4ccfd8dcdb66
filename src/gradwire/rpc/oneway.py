"""Notices: one-way messages of the layers above to other workers.

    sender   Notices.send   --- Call with id 0, a note and tensors --->   Notices.received   receiver

A notice arrives, or its sender learns that it may not have: the worker is lost (`Agent.on_worker_lost`), or only the
connection is (`on_cut`). So no reply is needed.

On one machine, notices use the calls lane while no call is in progress on it, so they cannot wait behind a function: the
thread that served the last call is still reading and need not be woken. Otherwise they use the control lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import (
    ConnectionClosed,
    ConnectionLost,
    DecodeError,
    NotExposed,
    NotInitialized,
    ResourceExhausted,
    RpcTimeout,
)
from gradwire.observe.log import get_logger
from gradwire.types import WorkerInfo
from gradwire.wire.devices import ON_HOST
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, prepare, read_note
from gradwire.wire.serialization import EMPTY

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


_log = get_logger(__name__)

NOTICE_ID = 0
"""Calls that want an answer have higher ids."""

_NOTE = "notice"

Handler = Callable[[WorkerInfo, Any, list[torch.Tensor]], None]


class Notices:
    """Sends and receives one worker's notices."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._handlers: dict[str, Handler] = {}
        self._kinds: dict[str, Any] = {}  # types against which notes are validated before their handler sees them
        self._cut_callbacks: list[Callable[[str], None]] = []

    def register(self, name: str, handler: Handler, kind: Any) -> None:
        """Call ``handler(sender, note, tensors)`` for every notice of that name, in the thread that read it.

        An exception of the handler closes the connection. A note that is not of type `kind` does not reach it.
        """
        prepare(kind)
        self._kinds[f"~{name}"] = kind
        self._handlers[f"~{name}"] = handler

    def on_cut(self, callback: Callable[[str], None]) -> None:
        """Register a callback for live workers with which a connection broke: notices on it may be lost."""
        self._cut_callbacks.append(callback)

    def lane_ended(self, name: str) -> None:
        """Report that a connection with a worker closed, unless the worker itself died, which is reported separately."""
        if not (self._agent.is_closed or self._agent.has_ended(name)):
            for callback in self._cut_callbacks:
                callback(name)

    def is_out_of_reach(self, to: str) -> bool:
        """Return whether a worker was found dead and has not reconnected; it may be back."""
        peer = self._agent.peers.by_name.get(to)
        return self._agent.has_ended(to) and not (peer is not None and peer.lanes)

    def send(
        self,
        to: str,
        name: str,
        note: Any,
        tensors: Sequence[torch.Tensor] = (),
        deadline: float | None = None,
    ) -> None:
        """Send a notice to another worker, not to this one; tensors are captured."""
        agent = self._agent
        limit = time.monotonic() + agent.config.rpc_timeout_s if deadline is None else deadline
        message = Call(NOTICE_ID, f"~{name}", 0.0, EMPTY, 0, (), {_NOTE: note})
        peer = agent.peers.by_name.get(to) or agent.peers.peer(to)
        while True:
            lane = peer.lanes.get("calls")
            if lane is None or lane.calls or not lane.is_on_this_machine:  # it could wait behind a function there
                lane = peer.lanes.get("control") or peer.lane("control", limit)
            try:
                lane.stream.send(message, b"", tensors, limit)
                return
            except ConnectionClosed as error:  # interrupted here: the peer has not received all of it
                lane.end(error)
                if agent.is_closed:
                    raise NotInitialized(f"worker {agent.info.name} has shut down") from error
            except ConnectionLost as error:
                lane.end_when_read(error, limit)
                raise peer.lost(str(error)) from error
            except TimeoutError as error:
                text = f"worker {to} is not reading: message {name} could not be sent in time (phase: send)"
                raise RpcTimeout(text, to, "send") from error
            finally:
                if lane.stream.is_closed:  # half of the message may be out: the next one needs another connection
                    lane.end(ConnectionClosed("a message was interrupted while being sent"))

    def read(self, frame: Frame) -> Any:
        """Return the note of a notice, checked; None for any other message, or one that this worker cannot handle."""
        message = frame.message
        if not isinstance(message, Call) or message.call_id != NOTICE_ID or message.function not in self._kinds:
            return None
        try:
            note = message.notes[_NOTE] = read_note(message.notes[_NOTE], self._kinds[message.function])
        except (KeyError, DecodeError):  # `received` reports what is wrong with it
            return None
        return note

    def received(self, sender: WorkerInfo, frame: Frame) -> None:
        """Handle a received notice; close the connection if that fails, because there is no reply to report it in."""
        message = frame.message
        assert isinstance(message, Call)
        try:
            handler = self._handlers.get(message.function)
            if handler is None:
                raise NotExposed(f"this worker does not handle notices named {message.function!r}")
            if frame.shortage:
                raise ResourceExhausted(f"this worker is out of memory for it: {frame.shortage}")
            if message.notes.keys() != {_NOTE} or frame.body:
                raise DecodeError("a notice must have one note and no arguments")
            note = read_note(message.notes[_NOTE], self._kinds[message.function])
            codec = (
                self._agent.codec
            )  # where its tensors belong is for the handler to know: see `gradwire.wire.devices`
            handler(sender, note, codec.rebuild_tensors(frame, message, ON_HOST) if message.tensors else [])
        except Exception as error:
            _log.exception(
                "%s could not handle a notice %s from %s", self._agent.info.name, message.function, sender.name
            )
            raise DecodeError(f"a notice {message.function} could not be handled: {error}") from error
