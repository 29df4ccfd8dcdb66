"""Python programs that start in milliseconds: forks of a process that has imported torch and gradwire.

    test ---- command, environment, folder, descriptors ----> source ---- fork ----> program
         <---- its process id ----

To import torch takes two seconds of a processor, and to take it apart at the end most of another: more than what most
programs of tests do. `Popen` and `run` are those of `subprocess` for commands that begin with ``sys.executable``. A program
is a child of the process that asked for it, so it can be waited for, signalled and killed like any other; it has its own
environment, folder, streams, session and main module.

What differs, and therefore needs a fresh interpreter: options of the interpreter (``-W``, ``-X``, ``-i``) and variables like
them, what an import does, how modules are taken apart at the end, variables that libraries read when they are loaded, and
the order of sets of texts, which is the same in all forks. Of each way to start a cluster, some tests stay with fresh
interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypedDict

_TESTS = Path(__file__).resolve().parent
_SOURCES = _TESTS.parent / "src"
_NAME = "gw-forkserver-t"  # the leak check knows a process of this kind, its channel and its pipe
_START_S = 60.0
MAX_BYTES = 1 << 17
_MAX_DESCRIPTORS = 64
NESTED = "QUICK_PYTHON"  # in the environment of a program: those that it starts are forks, too
_ROOM = " " * 20_000  # for environments of programs, where that of their source is
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_CLONE_NEWNET = 0x40000000
_LARGE_PAGE, _MADV_COLLAPSE = 2 << 20, 25
_OPTIONS = ("-i", "-W", "-X")  # of an interpreter, which a fork cannot have
_VARIABLES = ("PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONDEVMODE", "PYTHONOPTIMIZE")  # the same
_USED_BY_MOST = ("gradwire.testing", "pytest")  # else each program and each worker imports them anew
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


_PlainPopen = subprocess.Popen  # also where another class takes its place
_plain_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds


class Request(TypedDict):
    arguments: list[str]  # of the interpreter
    environment: dict[str, str]
    folder: str
    namespace: str | None  # of the network
    new_session: bool
    prepare: str | None  # a function that the program begins with, as `_text_of` writes it
    targets: list[int]  # the numbers that the descriptors of the message have in the program


def _prctl(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _parents() -> dict[int, int]:
    """The parent of every process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                found[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def _reap(orphan: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(orphan, 0)


class _Source:
    """A process that forks programs, as the process that asks for them sees it: its child, at the end of a channel."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        channel.settimeout(_START_S)
        self.owner = os.getpid()
        self._channel = channel
        self._process = process

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The id of a new process, which is a child of this one."""
        # The process that forks it ends at once, and the kernel gives its child to the next ancestor that asked for it.
        # Until that is over, this process also becomes the parent of other orphans below it, for which nothing waits.
        own, before = os.getpid(), _parents()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            program = self.answer()
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        for pid, parent in _parents().items():
            if parent == own != before.get(pid, own):
                threading.Thread(target=_reap, args=(pid,), name=f"reaps-{pid}", daemon=True).start()
        return program

    def answer(self) -> int:
        answer = self._channel.recv(100)
        if not answer:
            raise RuntimeError("the process that forks programs has ended")
        return int(answer)

    def close(self) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.communicate(timeout=_START_S)


def _start_source() -> _Source:
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with theirs:
        process = _PlainPopen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**environment, **_SINGLE_THREADED, "ROOM": _ROOM},
            start_new_session=True,
        )
    source = _Source(channel, process)
    source.answer()  # it is ready
    return source


def be_source() -> None:
    """Mark this process as one that forks programs, and let it end with its parent."""
    _prctl(_PR_SET_NAME, _NAME.encode())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def be_program() -> None:
    """Mark this process, a fork of one that forks programs, as a program."""
    _prctl(_PR_SET_NAME, b"python")


def _fork_source(path: list[str]) -> _Source:
    """For a program that has just begun: a copy of it forks the programs that it starts."""
    program = os.getpid()
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        channel.close()
        os.setsid()
        be_source()  # the program may have other copies, which hold the channel
        if os.getppid() == program:
            _serve(theirs, path)
        os._exit(0)
    theirs.close()
    return _Source(channel)


_lock = threading.Lock()  # guards _source, and makes one request at a time
_source: _Source | None = None


def _own_source() -> _Source:
    """To be called with the lock held."""
    global _source
    if _source is None or _source.owner != os.getpid():
        _source = _start_source()
    return _source


