"""A worker's socket folder: private, removed with its worker, and removed for a worker that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

from gradwire.transports.unix import SocketFolder


def test_is_private_and_removed() -> None:
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_one_of_a_killed_process_is_removed_by_the_next() -> None:
    program = (
        "from gradwire.transports.unix import SocketFolder; f = SocketFolder(); print(f.path, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    SocketFolder().close()
    assert os.path.isdir(path), "the folder of a process that lives must stay"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    SocketFolder().close()
    assert not os.path.exists(path)
