"""A tensor that is still in its file, for code of torch that copies from tensors.

`torch.nn.Module.load_state_dict` is given a whole state, and copies each tensor of it into a parameter. If the state had
memory of its own, loading would take twice the memory of the module. A `StoredTensor` is read in the moment it is copied,
straight into the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from gradwire.errors import CheckpointError

_KNOWN: Final = (torch.Tensor.shape.__get__, torch.Tensor.size)  # type: ignore[attr-defined]


class StoredTensor(torch.Tensor):
    """Stands for a saved tensor. Make one with `stored`.

    Its shape is known without reading, and ``x.copy_(stored)`` reads into ``x``. For anything else, hooks that scale or
    slice it for example, it is read into memory of its own first.
    """

    _fill: Callable[[torch.Tensor], None]
    _dtype: torch.dtype
    _failures: list[CheckpointError]
    _loaded: torch.Tensor | None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if function is torch.Tensor.copy_ and len(args) > 1:
            target, source = args[:2]
            is_first = isinstance(source, cls) and source._loaded is None and not isinstance(target, cls)
            if is_first and target.shape == source.shape:
                source._read_into(target)
                return target
        return function(*_plain(args), **_plain(kwargs or {}))

    def _read(self) -> torch.Tensor:
        """Return its values; the same tensor each time, because it may have been changed in place."""
        if self._loaded is None:
            values = torch.empty(self.shape, dtype=self._dtype)
            self._read_into(values)
            self._loaded = values
        return self._loaded

    def _read_into(self, target: torch.Tensor) -> None:
        try:
            self._fill(target)
        except CheckpointError as error:
            self._failures.append(error)
            raise


def _plain(value: Any) -> Any:
    """Return arguments of a function with the values of stored tensors in their places."""
    if isinstance(value, StoredTensor):
        return value._read()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value


def stored(
    shape: Sequence[int], dtype: torch.dtype, fill: Callable[[torch.Tensor], None], failures: list[CheckpointError]
) -> StoredTensor:
    """Return a tensor that is read when it is used.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        fill: Reads it into a tensor of that shape.
        failures: Gets each error of `fill`, because torch turns errors of a copy into text.
    """
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(StoredTensor)
    made._fill, made._dtype, made._failures, made._loaded = fill, dtype, failures, None
    return made
