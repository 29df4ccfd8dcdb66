"""Settings of the process itself in the kernel: that it ends with its parent, and the name that tools show."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46  # fields of /proc/<pid>/stat, counted from the one after the name

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that forked it ends.

    The parent must fork from a thread that lives as long as the process itself.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before the line above


def name_process(name: str) -> None:
    """Set the names that tools show for this process.

    ``top`` and ``ps -o comm`` show ``gw-<name>``, of which the kernel keeps 15 bytes. ``ps aux``, ``htop`` and
    ``nvidia-smi`` show the command line, which becomes ``gradwire:<name>``.
    """
    _libc.prctl(_PR_SET_NAME, f"gw-{name}".encode(), 0, 0, 0)
    with contextlib.suppress(OSError, IndexError, ValueError):  # /proc is missing or closed: it is only a name
        _overwrite_arguments(f"gradwire:{name}".encode())


def _overwrite_arguments(title: bytes) -> None:
    """Write over the memory that the command line is read from. Python has copied the arguments long before."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:  # a wrong address is an error there, not a crash
        memory.seek(begin)
        memory.write(title[: end - begin - 1].ljust(end - begin, b"\0"))
