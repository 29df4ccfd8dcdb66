"""Frames to test the decoder with: good ones of every kind, and one bad one for each way of being bad.

The same bytes are the unit tests' examples, the starting points of the Hypothesis strategies and the seeds of the fuzzer
(``tests/fuzz/corpus``, written by ``fuzz_wire.py --write-corpus``).
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import torch

from gradwire.config import Limits
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.versions import Versions
from gradwire.wire import serialization, tensors
from gradwire.wire.framing import encode
from gradwire.wire.messages import (
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    Call,
    Challenge,
    ErrorInfo,
    Failure,
    Goodbye,
    Hello,
    Message,
    Proof,
    Refused,
    Reply,
    TensorMeta,
    Welcome,
)

LIMITS = Limits(frame_bytes=1 << 20, header_bytes=64 << 10)
ALL_TYPES: frozenset[type] = frozenset(MESSAGE_TYPES.values())
ADDRESS = WorkerAddress(WorkerInfo("w1", 1), 7, "host-a", ("unix:///run/gw/w1.sock", "tcp://127.0.0.1:4711"))
VERSIONS = Versions("3.11.9", "2.13.0+cpu", "0.1.0")
FLOAT32 = tensors.DTYPES.index(torch.float32)
INT64 = tensors.DTYPES.index(torch.int64)
BOOL = tensors.DTYPES.index(torch.bool)
COO, CSR = 1, 2


def checksum_of(number: int, header: bytes, payload_bytes: int) -> int:
    """What the prefix of a frame ends with."""
    return zlib.crc32(header, (number << 24 ^ payload_bytes ^ payload_bytes >> 32) & 0xFFFFFFFF)


def raw_frame(
    header: bytes,
    payload: bytes = b"",
    *,
    number: int = 16,
    magic: bytes = b"GW",
    version: int = PROTOCOL_VERSION,
    flags: int = 0,
    reserved: int = 0,
    header_bytes: int | None = None,
    payload_bytes: int | None = None,
) -> bytes:
    """A frame with any prefix and a right checksum."""
    size = len(header) if header_bytes is None else header_bytes
    claimed = len(payload) if payload_bytes is None else payload_bytes
    checksum = checksum_of(number, header, claimed)
    return (
        struct.pack("<2sBBHHIQI", magic, version, number, flags, reserved, size, claimed, checksum) + header + payload
    )


def raw_call(*fields: Any, payload: bytes = b"") -> bytes:
    """A Call with any fields."""
    return raw_frame(msgspec.msgpack.encode(fields), payload)


def call_with(meta: TensorMeta | tuple[Any, ...], payload: bytes = b"") -> bytes:
    """A call of one tensor with any metadata."""
    return raw_call(1, "m:f", 1.0, serialization.PLAIN, 0, (meta,), payload=payload)


def bytes_of(part: torch.Tensor) -> bytes:
    """A copy of a part's bytes."""
    view, _owner = tensors.as_bytes(part)  # the name keeps the memory alive
    return bytes(view)


def value_frame(value: Any, *, as_reply: bool = False) -> bytes:
    """A call or reply that carries a value."""
    packed = serialization.pack(value, "data", LIMITS)
    described = [tensors.describe(tensor, LIMITS) for tensor in packed.tensors]
    metas = tuple(meta for meta, _ in described)
    segments = [bytes_of(part) for _, parts in described for part in parts]
    payload = packed.body + b"".join(segments)
    message: Message
    if as_reply:
        message = Reply(5, packed.codec, len(packed.body), metas)
    else:
        message = Call(5, "m:f", 1.5, packed.codec, len(packed.body), metas, {"autograd": [1, 2]})
    return encode(message, len(payload)) + payload


