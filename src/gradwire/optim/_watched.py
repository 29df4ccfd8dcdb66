"""What torch puts around every step for hooks and profilers, which costs more than a small step itself.

Where nobody watches, it is left out. The numbers are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torchs

_TORCHS_WRAPPERS = ("torch.optim.optimizer", "torch.utils._contextlib")


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook or a profiler is to see the steps of an optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torchs._global_optimizer_pre_hooks
        or torchs._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step of an optimizer of torch's, to be called with grad mode off and without a closure."""
    if optimizer.defaults.get("differentiable"):  # it turns grad mode on
        return optimizer.step
    kind = type(optimizer)
    known = kind.step
    bare = inspect.unwrap(known, stop=_is_no_wrapper_of_torchs)

    def step() -> Any:
        # Schedulers and others may have put something else in its place meanwhile.
        if kind.step is not known or "step" in optimizer.__dict__ or is_watched(optimizer):
            return optimizer.step()
        return bare(optimizer)

    return step


def _is_no_wrapper_of_torchs(function: Any) -> bool:
    return function.__globals__["__name__"] not in _TORCHS_WRAPPERS
