"""Tensors that are more than their elements, inside a pickle: subclasses, quantised and nested tensors.

What a tensor table cannot hold is taken apart into what it can:

- A subclass that only adds Python to ordinary elements: an ordinary tensor of the same memory and in the same autograd
  graph, the class, and the attributes. Gradients get through.
- Any other (a class with a ``__reduce_ex__`` of its own or with ``__torch_dispatch__``, a quantised or nested tensor): what
  its ``__reduce_ex__`` gives, as with torch's own rpc. Tensors and storages in there stay outside of the pickle, too.
  Gradients get through if the tensor is rebuilt from one that requires grad.

Whether a tensor is part of a graph does not depend on the grad mode of the thread that happens to pack or unpack it.

Left out, because they mean something only where they were made: DTensors, and tensors of function transforms and compilers.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from gradwire.errors import CannotSend

_ORDINARY: Final = (torch.Tensor, torch.nn.Parameter)
_PROTOCOL: Final = 5
_STORAGES: Final = (torch.UntypedStorage, torch.TypedStorage)
_is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor
_get_state: Final[Callable[[Any], Any]] = torch._utils._get_obj_state
_set_state: Final[Callable[[Any, Any], Any]] = torch._utils._set_obj_state

# By module and name, so that none is imported for this: a tensor of such a class exists only if its module does.
_LOCAL: Final = {
    ("torch.distributed.tensor", "DTensor"): "send its local part, tensor.to_local()",
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"): "wait for it first, tensor.wait()",
    ("torch._subclasses.fake_tensor", "FakeTensor"): "it has no elements; make the call outside of its mode",
    ("torch._subclasses.functional_tensor", "FunctionalTensor"): "make the call outside of the function transform",
}


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be an entry of a tensor table."""
    return type(tensor) in _ORDINARY and not tensor.is_quantized and not tensor.is_nested


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, bool]:
    """Take apart a tensor that is not ordinary.

    Returns:
        What `pickle` wants from a ``__reduce_ex__``, and whether gradients get through.

    Raises:
        CannotSend: The tensor belongs to the place where it was made.
    """
    _check_leaves_home(tensor)
    kind = type(tensor)
    if _is_decorated(kind):
        return _reduce_decorated(tensor), True
    reduce = copyreg.dispatch_table.get(kind)
    with torch.enable_grad():
        reduced: Any = reduce(tensor) if reduce is not None else tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad or torch.nn.parameter.is_lazy(tensor):
            return reduced, True
        if _has_own_dispatch(kind) or not any(part.requires_grad for part in _tensors_in(reduced)):
            return reduced, False  # autograd sees the wrapper, and nothing of what is in it
    return (_rebuild_tracked, (reduced[0], *reduced[1]), *reduced[2:]), True


def reduce_storage(storage: torch.UntypedStorage | torch.TypedStorage) -> Any:
    """Take apart a storage: its bytes as a tensor, which stays outside of the pickle."""
    if isinstance(storage, torch.UntypedStorage):
        return _rebuild_storage, (_bytes_of(storage),)
    return _rebuild_typed_storage, (_bytes_of(storage._untyped_storage), storage.dtype)


def is_storage(obj: Any) -> bool:
    """Whether something is a storage of torch's."""
    return isinstance(obj, _STORAGES)


def _check_leaves_home(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    for (module, name), advice in _LOCAL.items():
        local = getattr(sys.modules.get(module), name, None)
        if local is not None and issubclass(kind, local):
            raise CannotSend(f"this tensor cannot be sent: it is a {kind.__module__}.{kind.__qualname__}; {advice}")
    if _is_wrapped(tensor):
        raise CannotSend(
            "this tensor cannot be sent: it belongs to a function transform (vmap, grad, functionalize); make the call "
            "outside of it"
        )


def _is_decorated(kind: type[torch.Tensor]) -> bool:
    """Whether a class only adds Python to ordinary elements."""
    return (
        kind not in _ORDINARY
        and kind not in copyreg.dispatch_table
        and kind.__reduce_ex__ in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
        and not _has_own_dispatch(kind)
    )


def _has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _reduce_decorated(tensor: torch.Tensor) -> Any:
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
    return _rebuild_decorated, (type(tensor), plain), _get_state(tensor) or None, None, None, _restore


def _rebuild_decorated(kind: type[torch.Tensor], plain: torch.Tensor) -> torch.Tensor:
    if plain.grad_fn is None:  # a leaf stays one
        return torch.Tensor._make_subclass(kind, plain, plain.requires_grad)
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return plain.as_subclass(kind)


def _restore(tensor: Any, state: Any) -> None:
    if type(tensor).__setstate__ is not torch.Tensor.__setstate__:  # torch's own is for old files
        tensor.__setstate__(state)
    else:
        _set_state(tensor, state)


def _rebuild_tracked(rebuild: Callable[..., Any], *args: Any) -> Any:
    with torch.enable_grad():
        made = rebuild(*args)
    with torch._C.DisableTorchFunctionSubclass():
        is_cut_off = made.grad_fn is None and any(part.grad_fn is not None for part in _tensors_in(args))
    if is_cut_off:  # in a recorded call
        kind = type(made)
        raise CannotSend(
            f"gradients do not get through a {kind.__module__}.{kind.__qualname__}: what its __reduce_ex__ rebuilds is not "
            f"connected to the tensor that it is rebuilt from. Send that tensor, or detach() it"
        )
    return made


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _rebuild_storage(data: torch.Tensor) -> torch.UntypedStorage:
    return data.untyped_storage()


def _rebuild_typed_storage(data: torch.Tensor, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=data.untyped_storage(), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
