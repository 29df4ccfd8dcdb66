"""Where inside a value the thing sits that cannot be sent. Slow; runs only when an error is about to be raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

_MAX_TRIES: Final = 2000


def locate(value: Any, can_send: Callable[[Any], bool]) -> tuple[str, Any]:
    """Follow the first part that cannot be sent, down to the smallest one.

    Args:
        value: Something for which `can_send` is false.
        can_send: Whether a part can be sent by itself.

    Returns:
        A path such as ``args[1]['lock']``, and what is there.
    """
    path, num_tries, seen = "", 0, {id(value)}
    while True:
        for label, child in _children(value, is_root=not path):
            num_tries += 1
            if num_tries > _MAX_TRIES:
                return path or "value", value
            if id(child) not in seen and not can_send(child):
                seen.add(id(child))
                path, value = (path + label) if path or not label.startswith("[") else "value" + label, child
                break
        else:
            return path or "value", value


def _children(value: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
    labels = _call_labels(value) if is_root else None
    if labels is not None:
        yield from zip(labels, value, strict=True)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{_short(key)}]", item
            yield f"[key {_short(key)}]", key
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, set | frozenset):
        for item in value:
            yield "[item]", item
    elif not isinstance(value, torch.Tensor):  # a subclass stands for itself, whatever it holds
        yield from _inside_of(value)


def _call_labels(value: Any) -> tuple[str, ...] | None:
    """Names for the parts of a call: (args, kwargs) or (function, args, kwargs)."""
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        return None
    if not isinstance(value[-2], tuple) or not isinstance(value[-1], dict):
        return None
    return ("function", "args", "kwargs")[-len(value) :]


def _inside_of(value: Any) -> Iterator[tuple[str, Any]]:
    for cell, name in zip(
        getattr(value, "__closure__", None) or (),
        getattr(getattr(value, "__code__", None), "co_freevars", ()),
        strict=False,
    ):
        yield f".<variable {name}>", cell.cell_contents
    for name, item in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", item


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, str | int | float | bool | None) else type(key).__name__
    return text if len(text) <= 60 else text[:57] + "..."
