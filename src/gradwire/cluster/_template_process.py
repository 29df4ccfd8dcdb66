"""The driver's end of the template process, and the one that is kept for the next cluster.

A template serves one launcher at a time. When a cluster is closed its template stays for the next one, which then
starts in milliseconds; the interpreter's exit ends it. Should several clusters be open at once each has its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from gradwire.cluster._control import (
    FromTemplate,
    TemplateReady,
    ToTemplate,
    make_pair,
    receive_message,
    send_message,
    text_path,
)
from gradwire.errors import ConfigurationError, WorkerStartFailed

# The path comes first: gradwire and torch must be the driver's own, wherever it found them.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from gradwire.cluster._template import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split())"
)
# OpenBLAS starts its threads when it is loaded; OpenMP and MKL count them then.
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SEND_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 8.0


class TemplateProcess:
    """A template process as its driver sees it."""

    def __init__(self, timeout_s: float, modules: Sequence[str] = ()) -> None:
        """Starts it and waits until it can fork.

        Args:
            timeout_s: How long it may take.
            modules: It imports these, beside torch: they must start no thread.

        Raises:
            WorkerStartFailed: The template ended or was not ready in time.
        """
        self.modules = frozenset(modules)
        self._channel, theirs = make_pair()
        self._channel.settimeout(_SEND_TIMEOUT_S)
        with theirs:
            self._process = _spawn(theirs, modules)
        try:
            self._wait_ready(time.monotonic() + timeout_s)
        except BaseException:
            self.close(force=True)
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """The channel's descriptor, for a selector."""
        return self._channel.fileno()

    def send(self, message: ToTemplate, fds: tuple[int, ...] = ()) -> None:
        """Sends a request. May be called from any thread: a packet is never torn."""
        send_message(self._channel, message, fds)

    def receive(self) -> FromTemplate | None:
        """Reads one message; None is the end of the template."""
        message, _ = receive_message(self._channel)
        assert message is None or isinstance(message, FromTemplate), message
        return message

    def close(self, *, force: bool = False) -> None:
        """Ends the process and with it all of its workers. May be called again."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(
                socket.SHUT_RDWR
            )  # unlike close, it reaches the template past copies of the descriptor
        if force:
            self._process.kill()
        try:
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        finally:
            self._channel.close()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _wait_ready(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerStartFailed("the template process did not import torch in time; raise start_timeout")
        message = self.receive()
        if not isinstance(message, TemplateReady):
            raise WorkerStartFailed(
                f"the template process ended before it was ready. It printed:\n{self._last_words()}"
            )
        if message.num_threads != 1:
            raise WorkerStartFailed(
                f"the template process has {message.num_threads} threads after importing torch and cannot fork safely; "
                "something in this environment starts threads when Python does (a .pth file or sitecustomize?)"
            )

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        self._process.kill()  # or the read below might wait
        assert self._process.stdout is not None
        return self._process.stdout.read().decode(errors="replace")


def _check_platform() -> None:
    if not sys.platform.startswith("linux") or not hasattr(os, "fork"):
        raise ConfigurationError("Cluster.local needs Linux: it forks its workers from a template process")
    if not sys.executable:
        raise ConfigurationError("Cluster.local cannot tell which Python runs this program: sys.executable is empty")


def _spawn(channel: socket.socket, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    options = [f"-W{option}" for option in sys.warnoptions]
    arguments = [str(channel.fileno()), str(os.getpid()), " ".join(modules), *text_path()]
    return subprocess.Popen(
        [sys.executable, *options, "-c", _PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[channel.fileno()],
        env={**os.environ, **_SINGLE_THREADED},
        start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
    )


_lock = threading.Lock()  # guards _idle
_idle: TemplateProcess | None = None
_inherited: TemplateProcess | None = None  # the parent's, in a forked process: kept so that nothing finalises it there


def borrow_template(timeout_s: float) -> TemplateProcess:
    """The idle template, or a new one. Give it back with `return_template`, or close it.

    Raises:
        ConfigurationError: This platform cannot fork, or does not say where its interpreter is.
        WorkerStartFailed: A new one was needed and could not be started in time.
    """
    global _idle
    _check_platform()
    with _lock:
        template, _idle = _idle, None
    if template is None:
        return TemplateProcess(timeout_s)
    if not template.is_alive:
        template.close()
        return TemplateProcess(timeout_s)
    return template


def return_template(template: TemplateProcess) -> None:
    """Keeps a template without workers for the next cluster."""
    global _idle
    with _lock:
        is_surplus = _idle is not None
        if not is_surplus:
            _idle = template
    if is_surplus:
        template.close()


def prepare_template(modules: Sequence[str], timeout_s: float) -> None:
    """Sees to it that the template that waits for the next cluster has imported these modules.

    What they cost is then paid once, not in every worker, and their memory is shared.

    Raises:
        ConfigurationError: As `borrow_template`.
        WorkerStartFailed: A new one was needed and could not be started in time, or a module cannot be imported.
    """
    global _idle
    _check_platform()
    with _lock:
        template, _idle = _idle, None
    if template is not None and not (template.is_alive and template.modules.issuperset(modules)):
        template.close()
        template = None
    return_template(template or TemplateProcess(timeout_s, modules))


def close_idle_template() -> None:
    """Ends the template that waits for the next cluster, if there is one."""
    global _idle
    with _lock:
        template, _idle = _idle, None
    if template is not None:
        template.close()


def _forget_after_fork() -> None:
    """A process that the driver forks has no right to the driver's template."""
    global _idle, _inherited, _lock
    _lock = threading.Lock()
    _inherited, _idle = _idle, None


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close_idle_template)
