"""Compat is not installed before and after each test."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from gradwire import compat


@pytest.fixture(autouse=True)
def _nothing_installed() -> Iterator[None]:
    assert not compat.is_installed()
    yield
    while compat.is_installed():
        compat.uninstall()


@pytest.fixture
def program() -> Iterator[types.ModuleType]:
    """A module that has imported torch's names before."""
    made = types.ModuleType("program_of_before")
    sys.modules[made.__name__] = made
    exec(
        "from torch.distributed.rpc import rpc_sync, RRef as Reference\n"
        "import torch.distributed.rpc as rpc\n"
        "UNSET = rpc.constants.UNSET_RPC_TIMEOUT\n"
        "class Caller:\n"
        "    call = rpc_sync\n"
        "    plain = staticmethod(rpc_sync)\n",
        made.__dict__,
    )
    yield made
    del sys.modules[made.__name__]
