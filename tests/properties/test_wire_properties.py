"""Properties of the wire: any value under any chunking, and any damage."""

from __future__ import annotations

import contextlib
import math
import random
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import fuzz_wire
from fuzz import wire_samples as samples
from gradwire.config import Limits
from gradwire.errors import DecodeError
from gradwire.wire import serialization, tensors
from gradwire.wire.exceptions import clean, describe_exception, rebuild_exception
from gradwire.wire.framing import Frame, FrameDecoder, encode
from gradwire.wire.messages import Call, Failure, TensorMeta
from unit.wire.test_tensors import can_be_copied

LIMITS = Limits()
GOOD = samples.good_frames()

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that some layouts and dtypes are young

hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
leaves = hashables | st.binary().map(bytearray) | st.sampled_from([torch.int8, torch.strided, torch.Size([1, 2])])
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=20,
)


@st.composite
def some_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any dtype, shape and kind of view, from random bytes."""
    dtype = draw(st.sampled_from(list(filter(can_be_copied, tensors.DTYPES))))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
    tensor = (
        (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
        if num_bytes
        else torch.empty(shape, dtype=dtype)
    )
    dims = draw(st.permutations(range(len(shape))))
    tensor = tensor.permute(dims)
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor.unsqueeze(0).expand(2, *tensor.shape) if draw(st.booleans()) else tensor


def to_frame(value: Any) -> bytes:
    packed = serialization.pack(value, "data", LIMITS)
    described = [tensors.describe(tensor, LIMITS) for tensor in packed.tensors]
    payload = packed.body + b"".join(samples.bytes_of(part) for _, parts in described for part in parts)
    metas = tuple(meta for meta, _ in described)
    return encode(Call(1, "m:f", 0.0, packed.codec, len(packed.body), metas), len(payload)) + payload


def from_frame(frame: Frame) -> Any:
    assert isinstance(frame.message, Call)
    buffers = iter(frame.buffers)
    arrived = [tensors.rebuild(meta, buffers) for meta in frame.message.tensors]
    return serialization.unpack(frame.message.codec, frame.body, arrived, "data", LIMITS)


def feed_in_chunks(stream: bytes, sizes: list[int]) -> list[Frame]:
    decoder = FrameDecoder(LIMITS, accept=samples.ALL_TYPES)
    frames, at, turn = [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        frames += decoder.feed(memoryview(stream)[at : at + size])
        at, turn = at + size, turn + 1
    assert decoder.is_idle
    return frames


@given(st.lists(values, min_size=1, max_size=3), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_values_survive_any_chunking(sent: list[Any], sizes: list[int]) -> None:
    frames = feed_in_chunks(b"".join(map(to_frame, sent)), sizes)
    arrived = [from_frame(frame) for frame in frames]
    assert arrived == sent
    assert [type(value) for value in arrived] == [type(value) for value in sent]


@given(st.lists(some_tensors(), max_size=4), st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_tensors_survive_any_chunking(sent: list[torch.Tensor], sizes: list[int]) -> None:
    (frame,) = feed_in_chunks(to_frame(sent), sizes)
    arrived = from_frame(frame)
    assert [(tensor.dtype, tensor.shape) for tensor in arrived] == [(tensor.dtype, tensor.shape) for tensor in sent]
    assert [samples.bytes_of(tensor) for tensor in arrived] == [samples.bytes_of(tensor) for tensor in sent]


@settings(max_examples=300)
@given(st.sampled_from(sorted(GOOD)), st.integers(0, 2**64))
def test_damaged_frames_are_refused_or_decode_to_themselves(name: str, seed: int) -> None:
    rng = random.Random(seed)
    data = fuzz_wire.change(GOOD[name], rng, list(GOOD.values()))
    outcome = fuzz_wire.run_one(data, rng)  # raises on anything but the allowed errors
    assert sum(outcome.values()) >= (1 if data else 0)


@given(
    st.binary(max_size=300),
    st.sampled_from([serialization.PLAIN, serialization.EMPTY, serialization.NONE, serialization.PICKLE, 9]),
)
def test_random_bodies_are_refused_or_are_values(body: bytes, codec: int) -> None:
    try:
        value = serialization.unpack(codec, body, [], "data", LIMITS)
    except DecodeError:
        return
    packed = serialization.pack(value, "data", LIMITS)
    assert repr(serialization.unpack(packed.codec, packed.body, [], "data", LIMITS)) == repr(value)


@given(
    st.builds(
        TensorMeta,
        dtype=st.integers(-1, 30),
        shape=st.lists(st.integers(-1, 5) | st.integers(-(2**63), 2**64 - 1), max_size=5).map(tuple),
        num_bytes=st.integers(-1, 64) | st.integers(-(2**63), 2**64 - 1),
        flags=st.integers(-1, 40),
        layout=st.integers(-1, 7),
        device=st.sampled_from(["", "", "meta", "cuda:0", "cpu", "?"]),
    )
)
def test_metadata_that_is_accepted_can_be_allocated(meta: TensorMeta) -> None:
    try:  # as it comes: ranges are part of the type
        meta = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=TensorMeta)
        num_bytes = tensors.validate(meta, LIMITS)
    except (DecodeError, ValueError, OverflowError):
        return
    assert num_bytes == meta.num_bytes
    assert 0 <= num_bytes < 2**63


@settings(max_examples=50)
@given(st.integers(0, 2**64), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_memory_is_bounded_by_what_was_sent(seed: int, payload_bytes: int, header_bytes: int) -> None:
    """Whatever lengths a peer claims, until bytes come nothing is held; and never more than the limits."""
    rng = random.Random(seed)
    header = rng.randbytes(rng.randrange(200))
    data = samples.raw_frame(header, payload_bytes=payload_bytes, header_bytes=rng.choice((header_bytes, len(header))))
    tracemalloc.start()
    try:
        decoder = FrameDecoder(LIMITS, accept=samples.ALL_TYPES)
        with contextlib.suppress(DecodeError):
            decoder.feed(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.text(), st.integers(0, 200))
def test_cleaned_text_is_printable_and_short(text: str, size: int) -> None:
    shown = clean(text, size)
    assert len(shown.encode()) <= size
    assert all(char in "\n\t" or char.isprintable() or ord(char) >= 0xA0 for char in shown)


@given(st.lists(st.text() | st.integers() | st.none(), max_size=3), st.text(max_size=20))
def test_exceptions_survive(args: list[Any], note: str) -> None:
    exc = ValueError(*args)
    exc.note = note  # type: ignore[attr-defined]
    info = describe_exception(exc, "w", LIMITS)
    (frame,) = FrameDecoder(LIMITS, accept=frozenset({Failure})).feed(encode(Failure(1, info)))
    assert isinstance(frame.message, Failure)
    arrived = rebuild_exception(frame.message.error, "data")
    assert type(arrived) is ValueError
    assert len(arrived.args) == len(args) or any(clean(str(arg)) != str(arg) for arg in args)
