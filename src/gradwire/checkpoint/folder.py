"""The door to the files of a checkpoint: an open directory, and the names that files of a checkpoint can have.

Files of a checkpoint are opened, made, renamed and removed here and nowhere else, so what is refused here cannot be reached,
whoever wrote the index or sent the order that names a file:

- a name that no file of a checkpoint has; it is a single component, and never leads elsewhere
- a link, in the place of the file or of a directory below the one that a peer may use (`root`)
- anything but a regular file: to open a pipe or a device can take for ever

The directory is opened once. What is done with its files afterwards concerns that directory, also if another one is put in
its place meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gradwire.checkpoint._index import FILE_NAME, GENERATION
from gradwire.errors import CheckpointError

INDEX_NAME: Final = "index.json"
WRITER_LOCK: Final = ".gradwire-writer"
READERS_LOCK: Final = ".gradwire-readers"

_OF_ONE_SAVE: Final = re.compile(rf"{FILE_NAME.pattern}|{GENERATION.pattern}\.(?:begin|index)")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def is_of_one_save(name: str) -> bool:
    """Return whether a file of that name belongs to one save, and goes with it."""
    return _OF_ONE_SAVE.fullmatch(name) is not None


class Folder:
    """An open directory. Close it, or use it in a ``with`` statement.

    Args:
        path: Where.
        root: A directory that `path` must be in: below it, no component may be a link.

    Raises:
        OSError: There is no such directory.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self._descriptor = os.open(path, _DIRECTORY) if root is None else _open_below(root, path.relative_to(root))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- files -------------------------------------------------------------------------------------------------------

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a file.

        Raises:
            OSError: It is not there, a link, or not a regular file.
            CheckpointError: No file of a checkpoint has that name.
        """
        descriptor = os.open(_checked(name), flags | _FILE, 0o666, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return descriptor

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Open a file to be read inside the block, as `open_file` does."""
        descriptor = self.open_file(name)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def make_file(self, name: str) -> int:
        """Return a descriptor of a new file, to be written.

        Raises:
            FileExistsError: There is something of that name.
        """
        return self.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def has(self, name: str) -> bool:
        """Return whether there is a regular file of that name."""
        try:
            found = os.stat(_checked(name), dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode)

    def names(self) -> list[str]:
        """Return the names of all files that belong to one save."""
        return [name for name in os.listdir(self._descriptor) if is_of_one_save(name)]

    def remove(self, name: str) -> None:
        """Remove a file, or the link in its place."""
        os.unlink(_checked(name), dir_fd=self._descriptor)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name, in the place of what had it."""
        os.rename(_checked(name), _checked(new_name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def sync(self) -> None:
        """Put the names of files on disk."""
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
    if not is_of_one_save(name) and name not in (INDEX_NAME, WRITER_LOCK, READERS_LOCK):
        raise CheckpointError(f"{name!r:.200} is not the name of a file of a checkpoint", name[:200])
    return name
