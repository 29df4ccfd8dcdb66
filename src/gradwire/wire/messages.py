"""The closed set of messages, and what they say about their payload.

A frame is `prefix | header | payload`. The header is one of the structs below, as a msgpack array; its type is a number
in the prefix. The payload is `body | segment | segment ...`: the body holds encoded arguments, and every dense part of a
tensor is one segment, in the order in which the metadata names them (depth first). A part whose metadata names a
shared-memory slot has no bytes in the payload.

Handshake, on every connection:

    caller                                   listener
      Hello(nonce, who, whom)        ->
                                     <-      Challenge(nonce, who, proof)    or Refused
      Proof(proof)                   ->
                                     <-      Welcome()                       or Refused

then Call/Reply/Failure. A connection carries the calls of the worker that opened it and the answers to them, never the
other way round, so that whoever waits for an answer may read the connection without meeting somebody else's request.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from gradwire.config import Limits
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.types import Trust, WorkerAddress, is_worker_name

if TYPE_CHECKING:
    Note = Any  # a struct that leaves, or what came for it
else:
    Note = msgspec.Raw  # left as it is until whoever knows its type reads it

N = TypeVar("N")

PROTOCOL_VERSION = 1

Lane = Literal["calls", "control"]
"""User functions travel on ``calls``; cancellation, membership and the layers above on ``control``."""


class SlotRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A place in the sender's shared memory, which the receiver has mapped."""

    slot_id: int
    capacity: int


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything about a tensor except its bytes.

    Attributes:
        dtype: Index into `gradwire.wire.tensors.DTYPES`.
        shape: Sizes; never negative.
        num_bytes: Bytes of this tensor's own segment (0 for sparse layouts and ``meta`` tensors).
        flags: Sum of the `FLAG_*` numbers in `gradwire.wire.tensors`.
        layout: Index into `gradwire.wire.tensors.LAYOUTS`.
        device: Where the tensor was and shall be; empty for the CPU.
        parts: Dense tensors that make up a sparse one.
        slot: Where the bytes are, if not in the payload.
    """

    dtype: int
    shape: tuple[int, ...]
    num_bytes: int
    flags: int = 0
    layout: int = 0
    device: str = ""
    parts: tuple[TensorMeta, ...] = ()
    slot: SlotRef | None = None


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An exception as data.

    Attributes:
        type_name: ``module:qualname`` of its class.
        message: ``str(exception)``.
        traceback: The remote traceback as text, cut to `Limits.error_text_bytes`.
        worker: Name of the worker where it was raised.
        details: Constructor arguments and attributes, as far as they are plain data (encoded), or empty.
        cause: The exception behind it.
    """

    type_name: str
    message: str
    traceback: str
    worker: str
    details: bytes = b""
    cause: ErrorInfo | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The caller introduces itself and says whom it means to reach."""

    version: int
    nonce: bytes
    sender: WorkerAddress
    to_name: str
    to_incarnation: int
    lane: Lane
    trust: Trust


class Challenge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The listener proves that it knows the cluster's token and asks the caller to do the same."""

    nonce: bytes
    sender: WorkerAddress
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The caller's proof."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The connection is open."""


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The connection is not opened, and why. Never holds a secret.

    Attributes:
        reason: For people.
        is_taken: Whether the reason is that another worker has the caller's name or rank.
    """

    reason: str
    is_taken: bool = False


class Call(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Run a function.

    Attributes:
        call_id: Unique on its connection.
        function: ``module:qualname`` or an exposed name; empty when the function is in the body.
        timeout_s: Time left, 0 for no deadline. Relative, because clocks differ.
        codec: How the body is encoded (`gradwire.wire.serialization`).
        body_bytes: Length of the body.
        tensors: One entry for each tensor in the arguments.
        notes: What interceptors attached, by their name; `read_note` checks what came.
    """

    call_id: int
    function: str
    timeout_s: float
    codec: int
    body_bytes: int
    tensors: tuple[TensorMeta, ...] = ()
    notes: dict[str, Note] = {}


class Reply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The value that a call returned."""

    call_id: int
    codec: int
    body_bytes: int
    tensors: tuple[TensorMeta, ...] = ()
    notes: dict[str, Note] = {}


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The exception that a call raised."""

    call_id: int
    error: ErrorInfo


