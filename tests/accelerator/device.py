"""The stand-in accelerator: builds it once, and makes it known to torch in a worker.

torch starts its threads for devices with the first backward of a process, so whoever wants the device must `load` it before;
and from then on the process has an accelerator. So tests leave it to workers: ``worker.call(device.load)``.

``make accelerator-check DEVICE=cuda`` names another device in ``GRADWIRE_ACCELERATOR``. The tests then run on the first two
devices of that kind. They compare values there; only the stand-in has a log, and can be slow on demand.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import cpp_extension

STAND_IN = "privateuseone"
NAME = os.environ.get("GRADWIRE_ACCELERATOR", STAND_IN)
IS_STAND_IN = NAME == STAND_IN
NUM_DEVICES = 2
_VISIBLE = "CUDA_VISIBLE_DEVICES"

_SOURCE = Path(__file__).with_name("stand_in.cpp")
_CACHE = Path(__file__).parents[2] / "build" / "accelerator"
BUILD_S = 300.0
_FLAGS = ("-O0", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


class NoCompiler(Exception):
    """Nothing on this machine can build the device."""


class TooFewDevices(Exception):
    """This machine does not have the devices that ``make accelerator-check`` names."""


class NeedsStandIn(Exception):
    """The test is of the stand-in, or needs it to be slow, and runs on another device."""


def check_there() -> None:
    """Check that this machine has the devices that the tests run on.

    Raises:
        TooFewDevices: It does not.
    """
    try:
        found = NUM_DEVICES if IS_STAND_IN else torch.get_device_module(NAME).device_count()
    except (AttributeError, RuntimeError):  # torch has no such kind of device
        found = 0
    if found < NUM_DEVICES:
        raise TooFewDevices(
            f"there are {found} devices of {NAME} on this machine, and the accelerator tests need {NUM_DEVICES}; name other "
            f"ones with DEVICE=, or run them on the stand-in with DEVICE={STAND_IN}"
        )


def hide_from_driver() -> dict[str, str]:
    """Let this process have no device, as it has no stand-in; return the environment in which workers have two."""
    if NAME != "cuda":
        return {}
    seen = os.environ.get(_VISIBLE) or "0,1"
    os.environ[_VISIBLE] = ""
    return {_VISIBLE: seen}


def load(name: str = NAME) -> None:
    """Register the device in this process, by another name if one is given. May be called again."""
    if not IS_STAND_IN:
        if name != NAME:
            check_stand_in()
        check_there()
    elif not hasattr(torch, name):
        torch.ops.load_library(str(build()))
        torch.utils.rename_privateuse1_backend(
            name
        )  # to its own name, too: it tells torch that there is such a backend
        torch._register_device_module(name, _Backend)  # type: ignore[no-untyped-call]


class Entry(NamedTuple):
    """Something that was asked of the device.

    Attributes:
        what: ``record``, ``wait`` (of a stream for an event), ``found_done`` (an event), ``synchronize_event``,
            ``synchronize_stream``, ``synchronize_device``, ``copy``, ``record_stream``, ``pin``, ``register``,
            ``unregister``, ``operator``.
        stream: Device and stream, such as ``0:3``; ``-`` if there is none. Stream 0 of a device is its default stream.
        event: Its number; 0 if there is none.
        more: Of a copy: direction, whether it may block, what kind of memory the host's is, and bytes.
    """

    what: str
    stream: str
    event: int
    more: tuple[str, ...]


def take_log() -> list[Entry]:
    """Return what was asked of the device since the last call; nothing of one that is not the stand-in."""
    if not IS_STAND_IN:
        return []
    split = [line.split(" ") for line in torch.ops.stand_in.take_log()]
    return [Entry(what, stream, int(event), tuple(more)) for what, stream, event, *more in split]


@contextlib.contextmanager
def asynchronous(delay_s: float = 0.01) -> Iterator[None]:
    """Run copies of this process that may be run later, by threads of their streams, each after that time.

    Other devices than the stand-in do it in their own time.
    """
    if not IS_STAND_IN:
        yield
        return
    torch.ops.stand_in.set_asynchronous(True, delay_s)
    try:
        yield
    finally:
        torch.ops.stand_in.set_asynchronous(False, 0.0)


def check_stand_in() -> None:
    """Raise `NeedsStandIn`, for which a test is skipped, on another device."""
    if not IS_STAND_IN:
        raise NeedsStandIn(f"needs the stand-in accelerator, and runs on {NAME}")


def prepare() -> None:
    """Build the stand-in if that is the device.

    Raises:
        NoCompiler: It is not built, and there is no C++ compiler.
    """
    if IS_STAND_IN:
        build()


def is_prepared() -> bool:
    """Whether `prepare` has nothing to build."""
    return not IS_STAND_IN or _library().exists()


def _library() -> Path:
    text = f"{_SOURCE.read_text()}\n{torch.__version__}\n{_FLAGS}"
    return _CACHE / f"stand_in-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def build() -> Path:
    """Return the library; the process that comes first builds it, and others wait.

    Raises:
        NoCompiler: It is not built, and there is no C++ compiler.
    """
    library = _library()
    if not library.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with open(_CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # bounded: its holder's compiler has a time limit
            if not library.exists():
                _compile(library)
    return library


def _compile(library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)
    if compiler is None:
        raise NoCompiler("no C++ compiler: install g++ or clang++, or set CXX")
    part = library.with_suffix(".part")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
    command = [compiler, *_FLAGS, *includes, str(_SOURCE), "-o", str(part), *linked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the stand-in accelerator does not build: {' '.join(command)}\n{done.stderr}")
    part.replace(library)


class _Backend:
    """What torch wants to find as ``torch.privateuseone``."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return NUM_DEVICES

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def memory_allocated(device: Any = 0) -> int:
        return int(torch.ops.stand_in.memory_allocated(torch.device(device).index or 0))

    @staticmethod
    def cudart() -> Any:
        """The part of CUDA's runtime that makes memory known to a device."""
        return _Runtime

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Random numbers are the CPU's."""

    @staticmethod
    def get_rng_state(device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = 0) -> None:
        torch.set_rng_state(state)


class _Runtime:
    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        torch.ops.stand_in.register_memory(address, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        torch.ops.stand_in.unregister_memory(address)
        return 0
