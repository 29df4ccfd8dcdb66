"""Anomaly mode across workers: forward tracebacks are kept where the forward code ran, and shown where backward failed.

`torch.autograd.detect_anomaly` is a switch for a whole process. It travels with calls and passes, and is on here while any
of them is under way. When a node fails, torch prints where its forward was called as a warning; here that text becomes
part of the error that the caller of backward gets.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

_lock = threading.Lock()  # guards the two below, and what is changed in `warnings`
_num_users = 0
_is_ours = False  # whether it was switched on here
_MARK = "Traceback of forward call"


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enable anomaly mode inside the block."""
    global _num_users, _is_ours
    with _lock:
        if _num_users == 0 and not torch.is_anomaly_enabled():
            _is_ours = True
            torch.autograd.set_detect_anomaly(True, check_nan=torch.is_anomaly_check_nan_enabled())
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0 and _is_ours:  # anomaly mode that the user enabled stays enabled
                _is_ours = False
                torch.autograd.set_detect_anomaly(False, check_nan=torch.is_anomaly_check_nan_enabled())


@contextlib.contextmanager
def detecting() -> Iterator[None]:
    """Add torch's warning about a failed node to the error that a run of the local engine raises."""
    with enabled(), _catching() as texts:
        try:
            yield
        except Exception as error:
            if texts:
                raise AnomalyFound(f"{error}\n\n" + "\n".join(texts)) from error
            raise


class _Caught(threading.local):
    texts: list[str] | None = None  # where the warnings of this thread go; None while they are shown


class _WarningCatcher:
    """Catches torch's warnings, separately for each thread.

    `warnings.catch_warnings` is not thread-safe: two threads that leave it in another order than they entered it leave
    a list behind that swallows the warnings of the whole process.
    """

    # `open` and `close` are called under the lock.

    def __init__(self) -> None:
        self._num_users = 0
        self._show_before: Callable[..., Any] = warnings.showwarning
        self._filter: Any = None

    def open(self) -> None:
        self._num_users += 1
        if self._num_users == 1:
            self._show_before, warnings.showwarning = warnings.showwarning, self._show
            warnings.filterwarnings("always", message=f"(?s).*{_MARK}")
            self._filter = warnings.filters[0]

    def close(self) -> None:
        self._num_users -= 1
        if self._num_users:
            return
        if warnings.showwarning == self._show:  # else the program has replaced it
            warnings.showwarning = self._show_before
        if self._filter in warnings.filters:
            cast(list[Any], warnings.filters).remove(self._filter)
            getattr(warnings, "_filters_mutated", lambda: None)()

    def _show(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if _caught.texts is not None and _MARK in str(message):
            _caught.texts.append(str(message))
        else:
            self._show_before(message, *args, **kwargs)


_caught = _Caught()
_catcher = _WarningCatcher()  # guarded by _lock


@contextlib.contextmanager
def _catching() -> Iterator[list[str]]:
    texts: list[str] = []
    outer = _caught.texts
    with _lock:
        _catcher.open()
    _caught.texts = texts
    try:
        yield texts
    finally:
        _caught.texts = outer
        with _lock:
            _catcher.close()


class AnomalyFound(RuntimeError):
    """An error in backward, with the traceback of the forward call that made the node."""
