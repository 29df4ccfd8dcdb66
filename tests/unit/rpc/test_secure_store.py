"""What a meeting point lets in, and from whom; no sockets."""

from __future__ import annotations

import msgspec
import pytest

from gradwire.errors import AuthenticationFailed, DecodeError, IdentityTaken, LimitExceeded
from gradwire.rpc import secure_store
from gradwire.rpc.secure_store import (
    Announce,
    Entries,
    Find,
    GetNote,
    GetToken,
    HasWithdrawn,
    ListNames,
    Publish,
    Withdraw,
)
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import encode_address

W1, W2, ANY = frozenset({"w1"}), frozenset({"w2"}), frozenset({"*"})


def publish(name: str, rank: int, incarnation: int = 1, uris: tuple[str, ...] = ()) -> Publish:
    return Publish(encode_address(WorkerAddress(WorkerInfo(name, rank), incarnation, "host", uris)))


def test_a_worker_is_found_by_name_and_rank() -> None:
    entries, request = Entries(), publish("w1", 1)
    assert entries.handle(Find("w1"), W2) is None
    entries.handle(request, W1)
    assert entries.handle(Find("w1"), W2) == entries.handle(Find(1), W2) == request.address
    again = publish("w1", 1, incarnation=2)
    entries.handle(again, W1)  # started again
    assert entries.handle(Find(1), W2) == again.address
    assert entries.handle(ListNames(0), W2) == ["w1"]


def test_all_get_one_token() -> None:
    entries = Entries()
    assert entries.handle(GetToken(), W1) == entries.handle(GetToken(), None)
    assert len(entries.handle(GetToken(), W1)) == 64
    assert Entries().handle(GetToken(), None) != entries.handle(GetToken(), None)


@pytest.mark.parametrize(("name", "rank"), [("w1", 1), ("w1", 2), ("w3", 3)])
def test_a_worker_cannot_publish_for_another(name: str, rank: int) -> None:
    entries = Entries()
    entries.handle(publish("w1", 1), W1)
    with pytest.raises(AuthenticationFailed, match=f"worker '{name}' presented a certificate for"):
        entries.handle(publish(name, rank), W2)
    assert entries.handle(ListNames(0), W2) == ["w1"]


@pytest.mark.parametrize(("name", "rank", "certified"), [("w2", 1, W2), ("w1", 2, W1), ("w2", 1, ANY)])
def test_a_rank_and_a_name_belong_to_each_other_for_good(name: str, rank: int, certified: frozenset[str]) -> None:
    entries, first = Entries(), publish("w1", 1)
    entries.handle(first, W1)
    with pytest.raises(IdentityTaken, match="w1 with rank 1"):
        entries.handle(publish(name, rank), certified)
    assert entries.handle(Find(1), W2) == first.address


@pytest.mark.parametrize("certified", [W1, ANY])
def test_rank_0_is_the_process_that_serves_the_store(certified: frozenset[str]) -> None:
    entries = Entries()
    with pytest.raises(AuthenticationFailed, match="w1 cannot be rank 0"):
        entries.handle(publish("w1", 0), certified)
    entries.handle(publish("w0", 0), None)
    assert entries.handle(Find(0), certified) is not None


def test_one_certificate_for_all_may_publish_any_name() -> None:
    entries = Entries()
    for rank in range(1, 600):
        entries.handle(publish(f"w{rank}", rank), ANY)
    first = entries.handle(ListNames(0), ANY)
    assert len(first) == 256
    assert len(entries.handle(ListNames(512), ANY)) == 599 - 512
    assert entries.handle(ListNames(599), ANY) == []


def test_what_is_published_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_store, "_MAX_BYTES", 3000)
    entries, large = Entries(), ("x" * 1000,)
    entries.handle(publish("w1", 1, uris=large), ANY)
    entries.handle(publish("w2", 2, uris=large), ANY)
    with pytest.raises(LimitExceeded, match="the meeting point is full"):
        entries.handle(publish("w3", 3, uris=large), ANY)
    for incarnation in range(2, 10):  # starting again takes no more room
        entries.handle(publish("w1", 1, incarnation, large), ANY)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x90", encode_address(WorkerAddress(WorkerInfo("a b", 1), 1, "h", ()))]
)
def test_what_is_published_must_be_an_address(raw: bytes) -> None:
    entries = Entries()
    with pytest.raises(DecodeError):
        entries.handle(Publish(raw), ANY)
    assert entries.handle(ListNames(0), ANY) == []


def test_a_note_is_harmless_to_print_and_has_an_age() -> None:
    now = 10.0
    entries = Entries(lambda: now)
    assert entries.handle(GetNote(), W1)[0] == ""
    entries.handle(Announce("a\x1b[2Jb"), W1)
    now = 12.5
    assert entries.handle(GetNote(), W2) == (r"a\x1b[2Jb", 2.5)


def test_who_has_withdrawn_is_known() -> None:
    entries = Entries()
    assert entries.handle(HasWithdrawn(1), W1) is False
    entries.handle(Withdraw(1), W1)
    assert [entries.handle(HasWithdrawn(rank), W2) for rank in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["Unknown"]),
        msgspec.msgpack.encode(["Find"]),
        msgspec.msgpack.encode(["Find", -1]),
        msgspec.msgpack.encode(["Find", 1 << 16]),
        msgspec.msgpack.encode(["Find", "x" * 2000]),
        msgspec.msgpack.encode(["Find", 1, 2]),
        msgspec.msgpack.encode(["Publish", "text"]),
        msgspec.msgpack.encode(["Publish", b"x" * (33 << 10)]),
        msgspec.msgpack.encode(["Announce", "x" * 5000]),
        msgspec.msgpack.encode(["ListNames", 1 << 40]),
        msgspec.msgpack.encode(["Withdraw", 1 << 16]),
        b"\x91" * 5000,
    ],
)
def test_requests_are_checked_before_anything_is_done_with_them(body: bytes) -> None:
    with pytest.raises(DecodeError, match="not a valid message for a meeting point"):
        secure_store._read(secure_store._requests, body)