class Goodbye(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender leaves in good order; the end of its connections is no failure."""

    reason: str


Message = Hello | Challenge | Proof | Welcome | Refused | Call | Reply | Failure | Goodbye

MESSAGE_TYPES: dict[int, type[Message]] = {
    1: Hello,
    2: Challenge,
    3: Proof,
    4: Welcome,
    5: Refused,
    16: Call,
    17: Reply,
    18: Failure,
    19: Goodbye,
}


_preparing = threading.Lock()  # held while msgspec works out how to check a type
_note_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def prepare(*kinds: Any) -> None:
    """Makes types known to msgspec before threads use them; `read_note` reads no others.

    msgspec works out how to check a type when it first meets it. Two threads that do so at the same moment crash the
    process, so every type that notes are checked against is prepared when its module is imported, and others by
    `read_plain`.
    """
    with _preparing:
        for kind in kinds:
            _note_decoders[kind] = msgspec.msgpack.Decoder(kind)


prepare(Any)


def read_plain(value: Any, kind: Any, problem: str) -> Any:
    """Plain data that was unpacked already, checked against a type that msgspec knows.

    Args:
        value: What came; any object that may travel, tensors included.
        kind: The type, with ranges and lengths.
        problem: How the error begins.

    Raises:
        DecodeError: It is not of that kind.
    """
    if kind not in _note_decoders:
        prepare(kind)
    try:
        return msgspec.convert(value, kind, builtin_types=(bytes,))  # or text would do for bytes, as base64
    except Exception as error:  # not only msgspec's own: it takes a tensor for a mapping, and asks for its keys
        raise DecodeError(f"{problem}: {error}") from error


def read_note(note: Note, kind: type[N]) -> N:
    """A note that arrived, checked; what is no longer as it came is returned as it is.

    Raises:
        DecodeError: It is not of that kind.
    """
    if type(note) is not msgspec.Raw:  # from this worker to itself, or read before
        found: N = note
        return found
    try:
        return _note_decoders[kind].decode(note)  # type: ignore[no-any-return]
    except RecursionError as error:
        raise DecodeError(f"a {kind.__name__} that is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # msgspec's own errors are ValueErrors, as are Unicode's
        raise DecodeError(f"not a valid {kind.__name__}: {error}") from error


_INT63_MAX: Final = 2**63 - 1
_MAX_RANK: Final = 65535
_MAX_URIS: Final = 16
_MAX_TEXT_BYTES: Final = 1024
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

encode_address: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(WorkerAddress).decode


def decode_address(raw: bytes, limits: Limits) -> WorkerAddress:
    """Read an address that another worker or a store gave.

    Raises:
        DecodeError: It is not an address that a worker can have.
    """
    try:
        address = _decode(raw)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise DecodeError(f"not a worker's address: {error}") from error
    check_address(address, limits)
    return address


def check_address(address: WorkerAddress, limits: Limits) -> None:
    """Refuse an address that no worker can have.

    Raises:
        DecodeError: A field is out of range.
        LimitExceeded: A field is too long.
    """
    name = address.info.name
    check_text(name, "a worker's name", limits.name_bytes)
    if not is_worker_name(name):
        raise DecodeError(f"{name!r} is not a worker's name")
    check_number(address.info.id, "rank", _MAX_RANK)
    check_number(address.incarnation, "incarnation")
    check_text(address.host, "a host's identity", _MAX_TEXT_BYTES)
    check_text(address.main, "a script's digest", _MAX_TEXT_BYTES)
    if len(address.uris) > _MAX_URIS:
        raise LimitExceeded(f"a worker with {len(address.uris)} addresses")
    for uri in address.uris:
        check_text(uri, "an address", _MAX_TEXT_BYTES)


def check_text(text: str, what: str, max_bytes: int) -> None:
    """Refuse a short text that is too long or has control characters.

    Raises:
        LimitExceeded: It is too long.
        DecodeError: It would do harm where it is printed.
    """
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        raise LimitExceeded(f"{what} of more than {max_bytes} bytes")
    if _UNPRINTABLE.search(text):
        raise DecodeError(f"{what} with control characters: {text!r}")


def check_number(number: int, what: str, largest: int = _INT63_MAX) -> None:
    """Refuse a number that is negative or too large.

    Raises:
        DecodeError: It is.
    """
    if not 0 <= number <= largest:
        raise DecodeError(f"{what} out of range: {number}")
