"""Membership of a running cluster: the driver announces it, and workers accept it only from the driver.

    driver -- cluster.members(addresses, departures) --> every worker     whenever something has changed
           -- cluster.alive() ---------------------->                     now and then, where workers are watched

Each message has the whole truth, and what it says only ever grows: incarnations rise. So a message may be lost, come late or
twice, or overtake another one, and the driver repeats it until it is confirmed. Both are control operations, which a worker
serves even if all of its threads are busy.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gradwire import _interrupts
from gradwire.rpc.agent import Agent
from gradwire.rpc.functions import EncodedAddress
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.pending_calls import PendingCall
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import decode_address, encode_address

MEMBERS = "cluster.members"
ALIVE = "cluster.alive"

MAX_REASON_CHARS = 4096
_SLICE_S = 0.1  # between two looks whether this worker was closed

_Name = Annotated[str, Meta(max_length=1024)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class Departure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An incarnation that no longer belongs to the cluster, and with it all earlier ones."""

    name: _Name
    incarnation: _Number
    reason: _Reason
    is_final: bool  # whether the worker is no longer a member; otherwise it may be restarted


def follow_driver(agent: Agent, driver: str) -> None:
    """Register the operation with which the driver announces members that join and leave."""

    def on_members(_: WorkerInfo, addresses: list[bytes], departures: list[Departure]) -> InterruptibleFuture[Any]:
        decoded = [decode_address(raw, agent.config.limits) for raw in addresses]
        confirmed: InterruptibleFuture[Any] = InterruptibleFuture()
        # In another thread: it waits until the layers above have been told of an end, and this one reads from the driver.
        agent.reactor.run_soon(partial(_apply, agent, decoded, departures, confirmed))
        return confirmed

    server, kinds, purpose = agent.server, (list[EncodedAddress], list[Departure]), "change the list of workers"
    server.register_control(MEMBERS, on_members, *kinds, only_for=driver, purpose=purpose)
    server.register_control(ALIVE, lambda _: None, only_for=driver, purpose=purpose)


def _apply(
    agent: Agent, addresses: list[WorkerAddress], departures: list[Departure], confirmed: InterruptibleFuture[Any]
) -> None:
    try:
        for item in departures:
            if item.name != agent.info.name:
                agent.dismiss(item.name, item.incarnation, item.reason, is_final=item.is_final)
        for address in addresses:
            agent.welcome(address)
    except Exception as error:
        confirmed.set_exception(error)
    else:
        confirmed.set_result(None)


def tell_members(
    agent: Agent,
    to: Iterable[str],
    addresses: Sequence[WorkerAddress],
    timeout_s: float,
    departures: Sequence[Departure] = (),
) -> set[str]:
    """Announce the members and departures to workers in parallel; return those that confirmed it."""
    args = ([encode_address(address) for address in addresses], [msgspec.to_builtins(item) for item in departures])
    deadline = time.monotonic() + timeout_s
    answers: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()

    def on_done(name: str, call: PendingCall) -> None:
        answers.put((name, call.error))

    def ask(name: str) -> None:  # in a separate thread: connecting to a stopped worker takes long
        try:
            agent.control(name, MEMBERS, args, timeout_s, partial(on_done, name), None)
        except Exception as error:  # it is lost as well, or too busy to be connected to
            answers.put((name, error))

    waiting, confirmed = set(to), set()
    for name in waiting:
        agent.reactor.run_soon(partial(ask, name))
    while waiting and not agent.is_closed and (left_s := deadline - time.monotonic()) > 0:
        try:
            name, error = _interrupts.get(answers, min(left_s, _SLICE_S))
        except queue.Empty:
            continue
        waiting.discard(name)
        if error is None:
            confirmed.add(name)
    return confirmed
