"""Feeds changed frames to the decoder until the time is over.

    python tests/fuzz/fuzz_wire.py --seconds 60 [--seed N] [--replay FILE]

Every input starts as a file of ``tests/fuzz/corpus`` and is changed a few times: bits, lengths, cuts, joins, and checksums
made right again, so that what lies behind the checksum is reached too. It is then fed in random chunks, its tensors are
rebuilt and its value is decoded with ``trust="data"``. Allowed outcomes: frames, `DecodeError` and `CannotSend`. A frame
that decodes is encoded and decoded again and has to be the same. Memory may not rise above a bound. A failing input is
saved and its path printed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import struct
import sys
import time
import traceback
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

if __package__ in (None, ""):
    import wire_samples as samples
else:
    from fuzz import wire_samples as samples

from gradwire.autograd.messages import AbortPass, PropagateGradients, RecordedCall
from gradwire.errors import CannotSend, DecodeError
from gradwire.wire import serialization, tensors
from gradwire.wire.exceptions import rebuild_exception
from gradwire.wire.framing import PREFIX_BYTES, Frame, FrameDecoder, encode
from gradwire.wire.messages import Call, Failure, Reply, read_note

CORPUS = Path(__file__).parent / "corpus"
PEAK_BYTES = 8 * samples.LIMITS.frame_bytes
VALUES: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        3,
        4,
        8,
        16,
        31,
        32,
        64,
        65,
        255,
        2**16,
        2**31,
        2**32,
        2**48 - 1,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -(2**63),
    ),
    *(
        None,
        True,
        0.0,
        1.5,
        -1.0,
        float("nan"),
        float("inf"),
        "",
        "x",
        "w" * 200,
        "a\x00b",
        "\n",
        "meta",
        "cuda:0",
        "cpu",
    ),
    *(b"", b"x" * 100, [], [1], [[]], [2, 2], {}, {"a": 1}, {1: 2}, [11, [1], 4], [8, [1, 2], 16], [0, 64, False]),
)
INTERESTING = (0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC7, 0xD4, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)


def write_corpus(folder: Path) -> None:
    """Write the samples as seeds."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.bin"):
        old.unlink()
    for name, data in seeds().items():
        (folder / f"{name}.bin").write_bytes(data)


def seeds() -> dict[str, bytes]:
    """Every sample that is small enough to be kept in the repository."""
    good = {f"00_{name}": data for name, data in samples.good_frames().items()}
    found = {**good, **samples.bad_frames(), **{f"{name}_value": data for name, data in samples.bad_values().items()}}
    return {name: data for name, data in found.items() if len(data) <= 16 << 10}


def read_corpus(folder: Path) -> list[bytes]:
    """The seeds, in a fixed order."""
    return [path.read_bytes() for path in sorted(folder.glob("*.bin"))]


def repair_checksum(data: bytearray) -> None:
    """Make length and checksum of the first frame fit its bytes, so that its header is looked at."""
    if len(data) < PREFIX_BYTES:
        return
    header_bytes = min(struct.unpack_from("<I", data, 8)[0], len(data) - PREFIX_BYTES)
    struct.pack_into("<I", data, 8, header_bytes)
    header = data[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
    (payload_bytes,) = struct.unpack_from("<Q", data, 12)
    struct.pack_into("<I", data, 20, samples.checksum_of(data[3], bytes(header), payload_bytes))


def change(data: bytes, rng: random.Random, corpus: list[bytes]) -> bytes:
    """A few random changes: of bytes anywhere, of fields of the header, or of bytes of the payload in place."""
    kind = rng.random()
    if kind < 0.35:
        return _change_fields(data, rng)
    result = bytearray(data)
    if kind < 0.6:
        start = PREFIX_BYTES + struct.unpack_from("<I", data, 8)[0] if len(data) > PREFIX_BYTES else 0
        for _ in range(rng.choice((1, 2, 4)) if start < len(data) else 0):
            result[rng.randrange(start, len(data))] = rng.choice((*INTERESTING, rng.randrange(256)))
        return bytes(result)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        _change_once(result, rng, corpus)
    if rng.random() < 0.8:
        repair_checksum(result)
    return bytes(result)


def _change_fields(data: bytes, rng: random.Random) -> bytes:
    """Replace one value somewhere in the header by another one, and keep the frame around it right."""
    try:
        size = struct.unpack_from("<I", data, 8)[0]
        fields = msgspec.msgpack.decode(data[PREFIX_BYTES : PREFIX_BYTES + size])
        place: Any = [fields]
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], list | dict) or not place[key] or rng.random() < 0.1:
                break
            place = place[key]
        place[key] = rng.choice(VALUES)
        payload = data[PREFIX_BYTES + size :]
        return samples.raw_frame(msgspec.msgpack.encode(fields), payload, number=data[3])
    except (struct.error, msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError):
        return data[: rng.randrange(len(data) + 1)]


def _change_once(data: bytearray, rng: random.Random, corpus: list[bytes]) -> None:
    at = rng.randrange(len(data)) if data else 0
    kind = rng.randrange(8)
    if kind == 0 and data:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at] = rng.choice(INTERESTING)
    elif kind == 2:
        del data[at : at + rng.randrange(1, 9)]
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 4 and data:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice((0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, rng.randrange(2 ** (8 * size))))
        data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    elif kind == 5:
        other = rng.choice(corpus)
        start = rng.randrange(len(other))
        data[at : at + 16] = other[start : start + 16]
    elif kind == 6:
        data += rng.choice(corpus)
    else:
        del data[at:]


