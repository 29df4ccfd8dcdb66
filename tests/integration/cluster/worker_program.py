"""The program of a process that `process_scheduler` starts: ``worker_program.py CHANNEL HOST LOCAL_INDEX ADDRESS``."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

from cluster.process_scheduler import receive, send
from gradwire.cluster.remote_worker import RemoteWorker


def answer(channel: socket.socket, worker: RemoteWorker) -> None:
    with contextlib.suppress(OSError):
        while (message := receive(channel)) is not None:
            send(channel, worker.handle(message))


def main() -> None:
    descriptor, host, local_index, address = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    worker = RemoteWorker(address=address or None, host=host, local_index=int(local_index))
    threading.Thread(target=answer, args=(channel, worker), daemon=True).start()
    reason = worker.serve()
    if reason is not None:
        print(f"ended because {reason}", flush=True)
    # The usual end of an interpreter would wait for threads of calls that still run.
    os._exit(0 if reason is None else 1)


if __name__ == "__main__":
    main()
