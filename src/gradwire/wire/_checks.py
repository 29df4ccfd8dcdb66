"""What a header must satisfy beyond its types, for each message.

Msgspec has checked the structure by the time these run: the number of fields and the type of each. Left are ranges,
lengths and characters, and for `Call` and `Reply` the sizes of the payload. Each check returns how many bytes the
payload must have.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from gradwire.config import Limits
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.wire.addresses import check_address, check_number, check_text
from gradwire.wire.failures import check_error
from gradwire.wire.messages import (
    Call,
    Challenge,
    Failure,
    Goodbye,
    Hello,
    Message,
    Proof,
    Refused,
    Reply,
    Welcome,
)
from gradwire.wire.tensors import validate

_INT63_MAX: Final = 2**63 - 1
_MAX_SECRET_BYTES: Final = 64
_MAX_NOTES: Final = 64
_NUM_CODECS: Final = 6


def _check_secret(secret: bytes, what: str) -> None:
    if len(secret) > _MAX_SECRET_BYTES:
        raise LimitExceeded(f"{what} of {len(secret)} bytes")


def _check_hello(message: Hello, limits: Limits) -> int:
    check_number(message.version, "version", 255)
    _check_secret(message.nonce, "a nonce")
    check_address(message.sender, limits)
    check_text(message.to_name, "a worker's name", limits.name_bytes)
    check_number(message.to_incarnation, "incarnation")
    return 0


def _check_challenge(message: Challenge, limits: Limits) -> int:
    _check_secret(message.nonce, "a nonce")
    _check_secret(message.proof, "a proof")
    check_address(message.sender, limits)
    return 0


def _check_proof(message: Proof, limits: Limits) -> int:
    _check_secret(message.proof, "a proof")
    return 0


def _check_nothing(message: Welcome, limits: Limits) -> int:
    return 0


def _check_reason(message: Refused | Goodbye, limits: Limits) -> int:
    if len(message.reason) > limits.error_text_bytes:
        raise LimitExceeded(f"a reason of {len(message.reason)} characters")
    return 0


def _check_payload(message: Call | Reply, limits: Limits) -> int:
    num_bytes = message.body_bytes
    if not (0 <= message.call_id <= _INT63_MAX and 0 <= num_bytes <= limits.frame_bytes):
        check_number(message.call_id, "call id")
        check_number(num_bytes, "body length", limits.frame_bytes)
    if not 0 <= message.codec < _NUM_CODECS:
        raise DecodeError(f"unknown codec {message.codec}")
    if message.notes:
        _check_notes(message.notes, limits)
    tensors = message.tensors
    if len(tensors) > limits.num_tensors:
        raise LimitExceeded(f"a message with {len(tensors)} tensors; at most {limits.num_tensors} are accepted")
    for meta in tensors:
        num_bytes += validate(meta, limits)
    return num_bytes


def _check_call(message: Call, limits: Limits) -> int:
    if not 0 <= message.timeout_s < inf:
        raise DecodeError(f"a timeout of {message.timeout_s} s")
    name = message.function
    if not (name.isascii() and name.isprintable() and len(name) <= limits.name_bytes):
        check_text(name, "a function's name", limits.name_bytes)
    return _check_payload(message, limits)


def _check_notes(notes: dict[str, Any], limits: Limits) -> None:
    if len(notes) > _MAX_NOTES:
        raise LimitExceeded(f"a message with {len(notes)} notes; at most {_MAX_NOTES} are accepted")
    for name in notes:
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= limits.name_bytes):
            check_text(name, "a note's name", limits.name_bytes)


def _check_failure(message: Failure, limits: Limits) -> int:
    check_number(message.call_id, "call id")
    check_error(message.error, limits)
    return 0


CHECKS: Final[dict[type[Message], Callable[[Any, Limits], int]]] = {
    Hello: _check_hello,
    Challenge: _check_challenge,
    Proof: _check_proof,
    Welcome: _check_nothing,
    Refused: _check_reason,
    Call: _check_call,
    Reply: _check_payload,
    Failure: _check_failure,
    Goodbye: _check_reason,
}