def good_frames() -> dict[str, bytes]:
    """One valid frame of every message type and of every kind of payload."""
    csr = TensorMeta(FLOAT32, (2, 3), 0, 0, CSR, "", _csr_parts())
    info = ErrorInfo("builtins:ValueError", "bad", "Traceback", "w1", b"", ErrorInfo("m:E", "", "", "w2"))
    messages: dict[str, Message] = {
        "hello": Hello(b"n" * 32, ADDRESS, "w2", 0, "calls", "data", VERSIONS),
        "challenge": Challenge(b"n" * 32, ADDRESS, VERSIONS, b"p" * 32),
        "proof": Proof(b"p" * 32),
        "welcome": Welcome(),
        "refused": Refused("other version"),
        "failure": Failure(3, info),
        "goodbye": Goodbye("done"),
    }
    sparse = torch.sparse_coo_tensor([[0, 2], [1, 0]], [1.0, 2.0], (3, 2), check_invariants=True).coalesce()
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        **{name: encode(message) for name, message in messages.items()},
        "call_empty": value_frame(((), {})),
        "call_tensor": value_frame(((weight, 2.0), {"alpha": 1})),
        "call_twice": value_frame(((weight, weight, torch.ones(3, dtype=torch.bool)), {})),
        "call_tensors": value_frame(((weight, torch.ones(2)), {})),
        "call_sparse": value_frame(((sparse,), {})),
        "call_csr": call_csr(csr),
        "call_plain": value_frame((([1, (2, {3}), 2**80, 1j, slice(1), torch.float16], {"k": {1: None}}), {})),
        "call_meta": value_frame(((torch.empty(2, 2, device="meta"),), {})),
        "reply_tensor": value_frame(weight, as_reply=True),
        "reply_none": value_frame(None, as_reply=True),
        "reply_tensors": value_frame([weight.t(), torch.empty(0, 4), torch.tensor(1 + 2j).conj()], as_reply=True),
    }


def _csr_parts() -> tuple[TensorMeta, ...]:
    return TensorMeta(INT64, (3,), 24), TensorMeta(INT64, (2,), 16), TensorMeta(FLOAT32, (2,), 8)


def call_csr(meta: TensorMeta, crow: tuple[int, ...] = (0, 1, 2), col: tuple[int, ...] = (0, 2)) -> bytes:
    """A call with a CSR tensor of two values."""
    body = serialization.pack([torch.ones(1)], "data", LIMITS).body
    payload = body + struct.pack("<3q2q2f", *crow, *col, 1.0, 2.0)
    return encode(Call(5, "m:f", 1.5, serialization.PLAIN, len(body), (meta,)), len(payload)) + payload


def call_coo(indices: tuple[int, int], flags: int = 0, shape: tuple[int, ...] = (4,)) -> bytes:
    """A call with a COO tensor of two values, whose indices are given."""
    parts = (TensorMeta(INT64, (1, 2), 16), TensorMeta(FLOAT32, (2,), 8))
    meta = TensorMeta(FLOAT32, shape, 0, flags, COO, "", parts)
    body = serialization.pack([torch.ones(1)], "data", LIMITS).body
    payload = body + struct.pack("<2q2f", *indices, 1.0, 2.0)
    return encode(Call(5, "m:f", 1.5, serialization.PLAIN, len(body), (meta,)), len(payload)) + payload


def body_frame(body: bytes, codec: int = serialization.PLAIN) -> bytes:
    """A call with any body and no tensors."""
    return encode(Call(5, "m:f", 1.5, codec, len(body)), len(body)) + body


def bad_frames() -> dict[str, bytes]:
    """Frames that the decoder itself refuses; names begin with the class of bad input."""
    return {**_bad_lengths(), **_bad_framing(), **_bad_headers(), **_bad_numbers(), **_bad_metadata(), **_bad_errors()}


def _bad_lengths() -> dict[str, bytes]:
    call = msgspec.msgpack.encode((1, "m:f", 1.0, 0, 4))
    return {
        "01_header_length_zero": raw_frame(b"", header_bytes=0),
        "01_header_length_short": raw_frame(call, b"abcd", header_bytes=len(call) - 1),
        "01_header_length_long": raw_frame(call, b"abcd", header_bytes=len(call) + 1),
        "01_header_length_2_31": raw_frame(call, header_bytes=2**31),
        "01_header_length_all_ones": raw_frame(call, header_bytes=2**32 - 1),
        "01_payload_short": raw_frame(call, b"abc"),
        "01_payload_long": raw_frame(call, b"abcde"),
        "01_payload_2_31": raw_frame(call, payload_bytes=2**31),
        "01_payload_2_63": raw_frame(call, payload_bytes=2**63),
        "01_payload_all_ones": raw_frame(call, payload_bytes=2**64 - 1),
        "01_body_negative": raw_call(1, "m:f", 1.0, 0, -4),
        "01_body_2_63": raw_call(1, "m:f", 1.0, 0, 2**63),
    }


