"""The seam between rpc and the ways bytes travel.

    Transport --listen()--> Listener --accept_nowait()--> StreamConnection
              --connect()-------------------------------> StreamConnection

A transport is chosen by the scheme of a URI (`registry`). All of them are byte streams under one `StreamConnection`
(`stream.py`); they differ in the `Channel`, which moves bytes: a plain socket, a Unix socket that also passes
descriptors of shared memory, or TLS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gradwire.transports.stream import StreamConnection

Buffer = Any
"""An object with the buffer protocol (Python 3.10 and 3.11 have no type for it)."""


class Channel(Protocol):
    """Moves bytes without ever blocking. One thread reads and one writes at a time; they may be different ones.

    Attributes:
        can_vanish: Whether the other side may be gone without an event on the descriptor; see `is_vanished`.
    """

    can_vanish: bool

    def fileno(self) -> int:
        """The descriptor to wait on."""

    def read_into(self, buffer: Buffer) -> int | None:
        """Bytes read; 0 at the end of the stream; None when nothing is there now.

        Raises:
            ConnectionLost: The connection broke.
        """

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        """Bytes written, which may be fewer than given; None when there is no room now.

        Raises:
            ConnectionLost: The connection broke.
        """

    def write_waits_for_reading(self) -> bool:
        """Whether the last `write` stopped because it must read first (a TLS handshake does that)."""

    def holds_unsent(self) -> bool:
        """Whether the last `write` took bytes that it has not reported as written (TLS cannot give a record back)."""

    def has_hidden_bytes(self) -> bool:
        """Whether bytes were taken from the descriptor that `read_into` has not returned yet (TLS decrypts ahead)."""

    def certified_names(self) -> frozenset[str] | None:
        """Worker names that the other side's certificate is good for; None where the channel has no certificates."""

    def is_vanished(self) -> bool:
        """Whether the other machine has not acknowledged anything for seconds, although it should.

        Must be asked now and then where `can_vanish`: no event tells of it.
        """

    def close(self) -> None:
        """Ends the connection. Idempotent; a thread that waits for the descriptor wakes up."""


class Listener(Protocol):
    """Accepts connections at one address."""

    uri: str

    def fileno(self) -> int:
        """The descriptor to wait on."""

    def accept_nowait(self) -> StreamConnection | None:
        """The next connection, or None when nobody waits or the caller was not acceptable.

        Raises:
            ResourceExhausted: This process has no descriptor left for it.
        """

    def close(self) -> None:
        """Stops listening and removes what the address left behind. Idempotent."""


class Transport(Protocol):
    """One way to reach other workers."""

    scheme: str

    def listen(self, worker: str) -> Listener:
        """Starts to listen for the worker of that name.

        Raises:
            ConfigurationError: The address must not or cannot be used.
        """

    def connect(self, uri: str, deadline: float) -> StreamConnection:
        """Opens a connection; `deadline` is in `time.monotonic` seconds.

        Raises:
            ConnectFailed: Nobody answered.
            AuthenticationFailed: Whoever answered is not of this cluster.
        """
