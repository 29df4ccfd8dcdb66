"""`torch.futures.wait_all` that ends with the first error.

torch's own looks for errors inside its C++ futures. A future that Python completes with an exception has none there: torch
keeps the exception as a value that is raised when somebody waits, so its `wait_all` would wait for all the others first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.rpc.futures import InterruptibleFuture


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures, in their order.

    Raises:
        Exception: What one of them ended with, at once; the others are not waited for.
    """
    gathered = _gather(futures)
    failed = gathered.wait()
    return [torch._C.Future.wait(future) for future in ([failed] if failed is not None else futures)]


def _gather(futures: Sequence[torch.futures.Future[Any]]) -> InterruptibleFuture[Any]:
    """A future for the first one that failed; None if all are done and none has."""
    outcome: InterruptibleFuture[Any] = InterruptibleFuture()
    left = list(futures)  # a removal from a list is one step, so no lock is needed

    def on_done(future: torch.futures.Future[Any]) -> None:
        try:
            torch._C.Future.wait(future)
        except Exception:
            _complete(outcome, future)
        left.pop()
        if not left:
            _complete(outcome, None)

    for future in futures:
        torch._C.Future.add_done_callback(future, on_done)
    if not futures:
        _complete(outcome, None)
    return outcome


def _complete(outcome: InterruptibleFuture[Any], value: Any) -> None:
    if not outcome.done():
        try:
            outcome.set_result(value)
        except RuntimeError:  # another thread was faster
            return


def make_table() -> Mapping[str, Any]:
    """The names of ``torch.futures``."""
    return {"wait_all": wait_all}
