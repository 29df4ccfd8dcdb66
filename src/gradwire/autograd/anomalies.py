"""Anomaly mode across workers: forward tracebacks are kept where the forward code ran, and shown where backward failed.

`torch.autograd.detect_anomaly` is a switch for a whole process. It travels with calls and passes, and is on here while any
of them is under way. When a node fails, torch prints where its forward was called as a warning; here that text becomes
part of the error, which the caller of backward gets.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

import torch

_lock = threading.RLock()  # guards the two below, and the warning filters while anomaly mode is on here
_num_users = 0
_was_on = False
_NOTHING = contextlib.nullcontext()


def enabled(is_wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Anomaly mode is on inside, if wanted."""
    return _enabled() if is_wanted else _NOTHING


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    global _num_users, _was_on
    with _lock:
        if _num_users == 0:
            _was_on = torch.is_anomaly_enabled()
            torch.autograd.set_detect_anomaly(True, check_nan=torch.is_anomaly_check_nan_enabled())
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0:
                torch.autograd.set_detect_anomaly(_was_on, check_nan=torch.is_anomaly_check_nan_enabled())


def detecting(is_wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Surrounds a run of the local engine: what torch says about a failure is added to the error as a note.

    Raises:
        Exception: Whatever came from inside.
    """
    return _detecting() if is_wanted else _NOTHING


@contextlib.contextmanager
def _detecting() -> Iterator[None]:
    with _enabled(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            texts = [str(item.message) for item in caught if "Traceback of forward call" in str(item.message)]
            if texts:
                raise AnomalyFound(f"{error}\n\n" + "\n".join(texts)) from error
            raise


class AnomalyFound(RuntimeError):
    """An error in backward, with the traceback of the forward call that made the node."""
