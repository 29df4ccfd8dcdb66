"""Reading files of a checkpoint: checked piece by piece, then mapped, so that nothing is read before it is used.

Where tensors are and what they must be is known from the index, so the header of a file is only compared, never interpreted.
Every place is compared with the size of the file before it is read or mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from gradwire.checkpoint._dtypes import DTYPES
from gradwire.checkpoint._index import FileEntry, TensorEntry, show_checksum
from gradwire.checkpoint._pieces import form_of, region_of
from gradwire.checkpoint.folder import Folder
from gradwire.errors import CheckpointDamaged, CheckpointMissing
from gradwire.shard._geometry import Box

OnBytes = Callable[[int], None]

_PIECE: Final = 2 << 20  # small enough to be in the cache still when its checksum is taken


def check_files(folder: Folder, files: Mapping[str, FileEntry]) -> None:
    """Compares sizes and headers with the index.

    Raises:
        CheckpointMissing: A file is gone.
        CheckpointDamaged: A file has another size or header than was written.
    """
    buffer = bytearray(_PIECE)
    for name, entry in files.items():
        with _opened(folder, name, "") as file:
            if file.num_bytes != entry.num_bytes:
                raise file.damaged("", f"it has {file.num_bytes:,} bytes instead of {entry.num_bytes:,}")
            if file.checksum("", 0, entry.header_bytes, buffer) != entry.checksum:
                raise file.damaged("", "its header has changed")


def check_tensors(folder: Folder, entries: Mapping[str, TensorEntry], on_bytes: OnBytes) -> None:
    """Compares the bytes of tensors with the index. Reads, and maps nothing: a bad disk gives an error and no signal.

    Raises:
        CheckpointMissing: A file is gone.
        CheckpointDamaged: A tensor's bytes have changed.
    """
    buffer = bytearray(_PIECE)
    for file_name, names in _by_file(entries).items():
        with _opened(folder, file_name, names[0]) as file:
            for name in names:
                entry = entries[name]
                if file.checksum(name, entry.offset, entry.num_bytes, buffer, on_bytes) != entry.checksum:
                    raise file.damaged(name, "its bytes have changed")


class _File:
    """An open file of a checkpoint."""

    def __init__(self, folder: Folder, name: str, descriptor: int) -> None:
        self._path = folder.path / name
        self._descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size

    def checksum(
        self, tensor: str, offset: int, num_bytes: int, buffer: bytearray, on_bytes: OnBytes = lambda _: None
    ) -> str:
        """The checksum of a part of it."""
        self._check_place(tensor, offset, num_bytes)
        view, checksum, end = memoryview(buffer), 0, offset + num_bytes
        while offset < end:
            piece = view[: min(len(view), end - offset)]
            try:
                num_read = os.preadv(self._descriptor, [piece], offset)
            except OSError as error:
                raise self.damaged(tensor, f"it cannot be read: {error.strerror}") from error
            if num_read == 0:
                raise self.damaged(tensor, "the file ends too early")
            checksum = zlib.crc32(piece[:num_read], checksum)
            offset += num_read
            on_bytes(num_read)
        return show_checksum(checksum)

    def mapped(self, tensor: str) -> _Mapping:
        """All of it in memory, where it is read when it is used; stays when the file is closed."""
        try:
            return _Mapping(mmap.mmap(self._descriptor, self.num_bytes, access=mmap.ACCESS_COPY), self)
        except (OSError, ValueError) as error:  # it has no bytes, or there is no room for it
            raise self.damaged(tensor, f"it cannot be mapped: {error}") from error

    def _check_place(self, tensor: str, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > self.num_bytes:
            raise self.damaged(tensor, "the file ends too early")

    def damaged(self, tensor: str, why: str) -> CheckpointDamaged:
        """What to raise."""
        what = f"tensor '{tensor}' in {self._path}" if tensor else f"the file {self._path}"
        return CheckpointDamaged(f"{what} is damaged: {why}. Load another checkpoint", self._path.name, tensor)


class _Mapping:
    """A file in memory. Tensors keep the mapping alive, not the file open."""

    def __init__(self, memory: mmap.mmap, file: _File) -> None:
        self._memory = memory
        self._file = file

    def tensor(self, name: str, entry: TensorEntry) -> torch.Tensor:
        """A view of a part of it."""
        dtype, num_bytes = DTYPES[entry.dtype], entry.num_bytes
        self._file._check_place(name, entry.offset, num_bytes)
        if not num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=entry.offset)
        if (
            entry.offset % dtype.itemsize
        ):  # processors refuse to read some; files of version 1 have such complex numbers
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)


class TensorReader:
    """Tensors of a checkpoint as views of the mapped files: nothing is read before it is used. Check the files first.

    Args:
        folder: Must be open when a tensor of a file is asked for the first time.
        entries: Where tensors are.
    """

    def __init__(self, folder: Folder, entries: Mapping[str, TensorEntry]) -> None:
        self._folder = folder
        self._entries = entries
        self._mappings: dict[str, _Mapping] = {}

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor that must only be read.

        Raises:
            CheckpointMissing: Its file is gone.
            CheckpointDamaged: Its file ends before it.
        """
        entry = self._entries[name]
        found = self._mappings.get(entry.file)
        if found is None:
            with _opened(self._folder, entry.file, name) as file:
                found = self._mappings[entry.file] = file.mapped(name)
        return found.tensor(name, entry)

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
def _opened(folder: Folder, name: str, tensor: str) -> Iterator[_File]:
    path = folder.path / name
    try:
        descriptor = folder.open_file(name)
    except FileNotFoundError as error:
        what = f", which has tensor '{tensor}'," if tensor else ""
        raise CheckpointMissing(
            f"the file {path} of the checkpoint{what} is missing. Put it back, or load another checkpoint",
            name,
            tensor,
        ) from error
    except OSError as error:
        what = f"tensor '{tensor}' in {path}" if tensor else f"the file {path}"
        raise CheckpointDamaged(
            f"{what} is damaged: it cannot be opened: {error.strerror}. Load another checkpoint", name, tensor
        ) from error
    try:
        yield _File(folder, name, descriptor)
    finally:
        os.close(descriptor)
