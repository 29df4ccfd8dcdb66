"""Workers' addresses as bytes, and what must hold for one that another worker has sent."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gradwire.config import Limits
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.types import WorkerAddress, is_worker_name

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