def _fork(request: Request, descriptors: Sequence[int]) -> int:
    """To be called with the lock held."""
    global _source
    try:
        return _own_source().fork(request, descriptors)
    except BaseException:  # an answer that comes late is not that to the next request
        source, _source = _source, None
        if source is not None:
            source.close()
        raise


def prepare() -> None:
    """Start the process that forks programs, which happens with the first program otherwise."""
    with _lock:
        _own_source()


def fork_fork_servers() -> None:
    """Let the fork servers of clusters in this process be forks, too: those that are killed are replaced in milliseconds."""
    from gradwire.cluster import _forkserver

    theirs: Any = _forkserver
    theirs.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": PopenOfPrograms})


def close() -> None:
    """End the process that forks programs, if there is one; programs go on."""
    global _source
    with _lock:
        source, _source = _source, None
    if source is not None and source.owner == os.getpid():
        source.close()


def _strip_prefix(command: list[str], environment: dict[str, str]) -> tuple[str | None, list[str]]:
    """Return the network's namespace and the arguments of the interpreter; add to the environment what ``env`` would."""
    words, namespace = iter(command), None
    for word in words:
        if word == "ip":
            assert (next(words), next(words)) == ("netns", "exec")
            namespace = next(words)
        elif "=" in word:
            environment.update([word.split("=", 1)])
        elif word != "env":
            assert word == sys.executable, f"not a program for Python: {command}"
            break
    return namespace, list(words)


def _text_of(function: Callable[[], object]) -> str:
    return pickle.dumps(function).hex()


class Popen(_PlainPopen[Any]):
    """`subprocess.Popen` of ``[sys.executable, ...]``: a script, ``-c text`` or ``-m module``, and its arguments.

    ``ip netns exec NAME`` and ``env NAME=VALUE`` may stand in front. The source must be able to import ``preexec_fn``.
    """

    def _execute_child(  # type: ignore[override]
        self,
        args: Sequence[str],
        executable: None,
        preexec_fn: Callable[[], object] | None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *more: Any,
    ) -> None:
        _restore_signals, _gid, _gids, _uid, _umask, start_new_session, *_ = more
        environment = dict(os.environ if env is None else env)
        namespace, arguments = _strip_prefix([str(word) for word in args], environment)
        assert (executable, shell, close_fds) == (None, False, True)
        changed = [name for name in _VARIABLES if environment.get(name) != os.environ.get(name)]
        assert not changed, f"a fork cannot have {', '.join(changed)}: start a fresh interpreter"
        streams = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = Request(
            arguments=arguments,
            environment=environment,
            namespace=namespace,
            folder=os.path.abspath(cwd or "."),
            new_session=start_new_session,
            prepare=preexec_fn and _text_of(preexec_fn),
            targets=[0, 1, 2, *pass_fds],
        )
        try:
            with _lock:
                self.pid = _fork(request, [*streams, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class PopenOfPrograms(Popen):
    """Takes the place of `subprocess.Popen`: a fork where it can be, else a process of its own.

    A program that was started with the variable `NESTED` has it.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        executable, preexec_fn = rest[:2]
        is_ours = isinstance(args, list | tuple) and args[0] == sys.executable and not str(args[1]).startswith(_OPTIONS)
        # The source can import the function of a partial; other functions need a child of this process.
        if is_ours and executable is None and (preexec_fn is None or isinstance(preexec_fn, functools.partial)):
            super()._execute_child(args, *rest)
        else:
            _PlainPopen._execute_child(self, args, *rest)  # type: ignore[attr-defined]


def run(
    command: Sequence[str], *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with ``capture_output=True`` and ``text=True``."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, out, err)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# -- in the process that forks, and in the programs ------------------------------------------------------------------


def _serve(channel: socket.socket, path: list[str]) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, _MAX_DESCRIPTORS)
        if not message:
            return
        gate, opener = os.pipe()  # a program begins when it is the child of the process that asked for it
        found, tell = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                be_program()  # before its id is known: the leak check goes by the name
                os.write(tell, str(os.getpid()).encode())
                channel.close()
                for descriptor in (opener, found, tell):
                    os.close(descriptor)
                os.read(gate, 1)
                os.close(gate)
                become(json.loads(message), descriptors, path)
            os._exit(0)
        os.close(tell)
        program = int(os.read(found, 20))
        os.waitpid(between, 0)
        channel.send(str(program).encode())
        for descriptor in (gate, opener, found, *descriptors):
            os.close(descriptor)


def become(request: Request, descriptors: list[int], path: list[str]) -> NoReturn:
    """Run a program; end with it."""
    status: int | signal.Signals = 1
    try:
        if request["new_session"]:
            os.setsid()
        if request["namespace"] is not None:
            _enter_network(request["namespace"])
        _place(descriptors, request["targets"])
        if request["prepare"] is not None:
            pickle.loads(bytes.fromhex(request["prepare"]))()
        os.chdir(request["folder"])
        environment = request["environment"]
        os.environ.clear()
        os.environ.update(environment)
        _show_environment(environment)
        tempfile.tempdir = None
        _open_streams(bool(environment.get("PYTHONUNBUFFERED")))
        if environment.get(NESTED):
            _be_quick(path)
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, before), *path]
        status = _status_of(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _be_quick(path: list[str]) -> None:
    """Let the programs that this program starts be forks, too."""
    global _source
    _source = _fork_source(path)
    subprocess.Popen = PopenOfPrograms  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment]


def _spawn(executable: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Takes the place of the function that starts processes of `multiprocessing`: the id of a fork, where it can be one."""
    command = [os.fsdecode(argument) for argument in arguments]
    if command[1] != "-c" or command[-1] != "--multiprocessing-fork":  # it has options, or is the resource tracker
        return _plain_spawn(executable, arguments, descriptors)
    request = Request(
        arguments=command[1:],
        environment=dict(os.environ),
        namespace=None,
        folder=os.getcwd(),
        new_session=False,
        prepare=None,
        targets=[0, 1, 2, *descriptors],
    )
    with _lock:
        return _fork(request, [0, 1, 2, *descriptors])


def _place(descriptors: list[int], targets: list[int]) -> None:
    """Give descriptors the numbers that the program expects, and close all others."""
    above = max(targets) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in targets:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))


