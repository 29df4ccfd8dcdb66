"""Both sides of the handshake, as state machines: a message in, a message out.

Each side proves that it knows the cluster's token without sending it (HMAC over all messages so far, with a nonce from each
side, so that a recorded handshake cannot be replayed), and that it is the worker and the incarnation that the other side
expects. If the channel has certificates, the name must be one of those certified. Each side then checks with its directory
(`admit`) that name and rank belong together, and compares the versions.

Both also say how many ends of their connections they have noticed (`Membership.num_ends`).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gradwire.errors import AuthenticationFailed, IdentityTaken
from gradwire.transports.tls import check_identity
from gradwire.types import Trust, WorkerAddress
from gradwire.versions import Versions, find_conflict, own_versions
from gradwire.wire.exceptions import clean
from gradwire.wire.messages import Challenge, Goodbye, Hello, Lane, Message, Proof, Refused, Welcome

_NONCE_BYTES = 16
_MAX_REASON_BYTES = 2048
_encode = msgspec.msgpack.Encoder().encode

Admit = Callable[[WorkerAddress], None]
"""Called with a worker that has proved its identity; raises AuthenticationFailed if it is not admitted."""

NumEnds = Callable[[WorkerAddress], int]
"""Returns how many ends of the connections with a worker were noticed."""

LISTENER_ACCEPTS: frozenset[type[Message]] = frozenset({Hello, Proof, Goodbye})  # the last from a caller that gives up
CALLER_ACCEPTS: frozenset[type[Message]] = frozenset({Challenge, Welcome, Refused})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How a worker introduces itself."""

    address: WorkerAddress
    trust: Trust
    token: bytes
    versions: Versions = field(default_factory=own_versions)


def _proof(token: bytes, role: bytes, hello: Hello, listener: WorkerAddress, versions: Versions, nonce: bytes) -> bytes:
    """Cover everything that both sides have sent, so that a third party cannot alter identities or purpose."""
    return hmac.digest(token or b"-", _encode((role, hello, listener, versions, nonce)), "sha256")


def _check_versions(identity: Identity, other: WorkerAddress, versions: Versions) -> None:
    conflict = find_conflict(identity.address.info.name, identity.versions, other.info.name, versions, identity.trust)
    if conflict is not None:
        raise AuthenticationFailed(conflict)


class CallerHandshake:
    """The side that connects; `admit` is called with the listener once that has proved its identity.

    The incarnation 0 in `to`, the worker that it means to reach, means any.
    """

    def __init__(
        self,
        identity: Identity,
        to: WorkerAddress,
        lane: Lane,
        admit: Admit = lambda address: None,
        num_ends: NumEnds = lambda address: 0,
    ) -> None:
        self._identity = identity
        self._admit = admit
        self._num_ends = num_ends
        self._to = to
        self._hello = Hello(
            nonce=secrets.token_bytes(_NONCE_BYTES),
            sender=identity.address,
            to_name=to.info.name,
            to_incarnation=to.incarnation,
            lane=lane,
            trust=identity.trust,
            versions=identity.versions,
        )
        self.peer: WorkerAddress | None = None
        self.num_ends = 0  # as the listener has counted them

    def begin(self) -> Hello:
        """Return the first message."""
        return self._hello

    def on_message(self, message: Message, certified: frozenset[str] | None) -> Proof | None:
        """Return the answer to the listener's message; None when the connection is open.

        Raises:
            AuthenticationFailed: The listener refused, or is not the worker that was meant.
        """
        name = self._to.info.name
        if isinstance(message, Refused):
            kind = IdentityTaken if message.is_taken else AuthenticationFailed
            raise kind(f"{name} refused the connection: {clean(message.reason, _MAX_REASON_BYTES)}")
        if isinstance(message, Challenge) and self.peer is None:
            if message.sender.info.name != name:
                raise AuthenticationFailed(f"expected {name}, but {message.sender.info.name} answered")
            sent = (self._hello, message.sender, message.versions, message.nonce)
            if not hmac.compare_digest(message.proof, _proof(self._identity.token, b"listener", *sent)):
                raise AuthenticationFailed(
                    f"the process listening at {name}'s address does not have this cluster's token"
                )
            _check_versions(self._identity, message.sender, message.versions)
            if certified is not None:
                check_identity(certified, name)
            self._admit(message.sender)
            self.peer = message.sender
            return Proof(_proof(self._identity.token, b"caller", *sent), self._num_ends(self.peer))
        if isinstance(message, Welcome) and self.peer is not None:
            self.num_ends = message.num_ends
            return None
        raise AuthenticationFailed(f"{name} sent {type(message).__name__} out of order in the handshake")


class ListenerHandshake:
    """The side that was connected to; `admit` is called with the caller once that has proved its identity."""

    def __init__(self, identity: Identity, admit: Admit) -> None:
        self._identity = identity
        self._admit = admit
        self._hello: Hello | None = None
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.is_open = False
        self.num_ends = 0  # as the caller has counted them

    @property
    def hello(self) -> Hello:
        """How the caller introduced itself; trust it once `is_open`."""
        assert self._hello is not None
        return self._hello

    def on_message(self, message: Message, certified: frozenset[str] | None) -> Challenge | Welcome:
        """Return the reply to the caller's message; `is_open` is set after the last one.

        Raises:
            AuthenticationFailed: The caller is refused; send `Refused` with this text and close.
        """
        if isinstance(message, Hello) and self._hello is None:
            self._check(message, certified)
            self._hello = message
            return Challenge(self._nonce, self._identity.address, self._identity.versions, self._prove(b"listener"))
        if isinstance(message, Proof) and self._hello is not None and not self.is_open:
            if not hmac.compare_digest(message.proof, self._prove(b"caller")):
                raise AuthenticationFailed(
                    "wrong token: the caller belongs to another cluster, or to another run of this one; start all workers "
                    "with the same init_method"
                )
            self._admit(self._hello.sender)
            self.is_open, self.num_ends = True, message.num_ends
            return Welcome()  # to be sent with the listener's own number, once that is not the lower one
        raise AuthenticationFailed(f"{type(message).__name__} out of order in the handshake")

    def _prove(self, role: bytes) -> bytes:
        me = self._identity
        return _proof(me.token, role, self.hello, me.address, me.versions, self._nonce)

    def _check(self, hello: Hello, certified: frozenset[str] | None) -> None:
        me, sender = self._identity.address, hello.sender
        if len(hello.nonce) != _NONCE_BYTES:
            raise AuthenticationFailed("malformed nonce")
        if certified is not None:
            check_identity(certified, sender.info.name)
        if sender.info.name == me.info.name:
            raise IdentityTaken(f"this worker is also named {me.info.name}; every worker needs its own name")
        if hello.to_name != me.info.name:
            raise AuthenticationFailed(f"this is {me.info.name}, not {hello.to_name}")
        if hello.to_incarnation not in (0, me.incarnation):
            raise AuthenticationFailed(f"{me.info.name} has restarted; this is a different incarnation")
        if hello.trust != self._identity.trust:
            raise AuthenticationFailed(
                f'peer has trust="{hello.trust}", this worker trust="{self._identity.trust}" (peer: {sender.info.name}, '
                f"this worker: {me.info.name}); start all workers with the same trust"
            )
        _check_versions(self._identity, sender, hello.versions)
