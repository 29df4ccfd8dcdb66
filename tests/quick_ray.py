"""Ray's workers as forks of a process that has imported torch and gradwire.

    raylet ---- starts ----> this script ---- arguments, environment, descriptors ----> source ---- fork ----> worker

Each would import them for itself otherwise. Ray knows a worker by the id in its arguments and learns its process id from the
worker itself, so this script ends when the worker has begun. The worker imports Ray itself, because Ray reads its settings
from the environment then. What needs a fresh interpreter is said in `quick_python`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quick_python

_SOURCE = "QUICK_RAY_SOURCE"  # in the environment of Ray's nodes: the socket of the source
_TIMEOUT_S = 60.0


@contextlib.contextmanager
def forked_workers(folder: str) -> Iterator[dict[str, Any]]:
    """Start a source; yield the options for nodes of Ray whose workers are to be its forks."""
    path = os.path.join(folder, "source")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(100)
        source = quick_python.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    try:
        yield {"worker_path": __file__, "env_vars": {_SOURCE: path}}
    finally:
        source.kill()
        source.wait(_TIMEOUT_S)


def _ask_for_worker(arguments: list[str]) -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    environment = dict(os.environ)
    environment.pop(quick_python.NESTED, None)
    request = quick_python.Request(
        arguments=[str(Path(ray.origin).parent / "_private" / "workers" / "default_worker.py"), *arguments],
        environment=environment,
        folder=os.getcwd(),
        namespace=None,
        new_session=True,  # Ray ends the process group of a worker with it
        prepare=None,
        targets=[0, 1, 2],
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(_TIMEOUT_S)
        channel.connect(environment[_SOURCE])
        socket.send_fds(channel, [json.dumps(request).encode()], request["targets"])
        assert channel.recv(1), "the process that forks workers has ended"


def _serve(listener: socket.socket) -> None:
    """Fork workers until this process is killed."""
    path = sys.path[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    while True:
        channel, _ = listener.accept()
        with channel, contextlib.suppress(OSError):  # one that asks may be killed, with its node for instance
            channel.settimeout(_TIMEOUT_S)
            message, descriptors, _, _ = socket.recv_fds(channel, quick_python.MAX_BYTES, 3)
            if message and os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                quick_python.be_program()
                quick_python.become(json.loads(message), descriptors, path)  # which closes all other descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(b"0")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        quick_python.be_source()
        assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread alone"
        if os.getppid() == int(sys.argv[3]):  # else it has died already
            _serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        _ask_for_worker(sys.argv[1:])
