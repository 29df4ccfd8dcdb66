"""What the local autograd graph keeps of shared parameters, so that a step of somebody else does not spoil it.

torch saves a parameter itself, and finds in backward that it was changed in place. Inside calls that are served within a
context, hooks save an alias of the parameter's memory instead. A step that changes a parameter which another context has
used moves it to other memory first (`gradwire.autograd.guards`), so the alias keeps its values.

torch checks no versions where there are hooks, so these do, for all tensors: what was changed in place in any other way
than by such a step is an error, as always.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.autograd import guards
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.guards import Cell, Guarded
from gradwire.errors import AutogradError

_ANY = -1  # instead of a version: whatever happens to it
Saved = tuple[torch.Tensor, int, Cell | None]


class Saver:
    """Saves for one context, and notes which parameters it uses.

    Args:
        context: On this worker.
        on_use: Called before a parameter is saved; may wait.
    """

    def __init__(self, context: DistAutogradContext, on_use: Any = None) -> None:
        self._context = context
        self._on_use = on_use

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """To be entered where operations are to be recorded."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: torch.Tensor) -> Saved:
        """What is kept of a tensor. Never the tensor itself: a result that its own node keeps is never freed."""
        found = guards.find(tensor)
        if found is None:
            base = tensor._base
            found = guards.find(base) if base is not None else None
        if found is None:
            many = guards.find_by_memory(tensor)  # detached from a parameter, or saved before
            if not many:
                return tensor.detach(), tensor._version, None
            if len(many) > 1:  # whose version it has cannot be told: at worst there is an error too many
                for item in many:
                    self._note(item)
                return tensor.detach(), tensor._version, None
            found = many[0]
        self._note(found)
        return tensor.detach(), _ANY if found.group.mode == "hogwild" else tensor._version, found.cell

    def _note(self, guarded: Guarded) -> None:
        if self._on_use is not None:
            self._on_use(guarded.group)
        context = self._context
        if guarded not in context.used:
            with guards.changed:
                context.used.add(guarded)
                guarded.users.add(context)


def unpack(saved: Saved) -> torch.Tensor:
    """The values that were saved.

    Raises:
        AutogradError: They are not there any more.
    """
    tensor, version, cell = saved
    if cell is not None and cell.last_version is not None:
        # Nobody changes this memory any more, but the parameter's version goes on: `data` has one of its own.
        tensor, now = tensor.data, cell.last_version
    else:
        now = tensor._version
    if version not in (now, _ANY):
        raise AutogradError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} tensor of shape {list(tensor.shape)} is at version {now}; expected version {version} instead. "
            "Steps of optimizers must be made with gradwire.optim or inside gradwire.autograd.sharing.stepping"
        )
    return tensor
