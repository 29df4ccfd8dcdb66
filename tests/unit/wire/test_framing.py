"""Frames: good ones under any chunking, and every class of bad bytes."""

from __future__ import annotations

import ctypes
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch

from fuzz import wire_samples as samples
from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, LimitExceeded
from gradwire.types import Trust
from gradwire.wire import tensors
from gradwire.wire.framing import DIRECT_READ_FROM, PREFIX_BYTES, Frame, FrameDecoder, encode
from gradwire.wire.messages import Call, Failure, Goodbye, Hello, Proof, Reply, SlotRef, TensorMeta, Welcome

FLOAT32 = tensors.DTYPES.index(torch.float32)
GOOD = samples.good_frames()
BAD = samples.bad_frames()


def make_decoder(**options: Any) -> FrameDecoder:
    options.setdefault("accept", samples.ALL_TYPES)
    return FrameDecoder(options.pop("limits", samples.LIMITS), **options)


def plain(frame: Frame) -> tuple[Any, bytes, list[bytes]]:
    return frame.message, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]


def big_call(num_bytes: int, *more: TensorMeta) -> tuple[bytes, Call]:
    metas = (TensorMeta(tensors.DTYPES.index(torch.uint8), (num_bytes,), num_bytes), *more)
    call = Call(1, "m:f", 0.0, 1, 3, metas)
    return encode(call, 3 + sum(meta.num_bytes for meta in metas)), call


@pytest.mark.parametrize("name", GOOD)
def test_good_frame_round_trip(name: str) -> None:
    decoder = make_decoder()
    (frame,) = decoder.feed(GOOD[name])
    payload = bytes(frame.body) + b"".join(frame.buffers)
    assert encode(frame.message, len(payload)) + payload == GOOD[name]
    assert decoder.is_idle


@pytest.mark.parametrize("size", [1, 2, 5, 23, 24, 25, 60, 200])
def test_chunks_of_any_size_give_the_same_frames(size: int) -> None:
    stream = b"".join(GOOD.values())
    expected = [plain(frame) for frame in make_decoder().feed(stream)]
    decoder = make_decoder()
    frames = [
        plain(frame) for start in range(0, len(stream), size) for frame in decoder.feed(stream[start : start + size])
    ]
    assert frames == expected
    assert len(frames) == len(GOOD)


def test_data_may_be_used_again_after_feed() -> None:
    data = bytearray(GOOD["call_tensor"])
    (frame,) = make_decoder().feed(memoryview(data))
    before = plain(frame)
    data[:] = bytes(len(data))
    assert plain(frame) == before


@pytest.mark.parametrize("name", BAD)
def test_bad_frame_is_refused(name: str) -> None:
    decoder = make_decoder()
    with pytest.raises(DecodeError):
        decoder.feed(BAD[name] + bytes(64))
    with pytest.raises(DecodeError, match="nothing after them"):
        decoder.feed(GOOD["welcome"])
    assert "dead" in repr(decoder)


@pytest.mark.parametrize("name", BAD)
def test_bad_frame_is_refused_byte_by_byte(name: str) -> None:
    decoder = make_decoder()
    data = BAD[name] + bytes(64)

    def trickle() -> None:
        for index in range(len(data)):
            decoder.feed(data[index : index + 1])

    with pytest.raises(DecodeError):
        trickle()


@pytest.mark.parametrize("name", ["call_tensor", "call_sparse", "hello", "failure"])
def test_cut_at_every_byte(name: str) -> None:
    data = GOOD[name]
    for cut in range(1, len(data)):
        decoder = make_decoder()
        assert decoder.feed(data[:cut]) == []
        assert not decoder.is_idle


def test_every_flipped_bit_of_prefix_and_header_is_found() -> None:
    data = GOOD["call_tensor"]
    (frame,) = make_decoder().feed(data)
    length = len(encode(frame.message, 0))
    for bit in range(8 * length):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DecodeError):
            make_decoder().feed(bytes(damaged) + bytes(1 << 17))


def test_message_type_must_be_accepted_now() -> None:
    decoder = make_decoder(accept=frozenset({Hello}))
    assert isinstance(decoder.feed(GOOD["hello"])[0].message, Hello)
    decoder.accept = frozenset({Call})
    with pytest.raises(DecodeError, match="Reply message"):
        decoder.feed(GOOD["reply_none"])


