"""The closed set of messages, with the ranges that their fields must be in.

A frame is `prefix | header | payload`. The header is one of the structs below, as a msgpack array; its type is a number
in the prefix. The payload is `body | segment | segment ...`: the body holds encoded arguments, and every dense part of a
tensor is one segment, in the order in which the metadata names them (depth first). A part whose metadata names a
shared-memory slot has no bytes in the payload.

Handshake, on every connection:

    caller                                   listener
      Hello(nonce, who, whom, ...)   ->
                                     <-      Challenge(nonce, who, ..., proof)    or Refused
      Proof(proof, ends)             ->
                                     <-      Welcome(ends)                        or Refused

then Call/Reply/Failure. A connection carries the calls of the worker that opened it and the answers to them, never the
other way round, so that a thread that waits for an answer may read the connection without meeting a request.

msgspec checks the ranges while it decodes. Limits that a worker can set are checked afterwards (`gradwire.wire.framing`).
"""

from __future__ import annotations

import re
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from gradwire.config import Limits
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.types import CONTROL_CHARS, Trust, WorkerAddress, is_worker_name
from gradwire.versions import Versions

if TYPE_CHECKING:
    Note = Any  # a struct in a message that is sent, or the raw bytes in one that arrived
else:
    Note = msgspec.Raw  # left as it is until the layer that knows its type calls `read_note`

N = TypeVar("N")

PROTOCOL_VERSION = 2

Lane = Literal["calls", "control"]
"""User functions travel on ``calls``; cancellation, membership and the layers above on ``control``."""

_INT63_MAX: Final = 2**63 - 1
_Number = Annotated[int, Meta(ge=0, le=_INT63_MAX)]
_Codec = Annotated[int, Meta(ge=0, le=5)]
_Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # neither infinite nor NaN
_Secret = Annotated[bytes, Meta(max_length=64)]
_Notes = Annotated[dict[str, Note], Meta(max_length=64)]


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class SlotRef(_Header, frozen=True):
    """A place in the sender's shared memory, which the receiver has mapped."""

    slot_id: _Number
    capacity: _Number


class TensorMeta(_Header, frozen=True):
    """Everything about a tensor except its bytes. Numbers are those of `gradwire.wire.tensors`."""

    dtype: _Number  # index into DTYPES
    shape: tuple[_Number, ...]
    num_bytes: _Number  # of this tensor's own segment (0 for sparse layouts and ``meta`` tensors)
    flags: Annotated[int, Meta(ge=0, le=31)] = 0  # sum of FLAG_...
    layout: Annotated[int, Meta(ge=0, le=5)] = 0  # index into LAYOUTS
    device: str = ""  # where the tensor was and shall be; empty for the CPU
    parts: tuple[TensorMeta, ...] = ()  # dense tensors that make up a sparse one
    slot: SlotRef | None = None  # where the bytes are, if not in the payload


class ErrorInfo(_Header, frozen=True):
    """An exception as data."""

    type_name: Annotated[str, Meta(max_length=1024)]  # ``module:qualname`` of its class
    message: str
    traceback: str  # cut to `Limits.error_text_bytes`
    worker: str  # where it was raised
    details: bytes = b""  # constructor arguments and attributes, as far as they are plain data (encoded)
    cause: ErrorInfo | None = None


class Hello(_Header, frozen=True):
    """The caller introduces itself and names the worker that it means to reach."""

    nonce: _Secret
    sender: WorkerAddress
    to_name: str
    to_incarnation: _Number
    lane: Lane
    trust: Trust
    versions: Versions


class Challenge(_Header, frozen=True):
    """The listener proves that it knows the cluster's token and asks the caller to do the same."""

    nonce: _Secret
    sender: WorkerAddress
    versions: Versions
    proof: _Secret


class Proof(_Header, frozen=True):
    proof: _Secret
    num_ends: _Number = 0  # how often the caller has found that its connections with the listener had ended


class Welcome(_Header, frozen=True):
    """The connection is open, if the caller has counted as many ends."""

    num_ends: _Number = 0  # as the listener has counted them


class Refused(_Header, frozen=True):
    """The connection is not opened, and why. Never holds a secret."""

    reason: str  # human-readable
    is_taken: bool = False  # whether the reason is that another worker has the caller's name or rank


