"""Reading safetensors files: checked piece by piece, then mapped, so that nothing is read before it is used."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from gradwire.checkpoint._dtypes import DTYPES, from_stored
from gradwire.checkpoint._index import FileEntry, TensorEntry, checksum_of, show_checksum
from gradwire.checkpoint._pieces import form_of, region_of
from gradwire.errors import CheckpointDamaged, CheckpointMissing
from gradwire.shard._geometry import Box

OnBytes = Callable[[int], None]

_PIECE: Final = 2 << 20  # small enough to be in the cache still when its checksum is taken


def check_files(directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Compares sizes and headers with the index.

    Raises:
        CheckpointMissing: A file is gone.
        CheckpointDamaged: A file has another size or header than was written.
    """
    for name, entry in files.items():
        path = directory / name
        with _opened(path, "") as descriptor:
            size = os.fstat(descriptor).st_size
            if size != entry.num_bytes:
                raise _damaged(path, "", f"it has {size:,} bytes instead of {entry.num_bytes:,}")
            if checksum_of(_read(descriptor, entry.header_bytes, 0)) != entry.checksum:
                raise _damaged(path, "", "its header has changed")


def check_tensors(directory: Path, entries: Mapping[str, TensorEntry], on_bytes: OnBytes) -> None:
    """Compares the bytes of tensors with the index. Reads, and maps nothing: a bad disk gives an error and no signal.

    Raises:
        CheckpointMissing: A file is gone.
        CheckpointDamaged: A tensor's bytes have changed.
    """
    buffer = bytearray(_PIECE)
    for file, names in _by_file(entries).items():
        path = directory / file
        with _opened(path, names[0]) as descriptor:
            for name in names:
                if _checksum_in(path, descriptor, name, entries[name], buffer, on_bytes) != entries[name].checksum:
                    raise _damaged(path, name, "its bytes have changed")


def _checksum_in(
    path: Path, descriptor: int, name: str, entry: TensorEntry, buffer: bytearray, on_bytes: OnBytes
) -> str:
    view, checksum = memoryview(buffer), 0
    offset, end = entry.offset, entry.offset + entry.num_bytes
    while offset < end:
        piece = view[: min(len(view), end - offset)]
        try:
            num_read = os.preadv(descriptor, [piece], offset)
        except OSError as error:
            raise _damaged(path, name, f"it cannot be read: {error.strerror}") from error
        if num_read == 0:
            raise _damaged(path, name, "the file ends too early")
        checksum = zlib.crc32(piece[:num_read], checksum)
        offset += num_read
        on_bytes(num_read)
    return show_checksum(checksum)


class TensorReader:
    """Tensors of a checkpoint as views of the mapped files: nothing is read before it is used. Check the files first."""

    def __init__(self, directory: Path, entries: Mapping[str, TensorEntry]) -> None:
        self._directory = directory
        self._entries = entries
        self._open: dict[str, Any] = {}

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor that must only be read.

        Raises:
            CheckpointMissing: Its file is gone.
            CheckpointDamaged: Its file has no such tensor.
        """
        entry = self._entries[name]
        path, dtype = self._directory / entry.file, DTYPES[entry.dtype]
        if entry.file not in self._open:
            with _opened(path, name):
                pass
            try:
                self._open[entry.file] = safetensors.safe_open(path, framework="pt")
            except (safetensors.SafetensorError, OSError) as error:
                raise _damaged(path, name, str(error)) from error
        try:
            stored: torch.Tensor = self._open[entry.file].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise _damaged(path, name, str(error)) from error
        tensor = from_stored(stored, dtype)
        if tensor.dtype is not dtype or tuple(tensor.shape) != entry.shape:
            raise _damaged(path, name, f"it is {tensor.dtype} {tuple(tensor.shape)} there")
        return tensor

    def copied(self, name: str) -> torch.Tensor:
        """The same with memory of its own."""
        return self.mapped(name).clone()

    def form_of(self, node: Any) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the node of a tensor."""
        return form_of(node, self._entries)

    def region_of(self, node: Any, box: Box) -> Any:
        """The node of a part of a tensor."""
        return region_of(node, box, self._entries)


def _by_file(entries: Mapping[str, TensorEntry]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, entry in entries.items():
        found.setdefault(entry.file, []).append(name)
    return found


def files_of(entries: Iterable[TensorEntry], files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """The files that those tensors are in."""
    return {entry.file: files[entry.file] for entry in entries}


@contextlib.contextmanager
def _opened(path: Path, tensor: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        what = f", which has tensor '{tensor}'," if tensor else ""
        raise CheckpointMissing(
            f"the file {path} of the checkpoint{what} is missing. Put it back, or load another checkpoint",
            path.name,
            tensor,
        ) from error
    except OSError as error:
        raise _damaged(path, tensor, f"it cannot be opened: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, num_bytes: int, offset: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        piece = os.pread(descriptor, num_bytes - len(found), offset + len(found))
        if not piece:
            break
        found += piece
    return bytes(found)


def _damaged(path: Path, tensor: str, why: str) -> CheckpointDamaged:
    what = f"tensor '{tensor}' in {path}" if tensor else f"the file {path}"
    return CheckpointDamaged(f"{what} is damaged: {why}. Load another checkpoint", path.name, tensor)
