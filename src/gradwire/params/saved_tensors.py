"""What the local autograd graph keeps of shared parameters, so that a step of somebody else does not spoil it.

torch saves a parameter itself, and finds in backward that it was changed in place. Inside calls that are served within a
context, hooks save an alias of the parameter's memory instead. A step that changes a parameter which another context has
used moves it to other memory first (`gradwire.params.rwlock`), so the alias keeps its values.

torch checks no versions where there are hooks, so these do, for all tensors: what was changed in place in any other way
than by such a step is an error, as always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from gradwire._torch import Carried
from gradwire.errors import AutogradError
from gradwire.params import rwlock as guards
from gradwire.params.rwlock import Cell, Group, Guarded, UsesParameters

Saved = tuple[torch.Tensor, int | None, Cell | None]
"""An alias, the version it must have in backward (None: any), and for parameters where that version is found."""


OnUse = Callable[[Group], None]

# For which context the current thread saves, and who is told what it uses. A recorded pass saves in threads of devices, too.
_current: Carried[tuple[UsesParameters | None, OnUse | None]] = Carried("gradwire.params.saved_tensors", (None, None))


class saving:
    """Surrounds operations that save for a context; notes which parameters it uses.

    Args:
        context: On this worker.
        on_use: Told what is used, before it is saved; None if that is known already.
    """

    def __init__(self, context: UsesParameters, on_use: OnUse | None = None) -> None:
        self._ours = context, on_use

    def __enter__(self) -> None:
        self._outer = _current.set(self._ours)
        _hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        _hooks.__exit__(*error)
        _current.set(self._outer)


def pack(tensor: torch.Tensor) -> Saved:
    """What is kept of a tensor. Never the tensor itself: a result that its own node keeps is never freed."""
    context, on_use = _current.get()
    found = _find(tensor) if context is not None else []
    if context is not None:
        for item, _ in found:
            _note(context, item, on_use)
    if len(found) != 1:  # with several, whose version it has cannot be told: at worst there is an error too many
        return tensor.detach(), tensor._version, None
    guarded, cell = found[0]
    # `data` has a version of its own: what is saved in turn of this alias is not touched by the parameter's.
    return tensor.data, None if guarded.group.mode == "hogwild" else cell.version, cell


def _find(tensor: torch.Tensor) -> Sequence[tuple[Guarded, Cell]]:
    """The parameter that a tensor is, or a view of, or detached from; several if they share their memory."""
    found = guards.find(tensor)
    if found is None and tensor._base is not None:
        found = guards.find(tensor._base)
    return guards.find_by_memory(tensor) if found is None else ((found, found.cell),)


def _note(context: UsesParameters, guarded: Guarded, on_use: OnUse | None) -> None:
    if on_use is not None:
        on_use(guarded.group)
    user = weakref.ref(context)
    if user not in guarded.users:
        with guards.lock:
            guarded.users = [*guarded.users_except(()), user]


def unpack(saved: Saved) -> torch.Tensor:
    """The values that were saved.

    Raises:
        AutogradError: They are not there any more.
    """
    tensor, version, cell = saved
    now = tensor._version if cell is None else cell.version
    if now not in (version, None) and version is not None:
        raise AutogradError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} tensor of shape {list(tensor.shape)} is at version {now}; expected version {version} instead. "
            "Steps of optimizers must be made with gradwire.optim or inside gradwire.params.snapshots.stepping"
        )
    return tensor


# What is saved keeps these functions alive: were they to know the context, it would keep itself.
_hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
