"""Calls of any method of a value that is elsewhere, by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Proxy:
    """Has every attribute: ``proxy.name(*args, **kwargs)`` makes the call.

    Args:
        call: Told the method's name, the arguments and the keyword arguments.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __repr__(self) -> str:
        return "<Proxy of the value of an RRef: call any of its methods>"

    def __getattr__(self, name: str) -> Any:
        return functools.partial(_forward, self._call, name)


def _forward(call: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    return call(name, args, kwargs)
