"""The stand-in accelerator: builds it once, and makes it known to torch in a worker.

torch starts its threads for devices with the first backward of a process, so whoever wants the device must `load` it before;
and from then on the process has an accelerator. So tests leave it to workers: ``worker.call(device.load)``.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "privateuseone"
NUM_DEVICES = 2

_SOURCE = Path(__file__).with_name("stand_in.cpp")
_CACHE = Path(__file__).parents[2] / "build" / "accelerator"
_BUILD_S = 300.0
_FLAGS = ("-O0", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


class NoCompiler(Exception):
    """Nothing on this machine can build the device."""


def load() -> None:
    """Register the device in this process. May be called again."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(str(build()))
        torch._C._rename_privateuse1_backend(NAME)  # its own name: this tells torch that there is such a backend
        torch._register_device_module(NAME, _Backend)  # type: ignore[no-untyped-call]


def build() -> Path:
    """Return the library; the process that comes first builds it, and others wait.

    Raises:
        NoCompiler: It is not built, and there is no C++ compiler.
    """
    text = f"{_SOURCE.read_text()}\n{torch.__version__}\n{_FLAGS}"
    library = _CACHE / f"stand_in-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
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
        """Everything is done when it is called."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def memory_allocated(device: Any = 0) -> int:
        """Return the bytes of the tensors that Python knows on a device."""
        found = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
        there = [item.untyped_storage() for item in found if item.device == torch.device(NAME, device)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Random numbers are the CPU's."""

    @staticmethod
    def get_rng_state(device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = 0) -> None:
        torch.set_rng_state(state)