def test_refused_at_the_prefix_before_more_bytes_come() -> None:
    with pytest.raises(LimitExceeded):
        make_decoder().feed(BAD["01_payload_all_ones"][:PREFIX_BYTES])
    with pytest.raises(LimitExceeded):
        make_decoder().feed(BAD["01_header_length_2_31"][:PREFIX_BYTES])


def test_claimed_payload_costs_nothing_until_it_comes() -> None:
    head, _ = big_call(512 << 20)
    decoder = make_decoder(limits=Limits())
    tracemalloc.start()
    try:
        assert decoder.feed(head) == []
        assert decoder.writable() is None
        assert decoder.feed(b"abc") == []
        assert decoder.writable() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_large_segment_is_read_into_its_final_buffer() -> None:
    allocated: list[Any] = []

    def allocate(num_bytes: int) -> Any:
        allocated.append((ctypes.c_ubyte * num_bytes)())
        return allocated[-1]

    size = 4 * DIRECT_READ_FROM
    head, call = big_call(size, TensorMeta(0, (5,), 5), TensorMeta(0, (0,), 0))
    data = bytes(range(256)) * (size // 256)
    decoder = make_decoder(allocate=allocate)
    assert decoder.feed(head + b"xyz" + data[:100]) == []
    target = decoder.writable()
    assert target is not None
    assert len(target) == size - 100
    target[:1000] = data[100:1100]
    assert decoder.advance(1000) == []
    rest = decoder.writable()
    assert rest is not None
    rest[:] = data[1100:]
    assert decoder.advance(len(rest)) == []
    assert decoder.writable() is None
    (frame,) = decoder.feed(b"\x01\x00\x01\x00\x01")
    assert plain(frame) == (call, b"xyz", [data, b"\x01\x00\x01\x00\x01", b""])
    assert [len(buffer) for buffer in allocated] == [size, 5]
    assert frame.buffers[0] is allocated[0]


def test_frame_that_ends_with_a_large_segment_is_complete_on_advance() -> None:
    size = 2 * DIRECT_READ_FROM
    head, call = big_call(size)
    decoder = make_decoder()
    decoder.feed(head + b"xyz" + b"a")
    target = decoder.writable()
    assert target is not None
    target[:] = b"b" * (size - 1)
    (frame,) = decoder.advance(size - 1)
    assert plain(frame) == (call, b"xyz", [b"a" + b"b" * (size - 1)])
    assert decoder.is_idle


def test_small_rest_is_not_offered() -> None:
    head, _ = big_call(DIRECT_READ_FROM)
    decoder = make_decoder()
    decoder.feed(head + b"xyz" + b"a")
    assert decoder.writable() is None


def test_advance_needs_a_buffer_of_that_size() -> None:
    decoder = make_decoder()
    with pytest.raises(ValueError, match="advance"):
        decoder.advance(1)


@pytest.mark.parametrize("chunk", [1000, 70_000, 10**7])
@pytest.mark.parametrize("largest", [0, 150_000])
def test_a_frame_for_which_there_is_no_memory_is_skipped(chunk: int, largest: int) -> None:
    mapped: list[SlotRef] = []

    def allocate(num_bytes: int) -> Any:
        if num_bytes > largest:
            raise MemoryError
        return bytearray(num_bytes)

    def map_slot(slot: SlotRef, num_bytes: int) -> Any:
        mapped.append(slot)
        return bytearray(num_bytes)

    metas = (
        TensorMeta(0, (100_000,), 100_000),
        TensorMeta(FLOAT32, (3,), 12, slot=SlotRef(3, 4096)),
        TensorMeta(0, (200_000,), 200_000),
        TensorMeta(0, (5,), 5),
    )
    data = encode(Reply(1, 1, 7, metas), 300_012) + bytes(300_012) + encode(Reply(2, 1, 3), 3) + b"abc"
    decoder = make_decoder(allocate=allocate, map_slot=map_slot)
    frames = [frame for at in range(0, len(data), chunk) for frame in decoder.feed(data[at : at + chunk])]
    assert [bool(frame.shortage) for frame in frames] == [True, False]
    assert (frames[0].message.call_id, frames[1].body) == (1, b"abc")
    assert len(mapped) == 1  # what was lent can be given back
    assert decoder.is_idle


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_slots_are_mapped_and_take_no_payload(chunk: int) -> None:
    asked: list[tuple[SlotRef, int]] = []

    def map_slot(slot: SlotRef, num_bytes: int) -> Any:
        asked.append((slot, num_bytes))
        return bytearray(b"s" * num_bytes)

    slot = SlotRef(3, 4096)
    metas = (TensorMeta(0, (2,), 2), TensorMeta(FLOAT32, (3,), 12, slot=slot), TensorMeta(0, (1,), 1))
    data = encode(Reply(1, 1, 1, metas), 4) + b"xabc"
    decoder = make_decoder(map_slot=map_slot)
    frames = [frame for at in range(0, len(data), chunk) for frame in decoder.feed(data[at : at + chunk])]
    assert plain(frames[0])[1:] == (b"x", [b"ab", b"s" * 12, b"c"])
    assert asked == [(slot, 12)]


def test_slot_that_cannot_be_mapped_kills_the_connection() -> None:
    def map_slot(slot: SlotRef, num_bytes: int) -> Any:
        raise DecodeError(f"no slot {slot.slot_id}")

    decoder = make_decoder(map_slot=map_slot)
    with pytest.raises(DecodeError, match="no slot 3"):
        decoder.feed(encode(Reply(1, 1, 0, (TensorMeta(FLOAT32, (3,), 12, slot=SlotRef(3, 4096)),))))
    with pytest.raises(DecodeError, match="nothing after them"):
        decoder.advance(0)


def slotted(dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(tensors.DTYPES.index(dtype), (8,), 8 * dtype.itemsize, slot=SlotRef(3, 4096))


@pytest.mark.parametrize(
    ("trust", "refused"),
    [
        ("code", {torch.bool}),
        ("data", {dtype for dtype in tensors.DTYPES if not (dtype.is_floating_point or dtype.is_complex)}),
    ],
)
@pytest.mark.parametrize("chunk", [20, 10_000])
def test_what_is_checked_cannot_be_in_shared_memory(trust: Trust, refused: set[torch.dtype], chunk: int) -> None:
    def map_slot(slot: SlotRef, num_bytes: int) -> Any:
        return bytearray(num_bytes)

    found = set()
    for dtype in tensors.DTYPES:
        decoder = make_decoder(map_slot=map_slot, shared_dtypes=tensors.SHAREABLE_DTYPES[trust])
        data = encode(Reply(1, 1, 1, (slotted(dtype),)), 1) + b"x"
        try:
            for at in range(0, len(data), chunk):
                decoder.feed(data[at : at + chunk])
        except DecodeError:
            found.add(dtype)
    assert found == refused


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
@pytest.mark.parametrize("in_slot", [0, -1])
def test_no_part_of_a_sparse_tensor_can_be_in_shared_memory(layout: torch.layout, in_slot: int) -> None:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    meta, _ = tensors.describe(torch.eye(4).to_sparse(layout=layout, **blocks), Limits())
    assert tensors.validate(meta, Limits()) > 0
    parts = list(meta.parts)
    parts[in_slot] = msgspec.structs.replace(parts[in_slot], slot=SlotRef(3, 4096))
    with pytest.raises(DecodeError, match="shared memory"):
        tensors.validate(msgspec.structs.replace(meta, parts=tuple(parts)), Limits())


def test_handshake_messages_have_one_spelling() -> None:
    data = GOOD["proof"]
    header = data[PREFIX_BYTES:]
    assert header[:2] == b"\x92\xc4"
    longer = samples.raw_frame(b"\x92\xc5\x00\x20" + header[3:], number=3)
    with pytest.raises(DecodeError, match="canonical form"):
        make_decoder(accept=frozenset({Proof})).feed(longer)


def test_notes_that_are_no_plain_data_cannot_be_encoded() -> None:
    with pytest.raises(CannotSend, match="Call message"):
        encode(Call(1, "m:f", 0.0, 0, 0, (), {"n": object()}))


def test_two_frames_in_one_chunk_and_the_start_of_a_third() -> None:
    decoder = make_decoder()
    frames = decoder.feed(GOOD["welcome"] + GOOD["goodbye"] + GOOD["failure"][:30])
    assert [type(frame.message) for frame in frames] == [Welcome, Goodbye]
    assert "inside" in repr(decoder)
    assert isinstance(decoder.feed(GOOD["failure"][30:])[0].message, Failure)
    assert "idle" in repr(decoder)