class Call(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Run a function."""

    call_id: _Number  # unique on its connection
    function: str  # ``module:qualname`` or an exposed name; empty when the function is in the body
    timeout_s: _Seconds  # time left, 0 for no deadline; relative, because clocks differ
    codec: _Codec  # how the body is encoded (`gradwire.wire.serialization`)
    body_bytes: _Number
    tensors: tuple[TensorMeta, ...] = ()  # one entry for each tensor in the arguments
    notes: _Notes = {}  # what interceptors attached, by their name; `read_note` checks what came


class Reply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The value that a call returned."""

    call_id: _Number
    codec: _Codec
    body_bytes: _Number
    tensors: tuple[TensorMeta, ...] = ()
    notes: _Notes = {}


class Failure(_Header, frozen=True):
    """The exception that a call raised."""

    call_id: _Number
    error: ErrorInfo


class Goodbye(_Header, frozen=True):
    """The sender is shutting down cleanly; the end of its connections is not a failure."""

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


# Notes


_preparing = threading.Lock()  # held while msgspec works out how to check a type
_note_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def prepare(*kinds: Any) -> None:
    """Make types known to msgspec before threads use them; `read_note` reads no others.

    msgspec works out how to check a type when it first meets it. Two threads that do so at the same moment crash the
    process, so every type that notes are checked against is prepared when its module is imported, and others by
    `read_plain`.
    """
    with _preparing:
        for kind in kinds:
            _note_decoders[kind] = msgspec.msgpack.Decoder(kind)


prepare(Any)


def read_plain(value: Any, kind: Any, problem: str) -> Any:
    """Validate unpacked plain data against a type that msgspec supports, and return it as that type."""
    if kind not in _note_decoders:
        prepare(kind)
    try:
        return msgspec.convert(value, kind, builtin_types=(bytes,))  # or text would do for bytes, as base64
    except Exception as error:  # not only msgspec's own: it takes a tensor for a mapping, and asks for its keys
        raise DecodeError(f"{problem}: {error}") from error


def read_note(note: Note, kind: type[N]) -> N:
    """Decode a note that arrived; one that was never encoded, or is decoded already, is returned as it is."""
    if type(note) is not msgspec.Raw:  # from this worker to itself, or read before
        found: N = note
        return found
    try:
        return _note_decoders[kind].decode(note)  # type: ignore[no-any-return]
    except RecursionError as error:
        raise DecodeError(f"a {kind.__name__} is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # msgspec's own errors are ValueErrors, as are Unicode's
        raise DecodeError(f"not a valid {kind.__name__}: {error}") from error


# Addresses and short texts


_MAX_RANK: Final = 65535
_MAX_URIS: Final = 16
_MAX_TEXT_BYTES: Final = 1024
_UNPRINTABLE: Final = re.compile(f"[{CONTROL_CHARS}]")

encode_address: Final = msgspec.msgpack.Encoder().encode
_decode_address: Final = msgspec.msgpack.Decoder(WorkerAddress).decode


def decode_address(raw: bytes, limits: Limits) -> WorkerAddress:
    """Decode and validate an address received from another worker or a store."""
    try:
        address = _decode_address(raw)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise DecodeError(f"not a valid worker address: {error}") from error
    check_address(address, limits)
    return address


def check_address(address: WorkerAddress, limits: Limits) -> None:
    name = address.info.name
    check_text(name, "a worker's name", limits.name_bytes)
    if not is_worker_name(name):
        raise DecodeError(f"{name!r} is not a valid worker name")
    if not (0 <= address.info.id <= _MAX_RANK and 0 <= address.incarnation <= _INT63_MAX):
        raise DecodeError(f"rank {address.info.id} or incarnation {address.incarnation} of {name} is out of range")
    check_text(address.host, "a host's identity", _MAX_TEXT_BYTES)
    check_text(address.main, "a script's digest", _MAX_TEXT_BYTES)
    if len(address.uris) > _MAX_URIS:
        raise LimitExceeded(f"a worker has {len(address.uris)} addresses; at most {_MAX_URIS} are accepted")
    for uri in address.uris:
        check_text(uri, "an address", _MAX_TEXT_BYTES)


def check_text(text: str, what: str, max_bytes: int) -> None:
    """Raise if a short text is too long or contains control characters."""
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        raise LimitExceeded(f"{what} has more than {max_bytes} bytes")
    if _UNPRINTABLE.search(text):
        raise DecodeError(f"{what} contains control characters: {text!r}")
