"""Connections made by hand: what a worker that was taken over can send."""

from __future__ import annotations

import time
from typing import Any

from gradwire.config import Limits
from gradwire.rpc import Agent
from gradwire.transports.handshake import CallerHandshake, Identity
from gradwire.transports.stream import StreamConnection
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.versions import Versions, own_versions
from gradwire.wire import serialization as objects
from gradwire.wire.messages import Call, Challenge, Failure, Goodbye, Message, Refused, Reply, Welcome


def connect(
    agent: Agent,
    lane: Any = "calls",
    *,
    token: bytes | None = None,
    name: str = "mallory",
    rank: int = 9,
    incarnation: int = 1,
    versions: Versions | None = None,
) -> StreamConnection:
    """A connection past its handshake.

    Raises:
        AuthenticationFailed: The agent does not let it in.
    """
    sender = WorkerAddress(WorkerInfo(name, rank), incarnation, "elsewhere", ())
    identity = Identity(
        address=sender,
        trust=agent.trust,
        token=agent.config.token if token is None else token,
        versions=versions or own_versions(),
    )
    uri = agent.address.uris[0]
    connection = agent.transports[uri.partition(":")[0]].connect(uri, time.monotonic() + 5)
    connection.decoder.accept = frozenset({Challenge, Welcome, Refused})
    try:
        handshake = CallerHandshake(identity, agent.address, lane)
        answer: Message | None = handshake.begin()
        while answer is not None:
            connection.send(answer, deadline=time.monotonic() + 5)
            answer = handshake.on_message(connection.receive(time.monotonic() + 5).message, None)
    except BaseException:
        connection.close()
        raise
    connection.decoder.accept = frozenset({Reply, Failure, Goodbye})
    return connection


def send_control(connection: StreamConnection, call_id: int, function: str, *args: Any, **notes: Any) -> None:
    """Send a control operation with any plain data and tensors."""
    packed = objects.pack(args, "data", Limits())
    message = Call(call_id, function, 0.0, packed.codec, len(packed.body), notes=notes)
    connection.send(message, packed.body, packed.tensors, time.monotonic() + 20)


def receive(connection: StreamConnection) -> Message:
    """The next message that comes back."""
    return connection.receive(time.monotonic() + 20).message
