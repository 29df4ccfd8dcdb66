"""Where a backward pass begins: tensors of the worker that calls backward, with a gradient for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradwire.autograd.follow_ups import FollowUp
from gradwire.errors import AutogradError


@dataclass(frozen=True, slots=True)
class Roots:
    """Where a pass begins, on the worker that called backward.

    Attributes:
        tensors: The roots.
        gradients: One for each.
        inputs: Collect gradients only for these; None for all leaves.
        joins_context: Whether gradients join the context, and post-accumulate hooks run: for `backward`, not for `grad`.
        follow_up: What is done as soon as the pass is committed.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()
    inputs: tuple[torch.Tensor, ...] | None = None
    joins_context: bool = True
    follow_up: FollowUp | None = None


def check_roots(roots: Any, gradients: Any, inputs: Any, *, joins_context: bool = True) -> Roots:
    """The roots of a pass, with a gradient for each.

    Raises:
        AutogradError: A root cannot be one; says why.
    """
    tensors = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    if not tensors:
        raise AutogradError("No tensors provided for gradient computation.")
    given = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients or (None,) * len(tensors))
    if len(given) != len(tensors):
        raise AutogradError(f"{len(given)} gradients were given for {len(tensors)} roots")
    found = []
    for number, (tensor, gradient) in enumerate(zip(tensors, given, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            raise AutogradError(f"root {number} is a {type(tensor).__name__}, not a tensor")
        if not tensor.requires_grad:
            raise AutogradError(f"requires_grad not set on root {number} of shape {tuple(tensor.shape)}")
        if gradient is None and tensor.numel() != 1:
            raise AutogradError(
                f"root {number} of shape {tuple(tensor.shape)} is not a scalar, all roots need to be scalar "
                f"unless gradients are given"
            )
        if tensor.grad_fn is None:
            raise AutogradError(f"root {number} does not have a valid gradient function: it is a leaf")
        if gradient is None:
            gradient = torch.ones_like(tensor, memory_format=torch.preserve_format)
        elif gradient.shape != tensor.shape:
            raise AutogradError(
                f"the gradient of root {number} has shape {tuple(gradient.shape)}, not {tuple(tensor.shape)}"
            )
        found.append(gradient)
    wanted = None if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if wanted is not None and not all(isinstance(item, torch.Tensor) and item.requires_grad for item in wanted):
        raise AutogradError("inputs must be tensors that require grad, on the worker that calls backward")
    return Roots(tensors, tuple(found), wanted, joins_context)
