"""Reading and writing the safetensors files of a checkpoint.

Places, shapes and dtypes of tensors are known from the index, so the header of a file is only compared, never
interpreted. All bytes are checked before anything is loaded, and then read again into their destination. Every place is
compared with the size of the file before memory is allocated. Files are read and never mapped: a file that is cut off
while it is mapped, or a bad disk below it, ends the process with a signal, while a read ends with an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from gradwire.checkpoint.directory import Folder, failpoint
from gradwire.checkpoint.index import (
    DTYPES,
    NAMES,
    STORED_NAMES,
    FileEntry,
    TensorEntry,
    checksum_of,
    show_checksum,
)
from gradwire.checkpoint.tree import Node, decode
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointError, CheckpointMissing, CheckpointWriteFailed
from gradwire.shard.layout import Box, whole
from gradwire.wire.tensors import as_bytes

OnBytes = Callable[[int], None]
"""Called with the number of bytes that were read or written since the last call."""

_PIECE: Final = 2 << 20  # small enough to stay in the cache until its checksum is computed
_STAGED_ELEMENTS: Final = (32 << 10) - 1  # torch copies more with several threads, and waits for the slowest one
_LARGEST_ITEM: Final = max(dtype.itemsize for dtype in DTYPES.values())
_RESERVED: Final = "__metadata__"  # reserved in headers
_IN_TWO_PARTS: Final = (torch.complex128, torch.complex32)
_WRITE_BACK_EVERY: Final = 16 << 20
_ALIGNMENT: Final = 64  # of the first tensor


# -- writing ------------------------------------------------------------------------------------------------------------


class TensorSet:
    """The tensors that one worker writes, by name. The same memory is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def place(self, path: str, tensor: torch.Tensor) -> str:
        """Add a tensor, and return the name of the one that is stored."""
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
        problem = f"its layout is {tensor.layout}; save its indices and values"
    elif tensor.dtype not in NAMES:
        problem = f"its dtype, {tensor.dtype}, is not supported; convert it first"
    elif tensor.is_meta:
        problem = "it is on the meta device and has no values"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"it is a {type(tensor).__name__}, not a plain tensor"
        if type(tensor).__name__ == "DTensor":
            problem += "; save the result of gradwire.shard.from_dtensor"
    if problem:
        raise CannotSave(f"tensor '{path}' cannot be saved: {problem}", tensor=path)


def _identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors with the same memory and view; None for those without memory."""
    if tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, flags


def write_file(
    folder: Folder, file_name: str, tensors: Mapping[str, torch.Tensor], worker: str, host: str, on_bytes: OnBytes
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """Write a new file, and sync it to disk; if that fails, no file is left.

    The tensors must not change meanwhile. An error names the file and the tensor that could not be written.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # so that all are aligned
    header, entries, name = _header(ordered), {}, ""
    path = folder.path / file_name
    try:
        with (
            os.fdopen(folder.make_file(file_name), "wb", buffering=0) as file,
            contextlib.ExitStack() as undo,
        ):
            undo.callback(folder.remove_where, lambda name: name == file_name)
            failpoint("opened")
            output = _Output(file.fileno(), on_bytes)
            output.write(memoryview(header))
            for number, (name, tensor) in enumerate(ordered.items()):
                if number == len(ordered) // 2:
                    failpoint("half")
                offset, checksum = output.num_bytes, _write_tensor(output, tensor)
                entries[name] = TensorEntry(file_name, offset, NAMES[tensor.dtype], tuple(tensor.shape), checksum)
            os.fsync(file.fileno())
            failpoint("synced")
            undo.pop_all()
    except FileExistsError as error:
        raise CheckpointWriteFailed(f"worker {worker} cannot write {path}: it already exists", file_name) from error
    except OSError as error:
        what = f" (tensor '{name}')" if name else ""
        text = f"worker {worker} cannot write {path}{what}: {error.strerror or error}"
        advice = "Save to another directory, which every worker can write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "Free some space there, or save to another directory"
        raise CheckpointWriteFailed(f"{text}. {advice}", file_name, name) from error
    return FileEntry(output.num_bytes, len(header), checksum_of(header), worker, host), entries


