"""safetensors files: the library reads what is written, and every kind of damage is found."""

from __future__ import annotations

import copy
import errno
import math
import os
import re
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire.checkpoint import safetensors_io
from gradwire.checkpoint.directory import Folder
from gradwire.checkpoint.index import DTYPES, FileEntry, TensorEntry
from gradwire.checkpoint.safetensors_io import (
    StoredTensor,
    TensorReader,
    TensorSet,
    check_headers,
    check_tensors,
    stored,
    write_file,
)
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointError, CheckpointMissing, CheckpointWriteFailed
from gradwire.shard.layout import Box, whole

NAME = "g0001-0123abcd-worker0.safetensors"


def nothing(_: int) -> None:
    """Ignore the progress."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder(tmp_path) as opened:
        yield opened


def write(folder: Folder, tensors: dict[str, torch.Tensor]) -> tuple[FileEntry, dict[str, TensorEntry]]:
    return write_file(folder, NAME, tensors, "worker0", "here", nothing)


def check_all(folder: Folder, file: FileEntry, entries: dict[str, TensorEntry]) -> None:
    check_headers(folder, {NAME: file})
    check_tensors(folder, entries, nothing)


def bits(tensor: torch.Tensor) -> bytes:
    """Equality of bytes: not-a-number is not equal to itself."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def make(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(2, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, folder: Folder) -> None:
    tensors = {name: make(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "odd": torch.arange(7, dtype=torch.uint8)}
    file, entries = write(folder, tensors)
    assert file.num_bytes == (tmp_path / NAME).stat().st_size
    check_headers(folder, {NAME: file})
    check_tensors(folder, entries, nothing)
    with TensorReader(folder, entries) as reader:
        copies = {name: reader.copied(name) for name in tensors}
    for name, tensor in tensors.items():
        found = copies[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found) == bits(tensor)
        assert entries[name].offset % max(1, tensor.dtype.itemsize // (2 if tensor.is_complex() else 1)) == 0


def test_the_library_reads_the_file(tmp_path: Path, folder: Folder) -> None:
    tensors = {"a/w": torch.randn(3, 4), "b": torch.arange(5), "ü": torch.ones(1, dtype=torch.bool)}
    write(folder, tensors)
    found = safetensors.torch.load_file(tmp_path / NAME)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_views_are_saved_as_they_look(tmp_path: Path, folder: Folder) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    tensors = {"t": base.t(), "slice": base[1:3, ::2], "conj": base.conj(), "expanded": torch.ones(1).expand(5)}
    tensors["neg"] = base.conj().imag
    _, entries = write(folder, tensors)
    with TensorReader(folder, entries) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.copied(name), tensor.resolve_conj().resolve_neg())


def test_progress_counts_every_byte(tmp_path: Path, folder: Folder) -> None:
    counts: list[int] = []
    file, _ = write_file(folder, NAME, {"a": torch.zeros(5 << 18)}, "worker0", "here", counts.append)
    assert sum(counts) == file.num_bytes
    assert len(counts) > 2


def test_the_same_memory_is_kept_once() -> None:
    tensors, weight = TensorSet(), torch.randn(3, 3)
    assert tensors.place("a", weight) == "a"
    assert tensors.place("b", torch.nn.Parameter(weight)) == "a"
    assert tensors.place("c", weight.t()) == "c"
    assert tensors.place("d", weight[0]) == "d"
    assert tensors.place("e", weight.clone()) == "e"
    assert tensors.place("f", torch.empty(0)) == "f"
    assert tensors.place("g", torch.empty(0)) == "g"
    assert tensors.num_bytes == 4 * (9 + 9 + 3 + 9)


class Special(torch.Tensor):
    """A kind of tensor that gradwire does not know."""


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(2).to_sparse(), "layout is torch.sparse_coo; save its indices and values"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.ones(2).as_subclass(Special), "it is a Special"),
        (torch.zeros(2, dtype=torch.float8_e8m0fnu), "its dtype, torch.float8_e8m0fnu, is not supported"),
    ],
)
def test_tensors_without_plain_bytes_are_refused(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(CannotSave, match=r"tensor 'model/w' cannot be saved") as caught:
        TensorSet().place("model/w", tensor)
    assert why in str(caught.value)
    assert caught.value.tensor == "model/w"


def test_any_damaged_byte_is_found_and_named(tmp_path: Path, folder: Folder) -> None:
    file, entries = write(folder, {"a": torch.randn(64), "b": torch.arange(3, dtype=torch.uint8)})
    path, whole = tmp_path / NAME, (tmp_path / NAME).read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(CheckpointDamaged) as caught:
            check_all(folder, file, entries)
        expected = "" if place < file.header_bytes else "a" if place < entries["b"].offset else "b"
        assert (caught.value.file, caught.value.tensor) == (NAME, expected)
        assert str(path) in str(caught.value)


def test_missing_and_short_files_are_named(tmp_path: Path, folder: Folder) -> None:
    file, entries = write(folder, {"a": torch.randn(64)})
    os.truncate(tmp_path / NAME, file.num_bytes - 1)
    with pytest.raises(CheckpointDamaged, match=r"it has [\d,]+ bytes instead of") as damaged:
        check_headers(folder, {NAME: file})
    assert damaged.value.file == NAME
    with pytest.raises(CheckpointDamaged, match=r"tensor 'a' .* the file ends too early"):
        check_tensors(folder, entries, nothing)
    (tmp_path / NAME).unlink()
    with pytest.raises(CheckpointMissing, match=r"which has tensor 'a', is missing") as missing:
        check_tensors(folder, entries, nothing)
    assert (missing.value.file, missing.value.tensor) == (NAME, "a")
    with pytest.raises(FileNotFoundError), TensorReader(folder, entries) as reader:
        reader.copied("a")


def test_a_file_that_is_no_safetensors_file_is_damage(tmp_path: Path, folder: Folder) -> None:
    _, entries = write(folder, {"a": torch.randn(64)})
    (tmp_path / NAME).write_bytes(b"nonsense" * 10)
    with pytest.raises(CheckpointDamaged, match=NAME), TensorReader(folder, entries) as reader:
        reader.copied("a")


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may grow beyond 64 KiB: what a full disk looks like, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield 64 << 10
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, folder: Folder, small_files: int) -> None:
    tensors = {"first": torch.zeros(100), "second": torch.zeros(small_files)}
    with pytest.raises(
        CheckpointWriteFailed, match=r"worker0 cannot write .*\(tensor 'second'\): File too large"
    ) as caught:
        write(folder, tensors)
    assert (caught.value.file, caught.value.tensor) == (NAME, "second")
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device. Free some space there, or save to another directory"),
        (errno.EROFS, "Read-only file system. Save to another directory, which every worker can write to"),
    ],
)
def test_advice_depends_on_why_it_cannot_be_written(folder: Folder, number: int, advice: str) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(CheckpointWriteFailed, match=re.escape(advice)):
        write_file(folder, NAME, {"a": torch.zeros(8)}, "worker0", "here", fail)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, folder: Folder) -> None:
    def interrupt(_: int) -> None:
        assert (tmp_path / NAME).exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(folder, NAME, {"a": torch.zeros(8)}, "worker0", "here", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path, folder: Folder) -> None:
    (tmp_path / NAME).write_text("mine")
    with pytest.raises(CheckpointWriteFailed, match="already exists"):
        write(folder, {"a": torch.zeros(1)})
    assert (tmp_path / NAME).read_text() == "mine"


