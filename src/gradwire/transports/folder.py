"""A private temporary folder for a worker's socket, which does not outlive its worker.

A process that is killed cannot remove its folder. So each folder holds a file that its owner has locked; the kernel ends
the lock with the process, and whoever makes the next folder removes those that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "gradwire-"
_LOCK = "lock"


class SocketFolder:
    """Made with mode 0700 in the system's temporary folder.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has its name, so that nobody finds it unlocked.
        unnamed = self.path / f"{_LOCK}.new"
        self._descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    # No O_CREAT: a folder without the file is just being made, or is somebody else's.
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
