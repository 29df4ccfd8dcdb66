"""Messages without an answer, on the control lane: what the layers above tell other workers.

    sender   Notices.send   --- Call with id 0, a note and tensors --->   Notices.received   receiver

A notice arrives, or the control lane ends, and with it the worker as far as its peers are concerned. So whoever sends one
needs no answer to know that it was heard: it will be told of the worker's end otherwise (`Agent.on_worker_lost`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import ConnectionClosed, ConnectionLost, NotExposed, NotInitialized, RpcTimeout
from gradwire.types import WorkerInfo
from gradwire.wire import objects
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_log = logging.getLogger("gradwire")

NOTICE_ID = 0
"""Calls that want an answer have higher ids."""

_NOTE = "notice"

Handler = Callable[[WorkerInfo, Any, list[torch.Tensor]], None]


class Notices:
    """Sends and receives one worker's notices."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._handlers: dict[str, Handler] = {}

    def register(self, name: str, handler: Handler) -> None:
        """Calls ``handler(sender, note, tensors)`` for every notice of that name, in the thread that read it.

        What it raises is logged: nobody waits for it.
        """
        self._handlers[f"~{name}"] = handler

    def send(
        self,
        to: str,
        name: str,
        note: Any,
        tensors: Sequence[torch.Tensor] = (),
        deadline: float | None = None,
        *,
        hold_back: bool = False,
    ) -> None:
        """Sends a notice; tensors are captured.

        Args:
            to: Name of the worker, not of this one.
            name: What it is about.
            note: Plain data or a msgspec struct.
            tensors: Travel beside it.
            deadline: In `time.monotonic` seconds.
            hold_back: Another notice to the same worker follows shortly; a small one may wait and leave with it.

        Raises:
            WorkerLost: The worker is gone.
            RpcTimeout: No room on the connection before the deadline.
            CannotSend: A tensor cannot travel.
        """
        limit = time.monotonic() + self._agent.config.rpc_timeout_s if deadline is None else deadline
        message = Call(NOTICE_ID, f"~{name}", 0.0, objects.EMPTY, 0, (), {_NOTE: note})
        peer = self._agent.caller.peer(to)
        while True:
            lane = peer.lanes.get("control") or peer.lane("control", limit)
            try:
                lane.connection.send(message, b"", tensors, limit, hold_back)
                return
            except ConnectionClosed as error:  # cut off here, by Ctrl-C: the other side has not got all of it
                lane.reader.end(error)
                peer.forget_lane(lane)
                if self._agent.is_closed:
                    raise NotInitialized(f"worker {self._agent.info.name} has shut down") from error
            except ConnectionLost as error:
                lane.reader.end(error)
                peer.forget_lane(lane)
                raise peer.lost(str(error)) from error
            except TimeoutError as error:
                text = f"worker {to} does not read: no room for a message ({name}) in time (phase: send)"
                raise RpcTimeout(text, to, "send") from error

    def received(self, sender: WorkerInfo, frame: Frame) -> None:
        """Handles a notice that arrived."""
        message = frame.message
        assert isinstance(message, Call)
        try:
            handler = self._handlers.get(message.function)
            if handler is None:
                raise NotExposed(f"nothing here takes notices {message.function!r}")
            values = self._agent.codec.rebuild_tensors(frame, message)
            handler(sender, message.notes.get(_NOTE), values)
        except Exception:
            _log.exception("%s: a notice %s from %s failed", self._agent.info.name, message.function, sender.name)
