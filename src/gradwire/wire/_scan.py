"""A look at msgpack before it is decoded, where decoding itself could hurt.

Decoding is bounded by nothing but the length of the bytes: a byte can become an empty list of 64 bytes, and maps may
have integer keys that all share one hash, which takes quadratic time inside of C. Neither matters in short bodies, so
the common message is never scanned.
"""

from __future__ import annotations

import sys
from typing import Final

from gradwire.config import KIB, Limits
from gradwire.errors import DecodeError, LimitExceeded

_BYTES_PER_ITEM: Final = 64  # what the cheapest container costs in memory, for one byte on the wire
_FEWEST_ITEMS: Final = 16 * KIB
_SAFE_RECURSION: Final = 10_000
SCAN_FROM: Final = 8 * KIB
"""Shorter bytes need no look: what is wrong with them is found cheaply by decoding them."""

# For every first byte: (bytes of a length that follows, bytes besides it, what it is).
_VALUE, _ARRAY, _MAP, _STRING = range(4)


def _kinds() -> tuple[tuple[int, int, int], ...]:
    table = [(0, 0, _VALUE)] * 256
    for first in range(0x80, 0x90):
        table[first] = (0, first & 15, _MAP)
    for first in range(0x90, 0xA0):
        table[first] = (0, first & 15, _ARRAY)
    for first in range(0xA0, 0xC0):
        table[first] = (0, first & 31, _STRING)
    for step in range(3):  # lengths of 1, 2 and 4 bytes
        table[0xC4 + step] = (1 << step, 0, _VALUE)  # bytes
        table[0xC7 + step] = (1 << step, 1, _VALUE)  # extension with its code
        table[0xD9 + step] = (1 << step, 0, _STRING)
    for first, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8), (0xD0, 1), (0xD1, 2)):
        table[first] = (0, size, _VALUE)
    for first, size in ((0xD2, 4), (0xD3, 8), (0xD4, 2), (0xD5, 3), (0xD6, 5), (0xD7, 9), (0xD8, 17)):
        table[first] = (0, size, _VALUE)
    table[0xDC], table[0xDD], table[0xDE], table[0xDF] = (2, 0, _ARRAY), (4, 0, _ARRAY), (2, 0, _MAP), (4, 0, _MAP)
    return tuple(table)


_KINDS: Final = _kinds()


def check_structure(data: bytes | bytearray | memoryview, limits: Limits) -> None:
    """Refuse msgpack that is harmless in bytes and harmful in memory or time.

    Raises:
        LimitExceeded: It has more than `Limits.frame_bytes` / 64 items, or is nested too deeply to decode safely.
        DecodeError: It has a map whose keys are not text, or is cut.
    """
    if len(data) <= SCAN_FROM:
        return
    most = max(limits.frame_bytes // _BYTES_PER_ITEM, _FEWEST_ITEMS)
    raw = bytes(data)
    if len(raw) > most or b"\xde" in raw or b"\xdf" in raw or sys.getrecursionlimit() > _SAFE_RECURSION:
        _scan(raw, most)


def _scan(raw: bytes, most: int) -> None:
    offset, num_items, end = 0, 1, len(raw)
    stack: list[int] = []  # of every open container: items to come, negative for a map
    while True:
        if offset >= end:
            raise DecodeError("arguments that end too early")
        length_bytes, extra, kind = _KINDS[raw[offset]]
        if stack and stack[-1] < 0 and stack[-1] % 2 == 0 and kind != _STRING:
            raise DecodeError("a map whose keys are not text")
        body_at = offset + 1 + length_bytes
        count = extra + int.from_bytes(raw[offset + 1 : body_at], "big") if length_bytes else extra
        if stack:
            stack[-1] += 1 if stack[-1] < 0 else -1
        if kind in (_ARRAY, _MAP):
            offset = body_at
            num_items += count * kind
            stack.append(count if kind == _ARRAY else -2 * count)
            if num_items > most or len(stack) > _SAFE_RECURSION:
                raise LimitExceeded(f"arguments of more than {most} items, or nested more than {_SAFE_RECURSION} deep")
        else:
            offset = body_at + count
        while stack and stack[-1] == 0:
            stack.pop()
        if not stack:
            return