def _enter_network(name: str) -> None:
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network of {name}")
    os.close(descriptor)


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115  (they stay open)
    for name, descriptor, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = open(descriptor, "w", errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=descriptor == 2 or stream.isatty(), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_environment(environment: dict[str, str]) -> None:
    """Write it where ``/proc`` looks for the first environment of a process: tests find processes by it."""
    *_, begin, end, _ = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # env_start, env_end, exit_code
    room = int(end) - int(begin)
    block = b"".join(f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in environment.items())
    ctypes.memmove(int(begin), block[:room].ljust(room, b"\0"), room)


def _status_of(arguments: list[str]) -> int | signal.Signals:
    """Run what the arguments of an interpreter name: how it ends."""
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    # A program that imports it must not start a source of its own.
    sys.modules.setdefault("quick_python", sys.modules["__main__"])
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    try:
        if arguments[0] == "-m":
            sys.argv[:] = ["-m", *arguments[2:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        elif arguments[0] == "-c":
            sys.argv[:] = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            assert not arguments[0].startswith("-"), f"needs a fresh interpreter: {arguments}"
            script = os.path.abspath(arguments[0])
            sys.argv[:] = arguments
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            main.__file__ = script
            exec(compile(Path(script).read_text(), script, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        own = error.__traceback__  # the frame of this function
        error.__traceback__ = own and own.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        return signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int | signal.Signals) -> NoReturn:
    """End as an interpreter does, but for taking all modules apart."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if isinstance(status, signal.Signals):
        signal.signal(status, signal.SIG_DFL)
        os.kill(os.getpid(), status)
    os._exit(int(status) & 0xFF)


def _use_large_pages() -> None:
    """Put the memory of this process into pages of 2 MiB: to fork it, and to end a fork, then takes a third of the time.

    Kernels before Linux 6.1 cannot; nothing depends on it.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, inode_and_path = line.split(maxsplit=4)
        if access == "rw-p" and inode_and_path.split() in (["0"], ["0", "[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begin // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
                madvise(page, _LARGE_PAGE, _MADV_COLLAPSE)


def _main() -> None:
    gc.disable()  # nearly everything that is imported stays
    path = sys.path[1:]
    sys.path[:0] = [str(_SOURCES)]
    import gradwire
    import gradwire.cluster
    import gradwire.runtime

    gradwire.runtime.import_all()
    for module in _USED_BY_MOST:
        importlib.import_module(module)
    sys.path[:] = path
    gc.collect()
    gc.freeze()
    gc.enable()
    _use_large_pages()
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of torch, which take its parts out of registries
    _prctl(_PR_SET_NAME, _NAME.encode())
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread alone"
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.send(b"0")
    _serve(channel, path)
    os._exit(0)


if __name__ == "__main__":
    _main()
