"""A recorder keeps the last events of its worker, and hands them over as bytes that are checked."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from gradwire.observe import Event, events
from gradwire.observe.recorder import PIECE_EVENTS, Recorder, decode_events, encode_events


def test_the_last_events_are_kept_and_the_others_counted() -> None:
    recorder = Recorder("a", 10)
    recorder.start()
    for number in range(25):
        events.tell_now("call", str(number), "a")
        events.tell_now("call", "of another worker", "b")
    found = recorder.stop()
    assert events.sink is None
    assert [event.name for event in found] == [str(number) for number in range(15, 25)]
    assert recorder.num_dropped == 15
    recorder.stop()
    assert recorder.num_dropped == 15


def test_events_of_many_threads_are_counted() -> None:
    recorder = Recorder("a", 100)
    recorder.start()

    def tell() -> None:
        for _ in range(500):
            events.tell_now("call", "f", "a")

    threads = [threading.Thread(target=tell, name=f"teller-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.stop()) == 100
    assert recorder.num_dropped == 1900


def test_events_travel_in_pieces() -> None:
    sent = [
        Event(
            "call",
            f"f{number}",
            "a",
            number,
            number + 1,
            3,
            "b",
            2**63,
            (2**64 - 1,),
            (1, 2),
            7,
            "ValueError",
            {"x": 1},
        )
        for number in range(PIECE_EVENTS + 5)
    ]
    pieces = list(encode_events(sent))
    assert len(pieces) == 2
    assert [event for piece in pieces for event in decode_events(piece, "a")] == sent


def test_long_texts_and_strange_details_are_cut() -> None:
    details = {"long": "x" * 10_000, "object": object(), **{str(number): number for number in range(100)}}
    (piece,) = encode_events([Event("run", "f" * 10_000, "a", 0, 1, details=details)])
    (found,) = decode_events(piece, "a")
    assert len(piece) < 2000
    assert len(found.name) == 256
    assert found.details is not None
    assert len(found.details) == 16
    assert found.details["object"].startswith("<object")


def test_a_worker_cannot_tell_events_of_another() -> None:
    (piece,) = encode_events([Event("run", "f", "the driver", 0, 1)])
    assert decode_events(piece, "a")[0].worker == "a"


GOOD: list[Any] = ["run", "f", 0, 1, 1, "", 0, [], [], 0, "ok", None]


@pytest.mark.parametrize(
    "bad",
    [
        [GOOD] * (PIECE_EVENTS + 1),
        [[*GOOD, 1]],
        [["x" * 300, *GOOD[1:]]],
        [[*GOOD[:2], -1, *GOOD[3:]]],
        [[*GOOD[:7], list(range(2000)), *GOOD[8:]]],
        [[*GOOD[:11], {"x": ["nested"]}]],
        {"kind": "run"},
        7,
    ],
    ids=["many", "fields", "long", "negative", "flows", "nested", "map", "number"],
)
def test_what_is_not_events_is_refused(bad: Any) -> None:
    assert decode_events(msgspec.msgpack.encode([GOOD]), "a")
    with pytest.raises(ValueError):
        decode_events(msgspec.msgpack.encode(bad), "a")
    with pytest.raises(ValueError):
        decode_events(b"\xc1", "a")
