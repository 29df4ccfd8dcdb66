"""How contexts share parameters of one worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch

from gradwire.errors import ConfigurationError

Mode = Literal["snapshot", "serialize", "hogwild"]

_lock = threading.RLock()  # serialises steps


def check_mode(mode: str) -> None:
    """
    Raises:
        ConfigurationError: There is no such mode.
    """
    if mode not in get_args(Mode):
        raise ConfigurationError(f"concurrency must be one of {', '.join(get_args(Mode))}, not {mode!r}")


def guard(params: Iterable[torch.Tensor], mode: Mode) -> None:
    """Says how contexts share parameters of this worker."""
    check_mode(mode)


@contextlib.contextmanager
def stepping(params: Iterable[torch.Tensor], context_ids: Iterable[int]) -> Iterator[None]:
    """Surrounds whatever changes parameters in place."""
    with _lock:
        yield


@contextlib.contextmanager
def standing_still(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Surrounds reading that must see all parameters of one moment."""
    with _lock:
        yield


def wait_turn(params: Iterable[torch.Tensor]) -> None:
    """Before a context uses parameters."""
