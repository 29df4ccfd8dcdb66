"""The two process attributes that Python has no call for."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Lets the kernel kill this process when the thread that forked it ends.

    The parent must fork from a thread that lives as long as the process itself.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before the kernel knew that we care


def name_process(name: str) -> None:
    """Sets the name that ``ps -o comm`` and ``top`` show; the kernel keeps the first 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
