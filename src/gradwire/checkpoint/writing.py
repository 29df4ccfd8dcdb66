"""Writing safetensors files, from the tensors' own memory.

A file is eight bytes of length, a JSON header, then the bytes of the tensors without gaps:

    <header length, little-endian> {"model/weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} <bytes>

Files are written here and not by the safetensors library, so that the checksum of each piece is taken while it is in the
cache, the disk is begun with early, and progress is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from gradwire.checkpoint import _points
from gradwire.checkpoint._dtypes import NAMES, alignment_of, num_bytes_of, stored_name, stored_shape
from gradwire.checkpoint._index import FileEntry, TensorEntry, checksum_of, show_checksum
from gradwire.checkpoint.folder import Folder
from gradwire.errors import CannotSave, CheckpointWriteFailed
from gradwire.wire.tensors import as_bytes

OnBytes = Callable[[int], None]

_PIECE: Final = 2 << 20  # small enough to be in the cache still when it is written
_RESERVED: Final = "__metadata__"  # has a meaning of its own in headers
_BEGIN_EVERY: Final = 16 << 20
_ALIGNMENT: Final = 64  # of the first tensor


class TensorSet:
    """The tensors that one worker is to write, by name. A tensor that is met twice is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}

    @property
    def num_bytes(self) -> int:
        """How many bytes they take."""
        return sum(num_bytes_of(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors.values())

    def place(self, path: str, tensor: torch.Tensor) -> str:
        """Takes a tensor; returns the name of the one that is kept.

        Raises:
            CannotSave: Its bytes cannot be written.
        """
        _check_savable(path, tensor)
        key = _identity(tensor)
        if key is not None and key in self._names:
            return self._names[key]
        name = f"{path}~2" if path == _RESERVED else path  # no other path ends like that
        self.tensors[name] = tensor.detach()
        if key is not None:
            self._names[key] = name
        return name


def _check_savable(path: str, tensor: torch.Tensor) -> None:
    problem = ""
    if tensor.layout is not torch.strided:
        problem = f"it is of layout {tensor.layout}; save its indices and values"
    elif tensor.dtype not in NAMES:
        problem = f"its dtype is {tensor.dtype}"
    elif tensor.is_meta:
        problem = "it is on the meta device and has no values"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"it is a {type(tensor).__name__}, not a plain tensor"
        if type(tensor).__name__ == "DTensor":
            problem += "; save what gradwire.shard.from_dtensor makes of it"
    if problem:
        raise CannotSave(f"tensor '{path}' cannot be saved: {problem}", tensor=path)


def _identity(tensor: torch.Tensor) -> Any:
    """The same for tensors that are the same memory, seen the same way; None for those without memory."""
    if tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, flags


def write_file(
    folder: Folder, file_name: str, tensors: Mapping[str, torch.Tensor], worker: str, host: str, on_bytes: OnBytes
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """Writes a new file and has it on disk before it returns; if it cannot, no file is left.

    Args:
        folder: Where.
        file_name: Must not be there.
        tensors: By name; none of them may change meanwhile.
        worker: Who writes, for the index.
        host: And where.
        on_bytes: Told how many more bytes are written.

    Raises:
        CheckpointWriteFailed: It cannot be written; says which file and which tensor.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -alignment_of(item[1].dtype)))  # so that all are aligned
    header, entries, name = _header(ordered), {}, ""
    path = folder.path / file_name
    try:
        with os.fdopen(folder.make_file(file_name), "wb", buffering=0) as file:
            _points.passed("opened")
            output = _Output(file.fileno(), on_bytes)
            output.write(memoryview(header))
            for number, (name, tensor) in enumerate(ordered.items()):
                if number == len(ordered) // 2:
                    _points.passed("half")
                offset, checksum = output.num_bytes, _write_tensor(output, tensor)
                entries[name] = TensorEntry(file_name, offset, NAMES[tensor.dtype], tuple(tensor.shape), checksum)
            os.fsync(file.fileno())
            _points.passed("synced")
    except FileExistsError as error:
        raise CheckpointWriteFailed(f"worker {worker} finds that {path} exists already", file_name) from error
    except BaseException as error:
        with contextlib.suppress(OSError):
            folder.remove(file_name)
        if not isinstance(error, OSError):
            raise
        text = f"worker {worker} cannot write {path} (tensor '{name}'): {error.strerror or error}"
        advice = "Make room there, or save to another directory"
        raise CheckpointWriteFailed(f"{text}. {advice}", file_name, name) from error
    return FileEntry(output.num_bytes, len(header), checksum_of(header), worker, host), entries


class _Output:
    """A file that is written from beginning to end.

    The kernel is told to begin with the disk while the rest is still being copied, so that little is left to wait for at the
    end: without that it begins when it is told to finish.
    """

    def __init__(self, descriptor: int, on_bytes: OnBytes) -> None:
        self.num_bytes = 0
        self._descriptor = descriptor
        self._on_bytes = on_bytes
        self._num_begun = 0

    def write(self, data: memoryview) -> None:
        while len(data):
            num_written = os.write(self._descriptor, data)
            self.num_bytes += num_written
            self._on_bytes(num_written)
            data = data[num_written:]
        if self.num_bytes - self._num_begun >= _BEGIN_EVERY and _sync_file_range is not None:
            _sync_file_range(
                self._descriptor, self._num_begun, self.num_bytes - self._num_begun, _SYNC_FILE_RANGE_WRITE
            )
            self._num_begun = self.num_bytes


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call that begins to write a part of a file to disk; it is only for speed, so its errors do not matter."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range: Final = _find_sync_file_range()
_SYNC_FILE_RANGE_WRITE: Final = 2


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    fields: dict[str, Any] = {_RESERVED: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        end = offset + num_bytes_of(tensor.dtype, shape)
        stored = {"dtype": stored_name(tensor.dtype), "shape": stored_shape(tensor.dtype, shape)}
        fields[name] = {**stored, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(output: _Output, tensor: torch.Tensor) -> str:
    """Checksum and write piece by piece; returns the checksum."""
    data, owner = as_bytes(tensor.cpu().resolve_conj().resolve_neg())
    view, checksum = memoryview(data), 0
    for start in range(0, len(view), _PIECE):
        piece = view[start : start + _PIECE]
        checksum = zlib.crc32(piece, checksum)
        output.write(piece)
    del owner  # lived until here: the view does not keep it
    return show_checksum(checksum)