class _Output:
    """A file that is written sequentially.

    The kernel starts writing to disk while the rest is still being copied, so that the final sync is short.
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
        num_waiting = self.num_bytes - self._num_begun
        if num_waiting >= _WRITE_BACK_EVERY and _sync_file_range is not None:
            _sync_file_range(self._descriptor, self._num_begun, num_waiting, _SYNC_FILE_RANGE_WRITE)
            self._num_begun = self.num_bytes


# The system call that begins to write a part of a file to disk. It is only for speed, so its errors do not matter.
_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE: Final = 2


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    fields: dict[str, Any] = {_RESERVED: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        fields[name] = {
            "dtype": STORED_NAMES[NAMES[tensor.dtype]],
            "shape": (*tensor.shape, 2) if tensor.dtype in _IN_TWO_PARTS else tuple(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(output: _Output, tensor: torch.Tensor) -> str:
    checksum = 0
    for part in _on_host(tensor.resolve_conj().resolve_neg()):
        data, owner = as_bytes(part)
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            checksum = zlib.crc32(piece, checksum)
            output.write(piece)
        del owner  # kept alive until here: the view does not keep it
    return show_checksum(checksum)


def _on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in the host's memory; one of a device in pieces, each in the memory of the one before it."""
    if tensor.is_cpu:
        yield tensor
        return
    from gradwire.wire import device_copies  # only programs with accelerators have it

    flat, num_elements = tensor.contiguous().view(-1), _PIECE // tensor.dtype.itemsize
    staging = _allocate_pinned(min(_PIECE, flat.nbytes))
    for start in range(0, flat.numel(), num_elements):
        piece, copies = flat[start : start + num_elements], device_copies.HostCopies()
        on_host = copies.launch(piece, staging[: piece.nbytes])
        copies.wait()
        yield on_host


def _allocate_pinned(num_bytes: int) -> torch.Tensor:
    from gradwire.wire import device_copies

    found = device_copies.allocate_pinned(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8) if found is None else found


# -- reading ------------------------------------------------------------------------------------------------------------


def check_headers(folder: Folder, files: Mapping[str, FileEntry]) -> None:
    buffer = bytearray(_PIECE)
    for name, entry in files.items():
        with contextlib.closing(_File(folder, name, "")) as file:
            if file.num_bytes != entry.num_bytes:
                raise file.damaged("", f"it has {file.num_bytes:,} bytes instead of {entry.num_bytes:,}")
            if file.checksum("", 0, entry.header_bytes, buffer) != entry.checksum:
                raise file.damaged("", "its header has changed")


def check_tensors(folder: Folder, entries: Mapping[str, TensorEntry], on_bytes: OnBytes) -> None:
    buffer = bytearray(_PIECE)
    by_file: dict[str, list[str]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append(name)
    for file_name, names in by_file.items():
        with contextlib.closing(_File(folder, file_name, names[0])) as file:
            for name in names:
                entry = entries[name]
                if file.checksum(name, entry.offset, entry.num_bytes, buffer, on_bytes) != entry.checksum:
                    raise file.damaged(name, "its bytes have changed")


def files_of(entries: Iterable[TensorEntry], files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    return {entry.file: files[entry.file] for entry in entries}


class _File:
    """An open file of a checkpoint; errors name the tensor that is read."""

    def __init__(self, folder: Folder, name: str, tensor: str) -> None:
        self._path = folder.path / name
        try:
            self._descriptor = folder.open_file(name)
        except FileNotFoundError as error:
            what = f", which has tensor '{tensor}'," if tensor else ""
            text = f"the file {self._path} of the checkpoint{what} is missing. Put it back, or load another checkpoint"
            raise CheckpointMissing(text, name, tensor) from error
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE):  # the file may be good
                text = f"cannot open {self._path}: {error.strerror}. Correct that, or load another checkpoint"
                raise CheckpointError(text, name, tensor) from error
            raise self.damaged(tensor, f"it cannot be opened: {error.strerror}") from error
        self.num_bytes = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)

    def checksum(
        self, tensor: str, offset: int, num_bytes: int, buffer: bytearray, on_bytes: OnBytes = lambda _: None
    ) -> str:
        self.check_place(tensor, offset, num_bytes)
        view, checksum, end = memoryview(buffer), 0, offset + num_bytes
        for start in range(offset, end, len(view)):
            piece = view[: min(len(view), end - start)]
            self.read(tensor, start, piece)
            checksum = zlib.crc32(piece, checksum)
            on_bytes(len(piece))
        return show_checksum(checksum)

    def read(self, tensor: str, offset: int, buffer: memoryview) -> None:
        while len(buffer):
            try:
                num_read = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise self.damaged(tensor, f"it cannot be read: {error.strerror}") from error
            if num_read == 0:
                raise self.damaged(tensor, "the file ends too early")
            buffer = buffer[num_read:]
            offset += num_read

    def check_place(self, tensor: str, offset: int, num_bytes: int) -> None:
        """Compare a place with the size that the file had when it was opened."""
        if offset + num_bytes > self.num_bytes:
            raise self.damaged(tensor, "the file ends too early")

    def damaged(self, tensor: str, why: str) -> CheckpointDamaged:
        what = f"tensor '{tensor}' in {self._path}" if tensor else f"the file {self._path}"
        return CheckpointDamaged(f"{what} is damaged: {why}. Load another checkpoint", self._path.name, tensor)


