"""Shared-memory slots, in one process and between two."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quick_python
from gradwire.errors import ConnectionClosed, DecodeError
from gradwire.transports import shared_memory
from gradwire.transports.shared_memory import (
    MAX_SLOTS,
    OFFERED,
    PAGE,
    BorrowedSlots,
    Lease,
    LendingArena,
    Slot,
    make_memfd,
)
from gradwire.wire.messages import SlotRef

KIB, MIB = 1 << 10, 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
DEADLINE_S = 60.0

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs sealed memfds")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:gradwire")


@pytest.fixture(scope="module", autouse=True)
def programs_can_start() -> None:
    """Their source has descriptors in this process, which are not those of a test."""
    quick_python.prepare()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = num_fds(), num_mappings()
    yield
    if (num_fds(), num_mappings()) != before:
        gc.collect()  # takes long with torch loaded
    assert (num_fds(), num_mappings()) == before


class Pair:
    """Both ends of one direction, without a connection between them."""

    def __init__(self, limit_bytes: int = 64 * MIB, **options: float) -> None:
        self.arena = LendingArena(limit_bytes, **options)
        self.slots = BorrowedSlots(limit_bytes)

    def offer(self, num_bytes: int) -> None:
        """A new slot, whose descriptor arrives."""
        fd = self.arena.offer(num_bytes)
        assert fd is not None
        self.slots.add_fds([fd])

    def lend(self, num_bytes: int) -> Lease:
        """A slot that was known, or else one that is made for it."""
        lease = self.arena.lend(num_bytes)
        if lease is None:
            self.offer(num_bytes)
            lease = self.arena.lend(num_bytes)
        assert lease is not None
        return lease

    def receive(self, lease: Lease) -> torch.Tensor:
        return torch.frombuffer(self.slots.map_slot(lease.slot, lease.target.numel()), dtype=torch.uint8)

    def send(self, num_bytes: int, value: int = 0) -> torch.Tensor:
        lease = self.lend(num_bytes)
        lease.target.fill_(value)
        return self.receive(lease)

    def close(self) -> None:
        self.arena.close()
        self.slots.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


# Lending and giving back


def test_what_was_copied_in_arrives(pair: Pair) -> None:
    lease = pair.lend(300_001)
    sent = torch.randint(0, 256, (300_001,), dtype=torch.uint8)
    lease.target.copy_(sent)
    assert torch.equal(pair.receive(lease), sent)


@pytest.mark.parametrize(
    ("num_bytes", "capacity"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (MIB, MIB), (MIB + 1, 2 * MIB)]
)
def test_capacity_is_the_next_power_of_two(pair: Pair, num_bytes: int, capacity: int) -> None:
    received = pair.send(num_bytes, 7)
    assert received.numel() == num_bytes
    assert int(received[-1]) == 7
    assert pair.slots.statistics().bytes_mapped == pair.arena.statistics().bytes_mapped == capacity


def test_the_receiver_may_write_into_its_tensor(pair: Pair) -> None:
    received = pair.send(64 * KIB, 1)
    received.add_(1)
    assert int(received.sum()) == 2 * 64 * KIB


def test_a_slot_is_lent_while_any_view_lives(pair: Pair) -> None:
    received = pair.send(256 * KIB)
    view = received.view(torch.float32)[10:20]
    del received
    assert pair.arena.statistics().num_lent == pair.slots.statistics().num_lent == 1
    del view
    assert pair.arena.statistics().num_lent == pair.slots.statistics().num_lent == 0


def test_a_freed_slot_is_lent_again(pair: Pair) -> None:
    first = pair.send(256 * KIB)
    address = first.data_ptr()
    del first
    lease = pair.arena.lend(200 * KIB)
    assert lease is not None
    assert pair.receive(lease).data_ptr() == address


def test_a_slot_is_lent_once_the_receiver_has_mapped_it(pair: Pair) -> None:
    fd = pair.arena.offer(256 * KIB)
    assert fd is not None
    assert pair.arena.lend(256 * KIB) is None
    pair.slots.add_fds([fd])
    assert pair.arena.lend(256 * KIB) is not None
    assert pair.arena.lend(256 * KIB) is None


def test_a_slot_in_use_is_not_lent(pair: Pair) -> None:
    first, second = pair.send(256 * KIB, 1), pair.send(256 * KIB, 2)
    assert first.data_ptr() != second.data_ptr()
    assert (int(first[0]), int(second[0])) == (1, 2)


def test_the_newest_freed_slot_is_lent_first(pair: Pair) -> None:
    held = [pair.send(256 * KIB) for _ in range(3)]
    newest = held[2].data_ptr()
    held.clear()
    assert pair.send(256 * KIB).data_ptr() == newest


def test_a_freed_slot_is_found_behind_many_that_are_held(pair: Pair) -> None:
    held = [pair.send(PAGE) for _ in range(600)]
    del held[0]
    created = pair.arena.statistics().num_created
    again = [lease for lease in (pair.arena.lend(PAGE) for _ in range(4)) if lease is not None]
    assert len(again) == 1
    assert pair.arena.statistics().num_created == created


def test_garbage_in_a_cycle_gives_the_slot_back(pair: Pair) -> None:
    cycle: list[Any] = [pair.send(256 * KIB)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pair.arena.statistics().num_lent == 0


def test_a_slot_made_in_inference_mode_can_be_used_outside(pair: Pair) -> None:
    with torch.inference_mode():
        lease = pair.lend(64 * KIB)
    assert not lease.target.is_inference()
    lease.target.copy_(torch.ones(64 * KIB, dtype=torch.uint8))
    assert int(pair.receive(lease).sum()) == 64 * KIB


def test_nothing_to_lend_for_no_bytes(pair: Pair) -> None:
    assert pair.arena.lend(0) is None


def test_nothing_to_lend_for_no_bytes_where_a_slot_is_free(pair: Pair) -> None:
    pair.send(PAGE)
    refused = pair.arena.statistics().num_refused
    assert pair.arena.lend(0) is None
    assert pair.arena.offer(0) is None
    assert pair.arena.statistics().num_refused == refused + 1


def test_slots_are_filled_when_their_sender_says_so(pair: Pair) -> None:
    leases = [pair.lend(PAGE) for _ in range(3)]
    received = [pair.receive(lease) for lease in leases]
    assert not pair.slots.are_filled()
    for lease in leases[1:]:
        lease.mark_filled()
    assert not pair.slots.are_filled()
    leases[0].mark_filled()
    assert pair.slots.are_filled()
    received.clear()
    assert pair.arena.statistics().num_lent == 0


def test_a_closed_end_does_not_say_that_slots_are_filled(pair: Pair) -> None:
    lease = pair.lend(PAGE)
    pair.receive(lease)
    pair.slots.close()
    with pytest.raises(ConnectionClosed):
        pair.slots.are_filled()


# Limits


def test_beyond_the_limit_nothing_is_lent_until_something_is_freed() -> None:
    pair = Pair(limit_bytes=2 * MIB)
    held = [pair.send(MIB), pair.send(MIB)]
    assert pair.arena.lend(MIB) is None
    assert pair.arena.offer(MIB) is None
    assert pair.arena.offer(4 * MIB) is None
    held.clear()
    assert pair.send(MIB, 3)[0] == 3
    pair.close()


def test_idle_slots_make_room_for_another_size() -> None:
    pair = Pair(limit_bytes=MIB, retire_after_s=0.0)
    for num_bytes in (MIB, 256 * KIB, 512 * KIB, MIB, 64 * KIB):
        assert int(pair.send(num_bytes, 5).sum()) == 5 * num_bytes
        assert max(pair.arena.statistics().bytes_mapped, pair.slots.statistics().bytes_mapped) <= MIB
    assert pair.arena.lend(64 * KIB) is not None
    pair.close()


def test_slots_in_use_are_not_retired() -> None:
    pair = Pair(limit_bytes=MIB, retire_after_s=0.0)
    held = pair.send(512 * KIB, 9)
    assert pair.arena.offer(MIB) is None
    assert pair.send(512 * KIB, 1)[0] == 1
    assert int(held.sum()) == 9 * 512 * KIB
    pair.close()


def test_slots_that_were_just_used_are_not_retired() -> None:
    pair = Pair(limit_bytes=MIB, retire_after_s=3600.0)
    pair.send(MIB)
    assert pair.arena.offer(64 * KIB) is None
    assert pair.arena.lend(MIB) is not None
    pair.close()


@contextlib.contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_without_descriptors_no_slot_is_offered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_PAUSE_S", 0.0)
    with limited(resource.RLIMIT_NOFILE, 3):
        assert pair.arena.offer(MIB) is None
    assert pair.send(MIB, 1)[0] == 1


def test_files_that_must_be_small_are_no_slots(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_PAUSE_S", 0.0)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with limited(resource.RLIMIT_FSIZE, 64 * KIB):
            assert pair.arena.offer(MIB) is None
    finally:
        signal.signal(signal.SIGXFSZ, old)
    assert pair.send(MIB, 1)[0] == 1


def test_a_system_without_room_is_left_alone_for_a_while(pair: Pair) -> None:
    with limited(resource.RLIMIT_NOFILE, 3):
        assert pair.arena.offer(MIB) is None
    assert pair.arena.offer(MIB) is None


def test_a_receiver_without_address_space_leaves_a_slot_alone(pair: Pair) -> None:
    fd = pair.arena.offer(MIB)
    assert fd is not None
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    with limited(resource.RLIMIT_AS, in_use):
        pair.slots.add_fds([fd])
    assert pair.slots.statistics().num_slots == 0
    assert pair.arena.lend(MIB) is None


def test_slots_that_are_not_mapped_are_given_up() -> None:
    pair = Pair(limit_bytes=MIB, retire_after_s=0.0)
    for _ in range(3):
        fd = pair.arena.offer(MIB)
        assert fd is not None
        os.close(fd)  # it never arrives
    assert pair.arena.statistics().num_slots == 1
    pair.close()


def test_a_slot_that_was_given_up_is_not_mapped() -> None:
    pair = Pair(limit_bytes=MIB, retire_after_s=0.0)
    late = pair.arena.offer(MIB)
    newer = pair.arena.offer(MIB)
    assert late is not None
    assert newer is not None
    pair.slots.add_fds([late, newer])
    assert pair.slots.statistics().num_created == 1
    assert pair.arena.lend(MIB) is not None
    pair.close()


def test_few_slots_are_offered_at_once(pair: Pair) -> None:
    fds = [fd for fd in (pair.arena.offer(PAGE) for _ in range(100)) if fd is not None]
    for fd in fds:
        os.close(fd)
    assert len(fds) == 64


def test_without_memfds_no_slot_is_offered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shared_memory.is_available.cache_clear()
    try:
        assert not shared_memory.is_available()
        assert pair.arena.offer(MIB) is None
    finally:
        shared_memory.is_available.cache_clear()


def test_without_memory_for_its_pages_a_slot_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(slot: Slot, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    pair.send(MIB)
    pair.offer(2 * MIB)
    monkeypatch.setattr(Slot, "touch", no_memory)
    assert pair.arena.lend(2 * MIB) is None
    monkeypatch.undo()
    assert pair.arena.lend(2 * MIB) is None
    assert pair.arena.offer(2 * MIB) is None  # not tried again at once
    assert pair.arena.lend(MIB) is not None


# Cancelling and closing


def test_cancelling_frees_the_slot(pair: Pair) -> None:
    pair.send(MIB)
    pair.arena.cancel(pair.lend(MIB))
    lease = pair.arena.lend(MIB)
    assert lease is not None
    assert pair.receive(lease).numel() == MIB


def test_closing_twice_and_late_calls_do_no_harm(pair: Pair) -> None:
    lease, fd = pair.lend(MIB), pair.arena.offer(PAGE)
    assert fd is not None
    pair.close()
    pair.close()
    assert pair.arena.lend(MIB) is None
    assert pair.arena.offer(MIB) is None
    pair.slots.add_fds([fd])  # closed at once
    with pytest.raises(ConnectionClosed):
        pair.slots.map_slot(lease.slot, 1)
    lease.target.fill_(1)  # still memory
    pair.arena.cancel(lease)
    assert pair.arena.statistics().bytes_mapped == pair.slots.statistics().bytes_mapped == 0


def test_a_received_tensor_outlives_both_ends(pair: Pair) -> None:
    received = pair.send(MIB, 4)
    pair.close()
    gc.collect()
    assert int(received.sum()) == 4 * MIB
    del received
    assert num_mappings() == 0


def test_closing_unmaps(pair: Pair) -> None:
    pair.send(MIB)
    assert num_mappings() == 2
    pair.arena.close()
    pair.slots.close()
    assert num_mappings() == 0


# What a hostile or broken sender may send


def memfd(num_bytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("gradwire", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def regular_file(folder: Path) -> int:
    path = folder / "file"
    path.write_bytes(bytes(2 * PAGE))
    return os.open(path, os.O_RDWR)


def symbolic_link(folder: Path) -> int:
    (folder / "link").symlink_to("/etc/passwd")
    return os.open(folder / "link", os.O_PATH | os.O_NOFOLLOW)


def read_end(_: Path) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def foreign_memfd(_: Path) -> int:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    fd = memfd(2 * PAGE)
    os.fchown(fd, 12345, 12345)
    return fd


def read_only_memfd(_: Path) -> int:
    return memfd(2 * PAGE, SEALS | fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize(
    "make_fd",
    [
        regular_file,
        symbolic_link,
        read_end,
        foreign_memfd,
        read_only_memfd,
        lambda folder: os.open(folder, os.O_RDONLY),
        lambda _: os.open("/dev/zero", os.O_RDWR),
        lambda _: socket.socket().detach(),
        lambda _: memfd(2 * PAGE, 0),
        lambda _: memfd(2 * PAGE, SEALS & ~fcntl.F_SEAL_SHRINK),
        lambda _: memfd(2 * PAGE, SEALS & ~fcntl.F_SEAL_GROW),
        lambda _: memfd(2 * PAGE, SEALS & ~fcntl.F_SEAL_SEAL),
        lambda _: memfd(2 * PAGE - 1),
        lambda _: memfd(2 * PAGE + 1),
        lambda _: memfd(0),
    ],
)
def test_only_sealed_memory_of_the_right_size_is_mapped(make_fd: Callable[[Path], int], tmp_path: Path) -> None:
    slots, before = BorrowedSlots(MIB), num_fds()
    with pytest.raises(DecodeError):
        slots.add_fds([make_fd(tmp_path), memfd(2 * PAGE)])
    assert num_fds() == before  # both were closed at once
    assert slots.statistics().num_slots == 0


@pytest.mark.parametrize("capacity", [3 * PAGE, PAGE // 2, 0, MIB + PAGE])
def test_a_slot_of_another_size_is_refused(capacity: int) -> None:
    slots = BorrowedSlots(2 * MIB)
    with pytest.raises(DecodeError, match="power of two"):
        slots.add_fds([memfd(PAGE + capacity)])


def test_a_slot_number_beyond_63_bits_is_refused() -> None:
    slots = BorrowedSlots(MIB)
    with pytest.raises(DecodeError, match="number"):
        slots.add_fds([make_memfd(1 << 63, PAGE)])


@pytest.mark.parametrize("num_bytes", [0, -1, PAGE + 1, 1 << 63])
def test_impossible_sizes_are_refused(num_bytes: int) -> None:
    slots = BorrowedSlots(MIB)
    slots.add_fds([make_memfd(0, PAGE)])
    with pytest.raises(DecodeError):
        slots.map_slot(SlotRef(0, PAGE), num_bytes)
    assert slots.statistics().num_lent == 0
    slots.close()


def test_an_unknown_slot_is_refused(pair: Pair) -> None:
    held = pair.send(PAGE)
    with pytest.raises(DecodeError, match="slot 77"):
        pair.slots.map_slot(SlotRef(77, PAGE), held.numel())


@pytest.mark.parametrize("capacity", [2 * PAGE, 3 * PAGE, 1 << 62, (1 << 64) - 1, 0, -PAGE])
def test_another_capacity_for_a_known_slot_is_refused(pair: Pair, capacity: int) -> None:
    pair.send(PAGE)
    with pytest.raises(DecodeError, match="slot 0"):
        pair.slots.map_slot(SlotRef(0, capacity), 10)


def test_a_slot_that_is_lent_twice_is_refused(pair: Pair) -> None:
    held = pair.send(PAGE, 1)
    with pytest.raises(DecodeError, match="in use"):
        pair.slots.map_slot(SlotRef(0, PAGE), 10)
    assert int(held.sum()) == PAGE


def test_a_slot_number_that_comes_twice_is_refused(pair: Pair) -> None:
    held = pair.send(PAGE, 1)
    with pytest.raises(DecodeError, match="twice"):
        pair.slots.add_fds([make_memfd(0, PAGE)])
    assert int(held.sum()) == PAGE


def test_slots_beyond_the_limit_are_not_mapped() -> None:
    slots = BorrowedSlots(4 * PAGE)
    slots.add_fds([make_memfd(slot_id, PAGE) for slot_id in range(6)])
    assert (slots.statistics().num_slots, slots.statistics().bytes_mapped) == (4, 4 * PAGE)
    slots.close()


def test_slots_beyond_their_number_are_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SLOTS <= 1024
    monkeypatch.setattr(shared_memory, "MAX_SLOTS", 3)
    slots, offered = BorrowedSlots(MIB), make_memfd(3, PAGE)
    kept = os.dup(offered)
    slots.add_fds([*(make_memfd(slot_id, PAGE) for slot_id in range(3)), offered])
    assert slots.statistics().num_slots == 3
    assert os.pread(kept, 1, 0) == bytes([OFFERED])  # its sender sees that it is not mapped
    os.close(kept)
    slots.close()


# Garbage collection at awkward moments


@contextlib.contextmanager
def eager_collector() -> Iterator[None]:
    """The collector runs at nearly every allocation, also those under the locks of the arena and the pool."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def drop_in_cycle(value: object) -> None:
    cycle = [value]
    cycle.append(cycle)