def _bad_framing() -> dict[str, bytes]:
    call = msgspec.msgpack.encode((1, "m:f", 1.0, 0, 0))
    return {
        "02_wrong_magic": raw_frame(call, magic=b"WG"),
        "02_tls_client_hello": bytes.fromhex("160301020001fc0303") + bytes(40),
        "02_http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "02_wrong_version": raw_frame(call, version=PROTOCOL_VERSION - 1),
        "02_unknown_type": raw_frame(call, number=99),
        "02_unknown_flags": raw_frame(call, flags=1),
        "02_reserved_bits": raw_frame(call, reserved=0x8000),
        "02_damaged_header": raw_frame(call)[:-1] + b"\x01",
        "02_trailing_header_bytes": raw_frame(call + b"\x00"),
        "02_payload_where_none": raw_frame(msgspec.msgpack.encode(("bye",)), b"x", number=19),
    }


def _bad_headers() -> dict[str, bytes]:
    address = {"info": ["w1", 1], "incarnation": 7, "host": "h", "uris": []}

    def hello(**changes: Any) -> bytes:
        fields = (1, b"n", {**address, **changes}, "w2", 0, "calls", "data")
        return raw_frame(msgspec.msgpack.encode(fields), number=1)

    return {
        "03_not_a_struct": raw_frame(msgspec.msgpack.encode("text")),
        "03_missing_field": raw_call(1, "m:f"),
        "03_extra_field": raw_call(1, "m:f", 1.0, 0, 0, (), {}, 8),
        "03_wrong_type": raw_call(1, 2, 1.0, 0, 0),
        "03_not_utf8": raw_frame(b"\x95\x01\xa2\xff\xfe\xcb" + bytes(8) + b"\x00\x00"),
        "03_name_with_nul": hello(info=["w\x001", 1]),
        "03_name_with_newline": hello(info=["w1\n", 1]),
        "03_name_empty": hello(info=["", 1]),
        "03_name_too_long": hello(info=["w" * 129, 1]),
        "03_name_too_long_in_utf8": hello(info=["é" * 65, 1]),
        "03_extra_map_field": hello(more=1),
        "03_unknown_lane": raw_frame(msgspec.msgpack.encode((1, b"n", address, "w2", 0, "other", "data")), number=1),
        "03_handshake_too_large": raw_frame(bytes(5000), number=5),
        "04_deep_notes": raw_frame(b"\x97\x01\xa3m:f\x01\x00\x00\x90\x81\xa1n" + b"\x91" * 20000 + b"\xc0"),
        "04_array32_of_nothing": raw_frame(b"\x97\x01\xa3m:f\x01\x00\x00\xdd\xff\xff\xff\xff"),
        "04_many_int_keys": raw_call(1, "m:f", 1.0, 0, 0, (), {"n": {i << 32: 0 for i in range(1000)}}),
        "04_many_notes": raw_call(1, "m:f", 1.0, 0, 0, (), {str(i): 0 for i in range(65)}),
        "04_many_tensors": raw_call(1, "m:f", 1.0, 0, 0, [(0, [0], 0)] * 4097),
        "09_name_1_mib": raw_frame(msgspec.msgpack.encode((1, "m:" + "f" * 60000, 1.0, 0, 0))),
        "09_name_control": raw_call(1, "m:f\x1b[2J", 1.0, 0, 0),
    }


def _bad_numbers() -> dict[str, bytes]:
    return {
        "05_bool_for_int": raw_call(True, "m:f", 1.0, 0, 0),
        "05_float_for_int": raw_call(1.0, "m:f", 1.0, 0, 0),
        "05_negative_id": raw_call(-1, "m:f", 1.0, 0, 0),
        "05_id_2_63": raw_call(2**63, "m:f", 1.0, 0, 0),
        "05_timeout_negative": raw_call(1, "m:f", -1.0, 0, 0),
        "05_timeout_nan": raw_call(1, "m:f", float("nan"), 0, 0),
        "05_timeout_inf": raw_call(1, "m:f", float("inf"), 0, 0),
        "05_unknown_codec": raw_call(1, "m:f", 1.0, 9, 0),
        "05_rank_too_large": raw_frame(
            msgspec.msgpack.encode((b"n", {"info": ["w", 65536], "incarnation": 0, "host": "", "uris": []}, b"")),
            number=2,
        ),
    }


