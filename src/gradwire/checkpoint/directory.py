"""The directory of a checkpoint, and the only door to its files: locks, and how a new checkpoint replaces the old one.

    index.json                             the checkpoint: it names the files that belong to it
    g0007-3f9a1c2b-worker0.safetensors     the tensors that worker0 wrote in generation 7
    g0007-3f9a1c2b-worker1.safetensors
    .gradwire-writer                       locked during a save; names the worker that saves
    .gradwire-readers                      locked during loads

A save writes files of a new generation beside the old ones, then renames the new index over the old, and only then removes
the files that the new index does not name. A crash in between leaves the old checkpoint or the new one, and files that the
next save removes.

Locks are the kernel's (``flock``): they end with the process that holds them. Loading does not block saving; it only
delays the removal of old files until a later save.

Files are opened relative to an open directory and by names that were checked; links are never followed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from gradwire import _interrupts
from gradwire.checkpoint.index import FILE_NAME, GENERATION, Index, dump, parse
from gradwire.errors import CheckpointBusy, CheckpointError, CheckpointMissing, CheckpointWriteFailed

INDEX_NAME: Final = "index.json"
WRITER_LOCK: Final = ".gradwire-writer"
READERS_LOCK: Final = ".gradwire-readers"

_OF_ONE_SAVE: Final = re.compile(rf"{FILE_NAME.pattern}|{GENERATION.pattern}\.(?:begin|index)")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LOCK_WAIT_S: Final = 10.0  # how long a reader waits while old files are removed
_POLL_S: Final = 0.01

failpoint_hook: Callable[[str], None] | None = None
"""For tests: called with the name of each failpoint of a save, where the process can stop or die.

