"""What a handle does to its module, which is on another worker: mode, conversions, functions for its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from gradwire.errors import ConfigurationError
from gradwire.nn import operations
from gradwire.rpc.functions import exposed_name
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rref import RRef, references

Self = TypeVar("Self", bound="OwnedElsewhere")


class OwnedElsewhere(nn.Module):
    """A handle on a module of another worker.

    Attributes:
        module_rref: The reference to the module.
    """

    module_rref: RRef[nn.Module]

    def _ask(self, function: str, *args: Any) -> Any:
        """A question to the owner that has no part in any graph."""
        with torch.no_grad():
            return self.module_rref._ask(function, args, UNSET_RPC_TIMEOUT)

    def _change(self: Self, name: str, *args: Any, **kwargs: Any) -> Self:
        self._ask(operations.CHANGE, name, args, kwargs)
        return self

    def train(self: Self, mode: bool = True) -> Self:
        """Sets the mode there and here; `eval` and the mode of an outer module come here, too."""
        self._change("train", mode)
        self.training = mode
        return self

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Moves or converts the module on its owner. Arguments as in `nn.Module.to`; the device is one of the owner's."""
        return self._change("to", *args, **kwargs)

    def cpu(self: Self) -> Self:
        """As ``to("cpu")``."""
        return self.to("cpu")

    def cuda(self: Self, device: Any = None) -> Self:
        """As ``to("cuda")``."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    def type(self: Self, dst_type: Any) -> Self:
        """Converts all parameters and buffers."""
        return self._change("type", dst_type)

    def float(self: Self) -> Self:
        """As ``to(torch.float32)``."""
        return self.to(torch.float32)

    def double(self: Self) -> Self:
        """As ``to(torch.float64)``."""
        return self.to(torch.float64)

    def half(self: Self) -> Self:
        """As ``to(torch.float16)``."""
        return self.to(torch.float16)

    def bfloat16(self: Self) -> Self:
        """As ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Whether the parameters are to get gradients."""
        return self._change("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad`` of the parameters; gradients of contexts are not there, and stay."""
        self._change("zero_grad", set_to_none)

    def apply(self: Self, fn: Callable[[nn.Module], Any] | str) -> Self:
        """Calls a function on the owner, with every part of the module and then the module itself.

        Args:
            fn: The function; with ``trust="data"`` an exposed one, or its exposed name.
        """
        self._ask(operations.APPLY, name_of(fn))
        return self

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What an outer module's `to` and `double` do to its parts: nothing to this one, which is on another worker."""
        return self


def name_of(function: Callable[..., Any] | str) -> Callable[..., Any] | str:
    """What names a function or class to the owner: with ``trust="data"`` its exposed name.

    Raises:
        ConfigurationError: It has none, and code may not be sent.
    """
    if isinstance(function, str) or references.here().agent.trust == "code":
        return function
    name = exposed_name(function)
    if name is None:
        raise ConfigurationError(
            f'trust="data": {function!r} cannot be sent; mark it with @gradwire.rpc.expose on both workers, or name it'
        )
    return name
