"""Key-value stores that the processes of a run share while they start: a private folder, or torch's store."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any, Protocol

from gradwire.errors import ConfigurationError, RendezvousFailed

_MAX_VALUE_BYTES = 4 << 20
_OTHER_FOLDER = "choose another one (TMPDIR, or folder= of Cluster.slurm)"


class KeyValueStore(Protocol):
    """A key-value store shared by processes. Keys are letters, digits, dots and dashes."""

    where: str  # for messages

    def set(self, key: str, value: bytes) -> None:
        """Set a value atomically.

        Raises:
            RendezvousFailed: The store is no longer available.
        """

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if there is none yet.

        Raises:
            RendezvousFailed: The store is no longer available.
        """

    def close(self) -> None:
        """Release the store. Idempotent."""


class FolderStore:
    """One file for each key, in a folder that no other user can write to.

    So what is in it comes from this user, or from the machine's administrator. It need not exist when the store is made: one
    process makes it (`make_private_folder`), and the others find nothing until then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_checked = False
        self.where = str(folder)

    def set(self, key: str, value: bytes) -> None:
        draft = self._folder / f".{secrets.token_hex(8)}"
        try:
            self._check()
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())  # other machines may see it through a network file system
            draft.replace(self._folder / key)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise RendezvousFailed(f"cannot write to {self._folder}: {error.strerror}") from error

    def get(self, key: str) -> bytes | None:
        try:
            self._check()
            os.listdir(
                self._folder
            )  # makes a network file system look again, where it remembers that a file is missing
            with open(self._folder / key, "rb") as file:
                return file.read(_MAX_VALUE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RendezvousFailed(f"cannot read {self._folder / key}: {error.strerror}") from error

    def close(self) -> None:
        return

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self) -> None:
        """Look whose folder it is, when it is first found: what is the user's own cannot be exchanged by others later."""
        if not self._is_checked:
            _check_private(self._folder)
            self._is_checked = True


class TorchStore:
    """torch's `TCPStore`, which others can read and write."""

    def __init__(self, store: Any, where: str, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.where = where

    def set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(f"{self._prefix}/{key}", value)
        except (RuntimeError, AttributeError) as error:
            raise self._gone(error) from error

    def get(self, key: str) -> bytes | None:
        full = f"{self._prefix}/{key}"
        try:
            return bytes(self._store.get(full)) if self._store.check([full]) else None
        except (RuntimeError, AttributeError) as error:
            raise self._gone(error) from error

    def close(self) -> None:
        self._store = None  # a client of a store that is gone prints C++ stack traces when it is used

    def _gone(self, error: Exception) -> RendezvousFailed:
        first = str(error).partition("\n")[0]
        return RendezvousFailed(f"the store at {self.where} is no longer available: {first}")


def make_private_folder(folder: Path) -> Path:
    """Create a folder accessible only to its owner; an existing one must not be writable by others.

    Raises:
        ConfigurationError: The folder is writable by others, belongs to another user, or cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
    except OSError as error:
        raise ConfigurationError(f"cannot create the folder {folder}: {error.strerror}; {_OTHER_FOLDER}") from error
    return folder


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{folder} is a link or a file, not a folder; {_OTHER_FOLDER}")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(f"{folder} belongs to another user; {_OTHER_FOLDER}")
    if mode & 0o022:
        raise ConfigurationError(
            f"{folder} is writable by other users (mode {mode:o}); run `chmod 700 {folder}`, or {_OTHER_FOLDER}"
        )