driver    locked  announced  described                     files-written  index-written  index-renamed  cleaned
owner                                   opened  half  synced
"""


def failpoint(name: str) -> None:
    if failpoint_hook is not None:
        failpoint_hook(name)


class Folder:
    """An open directory. With a `root`, `path` must be in it, and no component below it may be a link."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self._descriptor = os.open(path, _DIRECTORY) if root is None else _open_below(root, path.relative_to(root))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        descriptor = os.open(_checked(name), flags | _FILE, 0o666, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return descriptor

    def make_file(self, name: str) -> int:
        return self.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_lock(self, name: str) -> int | None:
        """Return a descriptor of a file to lock; None in a read-only directory, where nothing can be removed either."""
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            with contextlib.suppress(OSError):
                return self.open_file(name, flags)
        return None

    def has(self, name: str) -> bool:
        try:
            found = os.stat(_checked(name), dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode)

    def names(self) -> list[str]:
        """Return the names of all files that belong to one save."""
        return [name for name in os.listdir(self._descriptor) if _OF_ONE_SAVE.fullmatch(name)]

    def remove(self, name: str) -> None:
        os.unlink(_checked(name), dir_fd=self._descriptor)

    def remove_where(self, is_unwanted: Callable[[str], bool]) -> None:
        for name in filter(is_unwanted, self.names()):
            with contextlib.suppress(OSError):  # the next save tries again
                self.remove(name)

    def rename(self, name: str, new_name: str) -> None:
        os.rename(_checked(name), _checked(new_name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def sync(self) -> None:
        os.fsync(self._descriptor)


def _open_below(root: Path, below: Path) -> int:
    descriptor = os.open(root, _DIRECTORY)
    for part in below.parts:
        try:
            inner = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _checked(name: str) -> str:
    if not _OF_ONE_SAVE.fullmatch(name) and name not in (INDEX_NAME, WRITER_LOCK, READERS_LOCK):
        raise CheckpointError(f"{name!r:.200} is not a valid checkpoint file name", name[:200])
    return name


def file_name(generation: str, worker: str) -> str:
    return f"{generation}-{worker}.safetensors"


def check_file_name(name: str, generation: str) -> None:
    """Raise `CheckpointError` unless the name is that of a file of this save."""
    match = FILE_NAME.fullmatch(name)
    if match is None or match["generation"] != generation:
        raise CheckpointError(f"the file {name!r} does not belong to generation {generation!r}", name)


class Directory:
    """One directory with one checkpoint in it, or none yet.

    A directory that another worker has named must be in `root`: see `Folder`.
    """

    def __init__(self, path: str | os.PathLike[str], root: Path | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        self._root = root

    def open(self) -> Folder:
        return Folder(self.path, self._root)

    # -- reading -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Index]:
        """Yield the index; inside the block no save removes a file that it names."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._open_existing())
            self._read_index(folder)  # leave no lock where there is no checkpoint
            descriptor = folder.open_lock(READERS_LOCK)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                self._lock_shared(descriptor)
            yield self._read_index(folder)

    def read_index(self) -> Index:
        """Return the index as it is now; raises as `reading` does."""
        with self._open_existing() as folder:
            return self._read_index(folder)

    def _open_existing(self) -> Folder:
        try:
            return self.open()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._no_checkpoint() from error
        except OSError as error:
            raise CheckpointError(
                f"cannot open the checkpoint directory {self.path}: {error.strerror}", str(self.path)
            ) from error

    def _read_index(self, folder: Folder) -> Index:
        path = self.path / INDEX_NAME
        try:
            with os.fdopen(folder.open_file(INDEX_NAME), "rb") as file:
                data = file.read()
        except FileNotFoundError as error:
            raise self._no_checkpoint() from error
        except OSError as error:
            raise CheckpointError(f"cannot read the index {path}: {error}", str(path)) from error
        return parse(data, str(path))

    def _no_checkpoint(self) -> CheckpointMissing:
        return CheckpointMissing(f"there is no checkpoint in {self.path}: it has no {INDEX_NAME}", INDEX_NAME)

    # -- writing -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, worker: str) -> Iterator[str]:
        """Start a save and yield its generation; inside the block no other process can save here.

        If the block raises before the new index is in its place, all files of the generation are removed.
        """
        with contextlib.ExitStack() as stack:
            with _write_errors("create", self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                folder = stack.enter_context(self.open())
                descriptor = folder.open_file(WRITER_LOCK, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, descriptor)
            self._lock_writer(descriptor, worker)
            failpoint("locked")
            self._clean(folder)
            generation = self._next_generation(folder)
            stack.callback(self._end, folder, generation)
            with _write_errors("write to", self.path):
                os.close(folder.make_file(f"{generation}.begin"))
            failpoint("announced")
            yield generation

    def open_announced(self, generation: str, worker: str) -> Folder:
        """Open the directory for a worker that writes its file of a save that another worker started."""
        with contextlib.suppress(OSError):
            folder = self.open()
            if folder.has(f"{generation}.begin"):
                return folder
            folder.close()
        raise CheckpointWriteFailed(
            f"worker {worker} on {socket.gethostname()} cannot see the directory {self.path}, which this save has "
            f"started to write; save to a directory that all workers share",
            str(self.path),
        )

    def publish(self, index: Index) -> None:
        """Make a generation, whose files are written, the checkpoint; if that fails, the previous one stays."""
        name, data = f"{index.generation}.index", dump(index)
        with _write_errors("write", self.path / name), self.open() as folder:
            with os.fdopen(folder.make_file(name), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            folder.sync()  # the names of the files must be on disk before the index that names them
            failpoint("index-written")
            folder.rename(name, INDEX_NAME)
            failpoint("index-renamed")
            folder.sync()

    def _end(self, folder: Folder, generation: str) -> None:
        """Remove the files of a save that did not become the checkpoint, or all others if it did."""
        with contextlib.suppress(OSError):
            folder.remove(f"{generation}.begin")
        try:
            is_published = self._read_index(folder).generation == generation
        except CheckpointError:
            is_published = False
        if is_published:
            self._clean(folder)
            failpoint("cleaned")
        else:
            folder.remove_where(lambda name: name.startswith(generation))

    def _clean(self, folder: Folder) -> None:
        """Remove files of other generations than the checkpoint's: old ones, and those of interrupted saves.

        Nothing is removed during a load, or if it is not known which files belong to the checkpoint.
        """
        try:
            keep = set(self._read_index(folder).files)
        except CheckpointMissing:
            keep = set()
        except CheckpointError:
            return
        descriptor = folder.open_lock(READERS_LOCK)
        if descriptor is None:
            return
        try:
            if _try_lock(descriptor, fcntl.LOCK_EX):
                folder.remove_where(lambda name: name not in keep)
        finally:
            os.close(descriptor)

    def _next_generation(self, folder: Folder) -> str:
        names = folder.names()
        with contextlib.suppress(CheckpointError):
            names.append(self._read_index(folder).generation)
        numbers = [int(name[1:].partition("-")[0]) for name in names]
        return f"g{max(numbers, default=0) + 1:04}-{secrets.token_hex(4)}"

    # -- locks -------------------------------------------------------------------------------------------------------

    def _lock_writer(self, descriptor: int, worker: str) -> None:
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            try:
                owner = json.loads(os.pread(descriptor, 4096, 0))
                who = f"worker {owner['worker']} (process {owner['pid']} on {owner['host']}, since {owner['since']})"
            except (OSError, ValueError, KeyError, TypeError):
                who = "another process"
            raise CheckpointBusy(f"{who} is saving to {self.path}; wait for it, or save to another directory")
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        owner = {"worker": worker, "pid": os.getpid(), "host": socket.gethostname(), "since": now}
        with contextlib.suppress(OSError):  # only for messages; a full disk is noticed soon enough
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)

    def _lock_shared(self, descriptor: int) -> None:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(descriptor, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise CheckpointBusy(
                    f"another process has been removing old files from {self.path} for {_LOCK_WAIT_S:g} s; try again"
                )
            _interrupts.sleep(_POLL_S)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise CheckpointError(f"this file system cannot lock files: {error}; use one that can") from error
    return True


@contextlib.contextmanager
def _write_errors(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointWriteFailed(f"cannot {doing} {path}: {error.strerror or error}", path.name) from error