def run_one(data: bytes, rng: random.Random) -> Counter[str]:
    """Feed one input and follow what comes out of it.

    Raises:
        Exception: Anything but the two allowed errors.
    """
    outcome: Counter[str] = Counter()
    decoder = FrameDecoder(samples.LIMITS, accept=samples.ALL_TYPES)
    try:
        for frame in _feed(decoder, data, rng):
            outcome["frames"] += 1
            check_frame(frame, outcome)
        outcome["refused"] += not decoder.is_idle
    except DecodeError:
        outcome["refused"] += 1
    return outcome


def _feed(decoder: FrameDecoder, data: bytes, rng: random.Random) -> Iterator[Frame]:
    at = 0
    whole = rng.random() < 0.3
    while at < len(data):
        size = len(data) if whole else rng.choice((1, 3, 24, 100, 4096))
        chunk = data[at : at + size]
        target = decoder.writable()
        if target is not None:
            chunk = chunk[: len(target)]
            target[: len(chunk)] = chunk
            yield from decoder.advance(len(chunk))
        else:
            yield from decoder.feed(chunk)
        at += len(chunk)


def check_frame(frame: Frame, outcome: Counter[str]) -> None:
    """Encode and decode it again, and use what it carries."""
    payload = bytes(frame.body) + b"".join(bytes(buffer) for buffer in frame.buffers)
    again = FrameDecoder(samples.LIMITS, accept=samples.ALL_TYPES).feed(encode(frame.message, len(payload)) + payload)
    if plain(again[0]) != plain(frame):
        raise AssertionError(f"decoded, encoded and decoded again, {frame.message} became {again[0].message}")
    if isinstance(frame.message, Failure):
        str(rebuild_exception(frame.message.error, "data"))
    if isinstance(frame.message, Call | Reply):
        for note in frame.message.notes.values():
            check_note(note)
        try:
            check_value(frame.message, frame)
            outcome["values"] += 1
        except (DecodeError, CannotSend):
            outcome["values refused"] += 1


def check_note(note: Any) -> None:
    """Whoever knows its type gets that, or a `DecodeError`."""
    for kind in (RecordedCall, PropagateGradients, AbortPass):
        with contextlib.suppress(DecodeError):
            if type(read_note(note, kind)) is not kind:
                raise AssertionError(f"a note was read as something else than {kind.__name__}")


def check_value(message: Call | Reply, frame: Frame) -> None:
    """Rebuild tensors and value; a value that was decoded can be encoded, and then is the same bytes' worth."""
    buffers = iter(frame.buffers)
    values = [tensors.rebuild(meta, buffers) for meta in message.tensors]
    value = serialization.unpack(message.codec, frame.body, values, "data", samples.LIMITS)
    packed = serialization.pack(value, "data", samples.LIMITS)
    again = serialization.unpack(packed.codec, packed.body, packed.tensors, "data", samples.LIMITS)
    if repr(type(again)) != repr(type(value)):
        raise AssertionError(f"{type(value)} became {type(again)}")
    for tensor in packed.tensors:
        tensors.describe(tensor, samples.LIMITS)


def plain(frame: Frame) -> tuple[Any, ...]:
    """What two equal frames have in common; encoded, because NaN is not equal to itself."""
    return msgspec.msgpack.encode(frame.message), bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]


def fuzz(seconds: float, seed: int, save_to: Path) -> int:
    """Run until the time is over; the exit code."""
    rng, corpus = random.Random(seed), read_corpus(CORPUS)
    print(f"fuzz_wire: seed {seed}, {len(corpus)} seeds, {seconds:g} s", flush=True)
    end, num_inputs, outcome = time.monotonic() + seconds, 0, Counter[str]()
    tracemalloc.start()
    try:
        while time.monotonic() < end:
            data = corpus[num_inputs] if num_inputs < len(corpus) else change(rng.choice(corpus), rng, corpus)
            try:
                outcome += run_measured(data, rng)
            except Exception:
                traceback.print_exc()
                path = save_to / f"fuzz-failure-{crc32(data):08x}.bin"
                path.write_bytes(data)
                print(f"fuzz_wire: FAILED on input {num_inputs} of seed {seed}, saved as {path}")
                return 1
            num_inputs += 1
    finally:
        tracemalloc.stop()
    counts = ", ".join(f"{number} {name}" for name, number in sorted(outcome.items()))
    print(f"fuzz_wire: {num_inputs} inputs, 0 failures; {counts}")
    return 0


def run_measured(data: bytes, rng: random.Random) -> Counter[str]:
    """`run_one`, with an eye on the memory."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outcome = run_one(data, rng)
    peak = tracemalloc.get_traced_memory()[1] - before
    if peak > PEAK_BYTES:
        raise AssertionError(f"{len(data)} bytes of input took {peak} bytes of memory")
    return outcome


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run; by default taken from the clock")
    parser.add_argument("--replay", type=Path, help="run one saved input and show what it raises")
    parser.add_argument("--write-corpus", action="store_true", help="write tests/fuzz/corpus again")
    parser.add_argument("--save-to", type=Path, default=Path(), help="folder for a failing input")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch warns that some layouts are young
    if options.write_corpus:
        write_corpus(CORPUS)
        return 0
    if options.replay is not None:
        print(dict(run_one(options.replay.read_bytes(), random.Random(0))))
        return 0
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    return fuzz(options.seconds, seed, options.save_to)


if __name__ == "__main__":
    sys.exit(main())