def _bad_metadata() -> dict[str, bytes]:
    part = (INT64, (1, 2), 16)
    return {
        "06_dtype_unknown": call_with((99, (1,), 4)),
        "06_dtype_negative": call_with((-1, (1,), 4)),
        "06_size_negative": call_with((FLOAT32, (-1, -1), 4), b"abcd"),
        "06_size_2_63": call_with((FLOAT32, (2**63,), 4), b"abcd"),
        "06_product_overflow": call_with((FLOAT32, (2**32, 2**32), 0)),
        "06_product_overflow_beside_zero": call_with((FLOAT32, (0, 2**62, 2**62), 0)),
        "06_65_dims": call_with((FLOAT32, (1,) * 65, 4), b"abcd"),
        "06_bytes_short": call_with((FLOAT32, (2,), 4), b"abcd"),
        "06_bytes_negative": call_with((FLOAT32, (2,), -8)),
        "06_flags_unknown": call_with((FLOAT32, (1,), 4, 32), b"abcd"),
        "06_grad_on_integer": call_with((INT64, (1,), 8, 1), bytes(8)),
        "06_conj_on_real": call_with((FLOAT32, (1,), 4, 2), b"abcd"),
        "06_coalesced_dense": call_with((FLOAT32, (1,), 4, 8), b"abcd"),
        "06_layout_unknown": call_with((FLOAT32, (1,), 0, 0, 6)),
        "06_device_unknown": call_with((FLOAT32, (1,), 4, 0, 0, "warp:0"), b"abcd"),
        "06_parts_of_dense": call_with((FLOAT32, (1,), 4, 0, 0, "", (part,)), b"abcd"),
        "06_coo_without_parts": call_with((FLOAT32, (4,), 0, 0, COO)),
        "06_coo_with_own_bytes": call_with((FLOAT32, (4,), 4, 0, COO, "", (part, (FLOAT32, (2,), 8)))),
        "06_coo_float_indices": call_with((FLOAT32, (4,), 0, 0, COO, "", ((FLOAT32, (1, 2), 8), (FLOAT32, (2,), 8)))),
        "06_coo_values_of_other_dtype": call_with((FLOAT32, (4,), 0, 0, COO, "", (part, (INT64, (2,), 16)))),
        "06_coo_wrong_rank": call_with((FLOAT32, (4,), 0, 0, COO, "", ((INT64, (2,), 16), (FLOAT32, (2,), 8)))),
        "06_coo_wrong_count": call_with((FLOAT32, (4,), 0, 0, COO, "", (part, (FLOAT32, (3,), 12)))),
        "06_coo_too_many_dims": call_with((FLOAT32, (), 0, 0, COO, "", (part, (FLOAT32, (2,), 8)))),
        "06_coo_nested": call_with((FLOAT32, (4,), 0, 0, COO, "", ((FLOAT32, (4,), 0, 0, COO), (FLOAT32, (2,), 8)))),
        "06_csr_two_parts": call_with((FLOAT32, (2, 3), 0, 0, CSR, "", (part, (FLOAT32, (2,), 8)))),
        "06_csr_one_dim": call_with(TensorMeta(FLOAT32, (2,), 0, 0, CSR, "", _csr_parts())),
        "06_csr_index_dtypes": call_with(
            (FLOAT32, (2, 3), 0, 0, CSR, "", ((INT64, (3,), 24), (INT64 - 1, (2,), 8), (FLOAT32, (2,), 8)))
        ),
        "06_conj_on_sparse": call_with((FLOAT32 + 3, (4,), 0, 2, COO, "", (part, (FLOAT32 + 3, (2,), 16)))),
        "06_meta_with_bytes": call_with((FLOAT32, (1,), 4, 0, 0, "meta"), b"abcd"),
        "06_slot_on_sparse": call_with((FLOAT32, (4,), 0, 0, COO, "", (part, (FLOAT32, (2,), 8)), (0, 64, False))),
        "06_slot_negative": call_with((FLOAT32, (1,), 4, 0, 0, "", (), (-1, 64, False))),
        "06_slot_too_small": call_with((FLOAT32, (4,), 16, 0, 0, "", (), (0, 8, False))),
        "06_slot_without_memory": call_with((FLOAT32, (4,), 16, 0, 0, "", (), (0, 64, False))),
    }


def _bad_errors() -> dict[str, bytes]:
    info = ErrorInfo("m:E", "", "", "w")
    for _ in range(20):
        info = ErrorInfo("m:E", "", "", "w", b"", info)
    deep = b"\x92\x01" + b"\x96\xa0\xa0\xa0\xa0\xc4\x00" * 8000 + b"\xc0"
    return {
        "14_20_causes": encode(Failure(1, info)),
        "14_8000_causes": raw_frame(deep, number=18),
        "14_type_name_too_long": encode(Failure(1, ErrorInfo("m:" + "E" * 2000, "", "", "w"))),
        "14_header_beyond_limit": encode(Failure(1, ErrorInfo("m:E", "", "x" * 70000, "w"))),
    }


