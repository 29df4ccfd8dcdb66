"""Hooks that run where the module is."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.nn import operations
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rref import RRef


class OwnerHook:
    """A hook on the owner of a module; like torch's handles, it can be removed and used in a ``with`` block.

    Args:
        handle: Reference to the handle there.
    """

    def __init__(self, handle: RRef[Any]) -> None:
        self._handle: RRef[Any] | None = handle

    def __repr__(self) -> str:
        return f"<OwnerHook {'removed' if self._handle is None else f'on {self._handle.owner_name()}'}>"

    def remove(self) -> None:
        """Takes the hook away. May be called again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with torch.no_grad():
                handle._ask(operations.UNHOOK, (), UNSET_RPC_TIMEOUT)

    def __enter__(self) -> OwnerHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