def test_slots_are_freed_inside_calls_of_the_arena(pair: Pair) -> None:
    with eager_collector():
        for index in range(100):
            received = pair.send(PAGE, index)
            assert int(received[0]) == index
            drop_in_cycle(received)
            del received
    gc.collect()
    assert pair.arena.statistics().num_lent == 0
    assert pair.slots.statistics().num_slots < 20


def test_a_forked_child_does_not_free_its_parents_slots(pair: Pair) -> None:
    received = pair.send(PAGE, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12: fork beside other threads
        child = os.fork()
    if child == 0:
        del received
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pair.arena.statistics().num_lent == 1
    assert int(received[0]) == 6


# Two processes

PEER = """
import json, os, socket, sys, torch
from gradwire.transports.shared_memory import BorrowedSlots, LendingArena
from gradwire.wire.messages import SlotRef

sock, limit, kept = socket.socket(fileno=int(sys.argv[1])), 64 << 20, []
arena, slots = LendingArena(limit), BorrowedSlots(limit)
while True:
    text, fds, _, _ = socket.recv_fds(sock, 65536, 4)
    if not text:
        break
    order, answer, answer_fds = json.loads(text), {}, []
    slots.add_fds(fds)
    if "take" in order:
        buffer = slots.map_slot(SlotRef(*order["take"]), order["num_bytes"])
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        answer["sum"] = int(tensor.sum())
        kept += [tensor[5:]] * order["keep"]
        del buffer, tensor
    if "give" in order:
        lease = arena.lend(order["give"])
        if lease is None:
            answer_fds = [arena.offer(order["give"])]
        else:
            lease.target.fill_(order["value"])
            answer["slot"] = [lease.slot.slot_id, lease.slot.capacity]
    if "drop" in order:
        kept.clear()
    if "close" in order:
        arena.close()
    answer["num_fds"] = len(os.listdir("/proc/self/fd")) - len(answer_fds)
    answer["num_slots"] = slots.statistics().num_slots
    socket.send_fds(sock, [json.dumps(answer).encode()], answer_fds)
    for fd in answer_fds:
        os.close(fd)
"""


class Peer:
    """Another process that takes and gives slots as it is told."""

    def __init__(self, popen: type[subprocess.Popen[bytes]] = quick_python.Popen) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        source = Path(shared_memory.__file__).parents[2]
        self.process = popen(
            [sys.executable, "-c", PEER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def ask(self, fds: tuple[int, ...] = (), **order: Any) -> tuple[dict[str, Any], list[int]]:
        socket.send_fds(self.socket, [json.dumps(order).encode()], fds)
        text, answer_fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
        assert text, "the other process ended"
        return json.loads(text), list(answer_fds)

    def lend_full(self, arena: LendingArena, num_bytes: int, value: int) -> Lease:
        """A slot that the other process knows, with that value in every byte."""
        lease = arena.lend(num_bytes)
        if lease is None:
            fd = arena.offer(num_bytes)
            assert fd is not None
            self.ask((fd,))
            os.close(fd)
            lease = arena.lend(num_bytes)
        assert lease is not None
        lease.target.fill_(value)
        return lease

    def take(self, lease: Lease, keep: bool = False) -> dict[str, Any]:
        slot = lease.slot
        answer, _ = self.ask(take=[slot.slot_id, slot.capacity], num_bytes=lease.target.numel(), keep=keep)
        return answer

    def give(self, slots: BorrowedSlots, num_bytes: int, value: int) -> torch.Tensor:
        answer, fds = self.ask(give=num_bytes, value=value)
        if fds:
            slots.add_fds(fds)
            answer, _ = self.ask(give=num_bytes, value=value)
        return torch.frombuffer(slots.map_slot(SlotRef(*answer["slot"]), num_bytes), dtype=torch.uint8)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def leave(self) -> str:
        """End it in good order; returns what it had to say about that."""
        self.socket.close()
        try:
            _, errors = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return errors.decode()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    end_peer(made)


@pytest.fixture
def fresh_peer() -> Iterator[Peer]:
    """One that ends as an interpreter does, with all modules taken apart."""
    made = Peer(subprocess.Popen)
    yield made
    end_peer(made)


def end_peer(made: Peer) -> None:
    made.socket.close()
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait(DEADLINE_S)
    assert made.process.stderr is not None
    made.process.stderr.close()


def test_processes_exchange_tensors_in_both_directions_for_1000_rounds(peer: Peer, pair: Pair) -> None:
    arena, slots = pair.arena, pair.slots
    first = peer.take(peer.lend_full(arena, 256 * KIB, 1))
    assert int(peer.give(slots, 256 * KIB, 1).sum()) == 256 * KIB
    for index in range(1000):
        value = index % 200
        answer = peer.take(peer.lend_full(arena, 256 * KIB, value))
        assert answer["sum"] == value * 256 * KIB
        assert int(peer.give(slots, 256 * KIB, value)[-1]) == value
    assert answer["num_fds"] == first["num_fds"]
    assert arena.statistics().num_created == slots.statistics().num_created == answer["num_slots"] == 1


def test_a_slot_comes_back_when_the_other_process_drops_its_view(peer: Peer, pair: Pair) -> None:
    peer.take(peer.lend_full(pair.arena, MIB, 1), keep=True)
    assert pair.arena.statistics().num_lent == 1
    peer.ask(drop=True)
    assert pair.arena.statistics().num_lent == 0
    assert pair.arena.lend(MIB) is not None


def test_a_process_that_ends_with_borrowed_memory_is_quiet(fresh_peer: Peer, pair: Pair) -> None:
    fresh_peer.take(fresh_peer.lend_full(pair.arena, MIB, 1), keep=True)
    tensor = fresh_peer.give(pair.slots, MIB, 2)
    assert fresh_peer.leave() == ""
    assert fresh_peer.process.returncode == 0
    assert int(tensor.sum()) == 2 * MIB


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_tensor_outlives_its_sender(peer: Peer, pair: Pair, end: str) -> None:
    tensor = peer.give(pair.slots, 4 * MIB, 3)
    if end == "close":
        peer.ask(close=True)
    else:
        peer.kill()
    assert int(tensor.sum()) == 3 * 4 * MIB
    tensor.add_(1)
    assert int(tensor.sum()) == 4 * 4 * MIB


def test_memory_comes_back_when_the_receiver_dies(peer: Peer, pair: Pair) -> None:
    peer.take(peer.lend_full(pair.arena, 4 * MIB, 3), keep=True)
    peer.kill()
    assert pair.arena.statistics().num_lent == 1  # nobody is left to free it
    pair.arena.close()
    assert num_mappings() == 0
    assert pair.arena.statistics().bytes_mapped == 0