class TensorReader:
    """Reads tensors of a checkpoint, where possible directly into their destination. Check the files first.

    Close it, or use it in a ``with`` statement: it keeps files open that it has read from. The folder must be open when
    a tensor of a file is read for the first time.
    """

    def __init__(self, folder: Folder, entries: Mapping[str, TensorEntry]) -> None:
        self._folder = folder
        self.entries = entries
        self._files: dict[str, _File] = {}
        self._staging: dict[bool, torch.Tensor] = {}  # by whether it is pinned; created when needed

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def decode(self, node: Node, keeps_ties: bool = False) -> Any:
        """Return the value of a node; with `keeps_ties`, a tensor that was saved once and appears twice is one tensor."""
        return decode(node, functools.cache(self.copied) if keeps_ties else self.copied, self)

    def copied(self, name: str) -> torch.Tensor:
        """Return a tensor with its own memory."""
        entry = self.entries[name]
        self._file_of(name)  # checks its size before memory is allocated
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_into(made, name)
        return made

    def read_into(self, target: torch.Tensor, name: str, region: Box | None = None) -> None:
        """Read a tensor, or a part of it, into a tensor of the same shape; the values are converted to its dtype.

        A tensor that is read as a whole is compared with its checksum again. On an error, part of it may have been filled.
        """
        entry, file = self.entries[name], self._file_of(name)
        all_of_it = whole(entry.shape)
        region = region or all_of_it
        if not region.num_elements:
            return
        target = target.detach()
        dtype, strides, checksum = DTYPES[entry.dtype], _strides(entry.shape), 0
        is_plain = _is_plain(target, dtype)
        if is_plain:
            torch.autograd.graph.increment_version(target)  # torch does not notice writes to its memory from outside
        is_copied_by_torch = not is_plain and target.is_cpu
        for box in _spans(region, strides, _STAGED_ELEMENTS if is_copied_by_torch else _PIECE // dtype.itemsize):
            part = target[box.slices_in(region)]
            num_elements = _span(box.sizes, strides)
            is_direct = is_plain and num_elements == box.num_elements
            staged = None if is_direct else self._staged(num_elements * dtype.itemsize, target)
            buffer = _memory_of(part if staged is None else staged)
            start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
            file.read(name, entry.offset + start * dtype.itemsize, buffer)
            if region == all_of_it:
                checksum = zlib.crc32(buffer, checksum)
            if staged is not None:
                with torch.no_grad():
                    _fill(part, staged.view(dtype).as_strided(box.sizes, strides))
        if region == all_of_it and show_checksum(checksum) != entry.checksum:
            raise file.damaged(name, "its bytes have changed")

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def _file_of(self, name: str) -> _File:
        entry = self.entries[name]
        if entry.file not in self._files:
            self._files[entry.file] = _File(self._folder, entry.file, name)
        file = self._files[entry.file]
        file.check_place(name, entry.offset, entry.num_bytes)
        return file

    def _staged(self, num_bytes: int, target: torch.Tensor) -> torch.Tensor:
        """Return reusable memory, pinned for a target on a device: memory that was never used is slow."""
        is_pinned = not target.is_cpu
        if is_pinned not in self._staging:
            size = max(_PIECE, _STAGED_ELEMENTS * _LARGEST_ITEM)
            self._staging[is_pinned] = _allocate_pinned(size) if is_pinned else torch.empty(size, dtype=torch.uint8)
        return self._staging[is_pinned][:num_bytes]


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    if target.is_cpu or target.is_meta:
        target.copy_(values)
        return
    from gradwire.wire import device_copies

    device_copies.fill(target, values)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the memory of a tensor holds exactly its values, contiguously."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    is_as_it_looks = tensor.dtype is dtype and not tensor.is_conj() and not tensor.is_neg()
    return is_as_it_looks and tensor.is_contiguous() and not tensor.is_inference()


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a plain tensor, which must be kept alive meanwhile."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from the first one to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _spans(region: Box, strides: tuple[int, ...], most_without_gaps: int) -> Iterator[Box]:
    """Split a part of a tensor into boxes that can be read at once, in the order of the file.

    Small gaps between the elements are read, too. Without gaps, up to `most_without_gaps` elements are read at once.
    """
    span = _span(region.sizes, strides)
    most = most_without_gaps if span == region.num_elements else _STAGED_ELEMENTS
    if span <= most:
        yield region
        return
    dim = next(dim for dim, size in enumerate(region.sizes) if size > 1)
    offsets, sizes, stride = region.offsets, region.sizes, strides[dim]
    rows = max(1, (most - _span(sizes[dim + 1 :], strides[dim + 1 :])) // stride + 1)
    for start in range(0, sizes[dim], rows):
        inner_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        inner_sizes = (*sizes[:dim], min(rows, sizes[dim] - start), *sizes[dim + 1 :])
        yield from _spans(Box(inner_offsets, inner_sizes), strides, most_without_gaps)


# -- tensors that are read when they are used -----------------------------------------------------------------------------

_KNOWN: Final = (torch.Tensor.shape.__get__, torch.Tensor.size)  # type: ignore[attr-defined]


class StoredTensor(torch.Tensor):
    """A saved tensor that is read when it is used. Create one with `stored`.

    Its shape is known without reading, and ``x.copy_(stored)`` reads into ``x``. For any other operation, such as hooks
    that scale or slice it, it is read into its own memory first.
    """

    _fill: Callable[[torch.Tensor], None]
    _dtype: torch.dtype
    _failures: list[CheckpointError]
    _loaded: torch.Tensor | None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if function is torch.Tensor.copy_ and len(args) > 1:
            target, source = args[:2]
            is_first = isinstance(source, cls) and source._loaded is None and not isinstance(target, cls)
            if is_first and target.shape == source.shape:
                source._read_into(target)
                return target
        return function(*_plain(args), **_plain(kwargs or {}))

    def _read(self) -> torch.Tensor:
        """Return its values; the same tensor each time, because it may have been changed in place."""
        if self._loaded is None:
            values = torch.empty(self.shape, dtype=self._dtype)
            self._read_into(values)
            self._loaded = values
        return self._loaded

    def _read_into(self, target: torch.Tensor) -> None:
        try:
            self._fill(target)
        except CheckpointError as error:
            self._failures.append(error)
            raise


def _plain(value: Any) -> Any:
    """Return arguments of a function with stored tensors replaced by their values."""
    if isinstance(value, StoredTensor):
        return value._read()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value


def stored(
    shape: Sequence[int], dtype: torch.dtype, fill: Callable[[torch.Tensor], None], failures: list[CheckpointError]
) -> StoredTensor:
    """Return a tensor that is read with `fill`, into a tensor of that shape, when it is used.

    `failures` gets each error of `fill`, because torch turns errors of a copy into text.
    """
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(StoredTensor)
    made._fill, made._dtype, made._failures, made._loaded = fill, dtype, failures, None
    return made