def bad_values() -> dict[str, bytes]:
    """Frames that decode, and whose values or tensors are then refused."""
    pack = msgspec.msgpack.encode
    ext = msgspec.msgpack.Ext
    equal_hashes = [ext(1, (i * (2**61 - 1)).to_bytes(16, "little")) for i in range(200)]
    return {
        "04_body_deep": body_frame(b"\x91" * 50000 + b"\xc0"),
        "04_body_beyond_depth": body_frame(b"\x91" * 40 + b"\xc0"),
        "04_body_array32_of_nothing": body_frame(b"\xdd\xff\xff\xff\xff"),
        "04_body_many_empty_strings": body_frame(b"\xdd\x00\x05\x00\x00" + b"\xa0" * 0x50000),
        "04_body_equal_hashes": body_frame(pack([ext(34, b""), *equal_hashes])),
        "04_body_many_int_keys": body_frame(pack({i << 32: 0 for i in range(1000)})),
        "04_body_int_keys": body_frame(pack({1: 2})),
        "05_body_range_step_zero": body_frame(pack([ext(37, b""), 0, 1, 0])),
        "05_body_range_of_floats": body_frame(pack([ext(37, b""), 0.0, 1.0, 1.0])),
        "05_body_size_of_text": body_frame(pack([ext(38, b""), "2"])),
        "06_coo_index_out_of_range": call_coo((0, 4)),
        "06_coo_index_negative": call_coo((-1, 0)),
        "06_coo_unsorted_but_coalesced": call_coo((2, 1), tensors.FLAG_COALESCED),
        "06_coo_repeated_but_coalesced": call_coo((1, 1), tensors.FLAG_COALESCED),
        "06_csr_col_out_of_range": call_csr(TensorMeta(FLOAT32, (2, 3), 0, 0, CSR, "", _csr_parts()), col=(0, 3)),
        "06_csr_crow_falling": call_csr(TensorMeta(FLOAT32, (2, 3), 0, 0, CSR, "", _csr_parts()), crow=(0, 2, 1)),
        "06_csr_other_rows": call_csr(TensorMeta(FLOAT32, (5, 3), 0, 0, CSR, "", _csr_parts())),
        "06_device_missing": body_and_tensor((FLOAT32, (1,), 4, 0, 0, "ipu:0")),
        "07_index_out_of_range": body_frame(pack(ext(0, b"\x07\x00\x00\x00"))),
        "07_never_used": raw_call(1, "m:f", 1.0, serialization.PLAIN, 1, ((FLOAT32, (1,), 4),), payload=b"\xc0abcd"),
        "07_tensor_of_empty": raw_call(1, "m:f", 1.0, serialization.EMPTY, 0, ((FLOAT32, (1,), 4),), payload=b"abcd"),
        "07_two_tensors_for_one": raw_call(
            1, "m:f", 1.0, serialization.TENSOR, 0, [(BOOL, (1,), 1)] * 2, payload=b"ab"
        ),
        "07_no_tensor_for_one": raw_call(1, "m:f", 1.0, serialization.TENSOR, 0),
        "07_body_of_tensors": body_frame(b"\xc0", serialization.TENSORS),
        "07_body_of_none": body_frame(b"\xc0", serialization.NONE),
        "08_unknown_extension": body_frame(pack(ext(99, b""))),
        "08_unknown_container": body_frame(pack([ext(99, b"")])),
        "08_timestamp": body_frame(b"\xd6\xff\x00\x00\x00\x00"),
        "08_unhashable_in_set": body_frame(pack([ext(34, b""), []])),
        "08_dict_without_value": body_frame(pack([ext(33, b""), 1])),
        "08_unknown_dtype": body_frame(pack(ext(4, b"float31"))),
        "08_unknown_device": body_frame(pack(ext(5, b"warp"))),
        "08_complex_cut": body_frame(pack(ext(2, b"1234"))),
        "08_not_utf8": body_frame(b"\xa2\xff\xfe"),
        "08_empty_body": body_frame(b""),
        "08_trailing": body_frame(b"\xc0\xc0"),
        "09_unregistered_class": body_frame(pack([ext(39, b"os:system"), "true"])),
        "13_pickle": body_frame(b"cos\nsystem\n(S'true'\ntR.", serialization.PICKLE),
        "13_pickle_as_plain": body_frame(b"\x80\x05cos\nsystem\n(S'true'\ntR."),
    }


def body_and_tensor(meta: tuple[Any, ...]) -> bytes:
    """A call that names its one tensor, of 4 bytes."""
    body = serialization.pack([torch.ones(1)], "data", LIMITS).body
    return raw_call(1, "m:f", 1.0, serialization.PLAIN, len(body), (meta,), payload=body + b"abcd")
