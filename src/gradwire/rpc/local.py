"""Calls of a worker to itself: no wire, but the same rules.

Arguments and results are captured by copying, the interceptors see every message, deadlines and cancellation work, and the
function runs in a service thread, never in the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import WorkerLost
from gradwire.rpc._calls import CallTable, PendingCall
from gradwire.rpc.incoming import Request
from gradwire.rpc.interceptors import Envelope
from gradwire.types import WorkerInfo
from gradwire.wire import failures, objects, tensors

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent
    from gradwire.rpc.serving import Server


class LocalSource:
    """Takes the place of an incoming connection for calls to oneself."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.calls = CallTable()
        self.requests: dict[int, Request] = {}

    @property
    def server(self) -> Server:
        """Who runs the calls."""
        return self._agent.server

    @property
    def info(self) -> WorkerInfo:
        """Who calls."""
        return self._agent.info

    def start(
        self, call: PendingCall, function: str, packed: objects.Packed, notes: dict[str, Any] | None = None
    ) -> None:
        """Queues a call to oneself."""
        found = self._agent.codec.outgoing_notes(Envelope("call", self.info, call.function), packed)
        captured = objects.Packed(packed.codec, packed.body, self._copies(packed.tensors), packed.trip)
        timeout_s = max(0.0, call.deadline - call.started) if call.deadline < float("inf") else 0.0
        request = Request(self, call.call_id, call.function, timeout_s, (function, captured))
        request.notes = {**found, **notes} if notes is not None else found
        self.requests[call.call_id] = request
        self.calls.add(call)
        if self._agent.is_closed:  # `close` may have looked for calls before this one was listed
            self.requests.pop(call.call_id, None)
            self.close()
            return
        self._agent.reactor.expect(call.deadline)
        self._agent.server.accept_elsewhere(request)

    def load(self, request: Request) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments."""
        codec = self._agent.codec
        (name, packed), request.frame = request.frame, None
        function = codec.find(name)
        values = codec.incoming(Envelope("call", self.info, request.function), request.notes, packed.tensors)
        return codec.split_call(function, codec.unpack(packed.codec, packed.body, values, self.info.name))

    def reply(self, request: Request, value: Any) -> None:
        """Ends the call with a copy of the result."""
        codec = self._agent.codec
        packed = codec.pack(value, self.info.name, shares_main=True)
        envelope = Envelope("reply", self.info, request.function)
        notes = codec.outgoing_notes(envelope, packed, request.notes)
        values = codec.incoming(envelope, notes, self._copies(packed.tensors))
        self._finish(request, codec.unpack(packed.codec, packed.body, values, self.info.name), None)

    def fail(self, request: Request, error: BaseException) -> None:
        """Ends the call with the error, in the form in which others would get it."""
        agent = self._agent
        info = failures.describe_exception(error, agent.info.name, agent.config.limits)
        self._finish(request, None, failures.rebuild_exception(info, agent.trust))

    def _finish(self, request: Request, value: Any, error: Exception | None) -> None:
        self.requests.pop(request.call_id, None)
        request.phase = "reply"
        call = self.calls.pop(request.call_id, None)
        if call is not None:
            self._agent.caller.finish_surely(call, value, error)

    def cancel(self, call_id: int) -> str:
        """Drops a call; returns how far it got."""
        request = self.requests.get(call_id)
        if request is None:
            return "reply"
        phase = self._agent.server.drop(request)
        if phase == "queue":
            self.requests.pop(call_id, None)
        return phase

    def _copies(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        for value in values:
            tensors.describe(value, self._agent.config.limits)  # refuses what could not travel to others either
        return [_copy(value) for value in values]

    def close(self) -> None:
        """Fails whatever is still under way."""
        name = self.info.name
        self._agent.caller.fail_all(
            self.calls, lambda call: WorkerLost(f"call of {call.function} failed: {name} has shut down", name)
        )


def _copy(value: torch.Tensor) -> torch.Tensor:
    copy = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_(value.requires_grad)