# -- reading into memory that is there ------------------------------------------------------------------------------------

SAVED = torch.arange(40 * 50 * 60, dtype=torch.float32).view(40, 50, 60)


@pytest.fixture
def reader(folder: Folder) -> Iterator[TensorReader]:
    """Of a file with `SAVED` as "a"."""
    _, entries = write(folder, {"a": SAVED})
    with TensorReader(folder, entries) as opened:
        yield opened


@pytest.mark.parametrize(
    "target",
    [
        torch.empty(40, 50, 60),
        torch.empty(60, 50, 40).transpose(0, 2),
        torch.empty(40, 50, 120)[..., ::2],
        torch.empty(40, 50, 60, dtype=torch.float64),
        torch.empty(40, 50, 60, dtype=torch.complex64).real,
        torch.nn.Parameter(torch.empty(40, 50, 60)),
        torch.empty(40, 50, 60, dtype=torch.complex64).conj().imag,  # is kept with its sign changed
    ],
    ids=["plain", "transposed", "strided", "converted", "real", "parameter", "negated"],
)
def test_tensors_of_every_form_are_filled(reader: TensorReader, target: torch.Tensor) -> None:
    version = target._version
    reader.read_into(target, "a")
    assert torch.equal(target.detach().float(), SAVED)
    assert target._version > version  # autograd sees that it has changed


@pytest.mark.parametrize("piece", [4, 400, 1 << 20])
@pytest.mark.parametrize("staged", [1, 100, 1 << 20])
@settings(max_examples=25)
@given(data=st.data())
def test_a_region_is_what_indexing_gives(piece: int, staged: int, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    saved = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
    box = Box(offsets, sizes)
    with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_io, "_PIECE", piece)
        patch.setattr(safetensors_io, "_STAGED_ELEMENTS", staged)
        _, entries = write(folder, {"a": saved})
        with TensorReader(folder, entries) as reader:
            for dtype in (torch.int32, torch.int64):
                target = torch.full(sizes, -1, dtype=dtype)
                reader.read_into(target, "a", box)
                assert torch.equal(target.int(), saved[box.slices_in(whole(shape))])


