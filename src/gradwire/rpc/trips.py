"""Things inside a message that must know where it goes: references to values, in the layers above.

A codec packs on behalf of one worker and for another. While it does, the trip says for whom, and keeps what was put on it;
whoever sends the message says so if it never left. While a message is unpacked, the trip says from whom it came.

    packing:    trips.departing() -> Trip(carrier, "w1")       None outside of messages: references cannot be pickled there
    unpacking:  trips.arriving()  -> Trip(carrier, "w0")
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

EVERYBODY = ""
"""Stands for the peer of a message to several workers at once."""


class Carrier(Protocol):
    """Whoever puts things on trips."""

    def on_not_sent(self, cargo: dict[Any, Any]) -> None:
        """The message with these will never arrive."""

    def on_arrived(self, cargo: dict[Any, Any]) -> None:
        """A message with these was unpacked."""


class Passage:
    """What the sender of a message knows of it.

    Attributes:
        call_id: The call that it is, if that has not ended: it may still have to leave, or be on its way. Else 0.
    """

    __slots__ = ("call_id",)

    def __init__(self) -> None:
        self.call_id = 0


class Trip:
    """One message on its way.

    Attributes:
        carrier: Of the worker that packs or unpacks; None if it has none.
        peer: Name of the other worker.
        cargo: What the carrier put on it, or took from it.
        passage: Outlives the trip, for whoever wonders what has become of the cargo.
    """

    __slots__ = ("cargo", "carrier", "passage", "peer")

    def __init__(self, carrier: Carrier | None, peer: str) -> None:
        self.carrier = carrier
        self.peer = peer
        self.cargo: dict[Any, Any] | None = None
        self.passage = Passage()

    def on_not_sent(self) -> None:
        """The message will never arrive."""
        cargo, self.cargo = self.cargo, None
        if cargo and self.carrier is not None:
            self.carrier.on_not_sent(cargo)

    def on_arrived(self) -> None:
        """The message was unpacked."""
        if self.cargo and self.carrier is not None:
            self.carrier.on_arrived(self.cargo)


class _Local(threading.local):
    departing: Trip | None = None  # of the message that the current thread packs
    arriving: Trip | None = None  # of the message that it unpacks


current = _Local()


def departing() -> Trip | None:
    """The trip of the message that the current thread packs, if it does."""
    return current.departing


def arriving() -> Trip | None:
    """The trip of the message that the current thread unpacks, if it does."""
    return current.arriving
