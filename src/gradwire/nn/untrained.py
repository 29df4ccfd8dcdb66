"""Warns where parameters on other workers would stay untrained, and nothing else would show it.

Outside of a context, what a remote module returns is data: a local backward ends there. And to torch's own modules and
optimizers a handle has no parameters at all.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

from gradwire.autograd import ambient

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_takers: set[CodeType] = set()  # what reads the parameters that an optimizer is to train


def takes_parameters(function: F) -> F:
    """Mark a function that reads parameters in order to train them."""
    _takers.add(inspect.unwrap(function).__code__)
    return function


takes_parameters(torch.optim.Optimizer.__init__)
takes_parameters(torch.optim.Optimizer.add_param_group)


class ParametersElsewhere(dict[str, Any]):
    """The table of parameters of a handle: it has none, and warns if an optimizer looks for some.

    Args:
        module: What to call the module.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def items(self) -> Any:
        """Return nothing; that is what the `parameters` of an outer module ask for."""
        taker = _find_taker(sys._getframe(1))
        if taker is not None:
            warn_user(
                f"the parameters of {self._module} will not be trained: they live on that worker, and an outer module's "
                f"parameters() does not have them. Pass the outer module itself to an optimizer that finds them everywhere: "
                f"gradwire.optim.DistributedOptimizer(torch.optim.SGD, [outer], lr=...). If this optimizer is not to train "
                f"them, pass it the parameters of the other parts only",
                taker,
            )
        return super().items()


def _find_taker(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code not in _takers:
        frame = frame.f_back
    return frame


def warn_when_differentiated(result: Any, module: str) -> Any:
    """Let tensors that a module has computed elsewhere warn when a backward pass ends at them.

    Args:
        result: What the module returned outside of a context; tuples, lists and dicts are looked into.
        module: What to call it.

    Returns:
        The result.
    """
    if isinstance(result, torch.Tensor):
        if result.requires_grad and result.is_leaf:
            result.register_hook(_EndOfBackward(module))  # type: ignore[no-untyped-call]
    elif isinstance(result, tuple | list):
        for item in result:
            warn_when_differentiated(item, module)
    elif isinstance(result, dict):
        for item in result.values():
            warn_when_differentiated(item, module)
    return result


def is_unrecorded() -> bool:
    """Whether a call made now has no part in a distributed backward, although gradients are wanted."""
    return torch.is_grad_enabled() and not ambient.current_context_id()


class _EndOfBackward:
    """A hook on a tensor that came from another worker outside of a context."""

    __slots__ = ("_module",)

    def __init__(self, module: str) -> None:
        self._module = module

    def __call__(self, gradient: torch.Tensor) -> None:
        warn_user(
            f"backward ends at what {self._module} returned outside of a context: no gradient goes to that worker, and its "
            f"parameters are not trained. Call the module inside of `with gradwire.autograd.context() as ctx:`, and there "
            f"ctx.backward(loss) instead of loss.backward(). If it is not to be trained, detach() its result",
            sys._getframe(1),
        )


def warn_user(text: str, frame: FrameType | None) -> None:
    """Warn of a line of the user's code: the innermost one that led to the frame, outside of torch and gradwire."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame is None:  # in a thread of torch's engine
        warnings.warn(text, stacklevel=1)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__", "<unknown>")
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