def test_bytes_that_changed_after_the_check_are_found(tmp_path: Path, folder: Folder) -> None:
    file, entries = write(folder, {"a": torch.zeros(100), "b": torch.ones(3)})
    check_all(folder, file, entries)
    with TensorReader(folder, entries) as reader:
        with open(tmp_path / NAME, "r+b") as opened:
            opened.seek(entries["a"].offset + 40)
            opened.write(b"x")
        with pytest.raises(CheckpointDamaged, match=r"tensor 'a' in .* is damaged: its bytes have changed"):
            reader.copied("a")
        with pytest.raises(CheckpointDamaged, match=r"tensor 'a' in .* is damaged: its bytes have changed"):
            reader.read_into(torch.zeros(100, dtype=torch.float64), "a")
        assert reader.copied("b").tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["direct", "staged"])
def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The file is open and was long enough; after the first piece of the tensor its rest is gone."""
    file, entries = write(folder, {"a": torch.ones(3 << 20)})
    check_all(folder, file, entries)
    num_reads, read = 0, os.preadv

    def read_and_cut(*args: Any) -> int:
        nonlocal num_reads
        num_reads += 1
        found = read(*args)
        os.truncate(tmp_path / NAME, entries["a"].offset + 4096)
        return found

    monkeypatch.setattr(os, "preadv", read_and_cut)
    target = torch.zeros(3 << 20, dtype=dtype)
    error = pytest.raises(CheckpointDamaged, match=r"tensor 'a' in .* is damaged: the file ends too early")
    with TensorReader(folder, entries) as reader, error as caught:
        reader.read_into(target, "a")
    assert caught.value.file == NAME
    assert num_reads == 2
    assert 0 < target.sum() < 3 << 20


def test_no_file_stays_open(folder: Folder) -> None:
    _, entries = write(folder, {"a": torch.zeros(3)})
    before = os.listdir("/proc/self/fd")
    with TensorReader(folder, entries) as reader:
        reader.copied("a")
        reader.copied("a")
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    reader.close()
    assert os.listdir("/proc/self/fd") == before


# -- tensors that are read when they are used --------------------------------------------------------------------------


SMALL = torch.arange(6.0).view(2, 3)


class File:
    """Where `SMALL` is, and what it was read into."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []

    def fill(self, target: torch.Tensor) -> None:
        self.targets.append(target)
        with torch.no_grad():
            target.copy_(SMALL)


@pytest.fixture
def file() -> File:
    return File()


@pytest.fixture
def tensor(file: File) -> StoredTensor:
    return stored((2, 3), torch.float32, file.fill, [])


def test_a_module_is_filled_without_memory_in_between(file: File, tensor: StoredTensor) -> None:
    module = nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": tensor})
    assert [target is module.weight for target in file.targets] == [True]
    assert type(module.weight) is nn.Parameter
    assert torch.equal(module.weight.detach(), SMALL)


def test_hooks_see_its_values(file: File, tensor: StoredTensor) -> None:
    module = nn.Linear(3, 2, bias=False)
    module.register_load_state_dict_pre_hook(lambda _, state, *rest: state.update(weight=state["weight"] * 2 + 1))
    module.load_state_dict({"weight": tensor})
    assert torch.equal(module.weight.detach(), SMALL * 2 + 1)
    assert len(file.targets) == 1


def test_changes_in_place_stay(tensor: StoredTensor) -> None:
    tensor.mul_(3)
    target = torch.zeros(2, 3)
    target.copy_(tensor)
    assert torch.equal(target, SMALL * 3)
    assert torch.equal(tensor[1], SMALL[1] * 3)


def test_it_looks_like_what_was_saved(file: File, tensor: StoredTensor) -> None:
    assert tensor.shape == (2, 3)
    assert file.targets == []
    assert (tensor.dtype, tensor.device, tensor.is_meta) == (torch.float32, torch.device("cpu"), False)
    for found in (
        tensor.clone(),
        tensor.detach(),
        tensor.to(torch.float32),
        copy.deepcopy(tensor),
        torch.stack([tensor])[0],
    ):
        assert type(found) is torch.Tensor
        assert torch.equal(found, SMALL)
    target = torch.zeros(4, 2, 3)
    target.copy_(tensor)  # is expanded
    assert torch.equal(target[3], SMALL)
    assert len(file.targets) == 1


def test_errors_are_kept_because_torch_makes_text_of_them() -> None:
    failures: list[CheckpointError] = []
    error = CheckpointDamaged("the file ends too early")

    def fail(_: torch.Tensor) -> None:
        raise error

    with pytest.raises(RuntimeError, match="the file ends too early"):
        nn.Linear(3, 2, bias=False).load_state_dict({"weight": stored((2, 3), torch.float32, fail, failures)})
    assert failures == [error]
