"""Who belongs to a cluster while it runs: the driver says so, and the workers take it from the driver alone.

    driver -- cluster.members(addresses) --> every worker     somebody is new, or was started again
    driver -- cluster.left(name, reason) --> every worker     a worker is gone, for good or until it is started again

Both are control operations, so that a worker whose threads are all busy hears of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta

from gradwire.errors import AuthenticationFailed
from gradwire.rpc.agent import Agent
from gradwire.rpc.functions import EncodedAddress
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import decode_address, encode_address

MEMBERS = "cluster.members"
LEFT = "cluster.left"

_Name = Annotated[str, Meta(max_length=1024)]
_Reason = Annotated[str, Meta(max_length=4096)]


def follow_driver(agent: Agent, driver: str) -> None:
    """Let the driver tell this worker who joins and who leaves."""

    def check(source: WorkerInfo) -> None:
        if source.name != driver:
            raise AuthenticationFailed(f"only {driver} may say who belongs to this cluster, not {source.name}")

    def on_members(source: WorkerInfo, addresses: list[bytes]) -> None:
        check(source)
        for raw in addresses:
            agent.welcome(decode_address(raw, agent.config.limits))

    def on_left(source: WorkerInfo, name: str, reason: str) -> None:
        check(source)
        agent.forget(name, reason)

    agent.server.register_control(MEMBERS, on_members, list[EncodedAddress])
    agent.server.register_control(LEFT, on_left, _Name, _Reason)


def tell_members(agent: Agent, to: Iterable[str], addresses: Sequence[WorkerAddress], timeout_s: float) -> set[str]:
    """Tell workers the addresses of members that are new or were started again; return those that have confirmed it."""
    return set(agent.ask_all(to, MEMBERS, ([encode_address(address) for address in addresses],), timeout_s, None))


def tell_left(agent: Agent, to: Iterable[str], name: str, reason: str, timeout_s: float) -> set[str]:
    """Tell workers that one is gone; return those that have confirmed it."""
    return set(agent.ask_all(to, LEFT, (name, reason), timeout_s, None))
