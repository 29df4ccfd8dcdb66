"""Private names of torch, and what gradwire relies on."""

from __future__ import annotations

import torch

from gradwire import _torch

# -- used by rpc -------------------------------------------------------------------------------------------------------


def test_torch_future() -> None:
    """`torch._C.Future` is the base of every future, takes a list of devices, and runs callbacks when it is completed."""
    assert issubclass(torch.futures.Future, _torch.TorchFuture)
    future = torch.futures.Future.__new__(torch.futures.Future)
    _torch.TorchFuture.__init__(future, [])
    seen: list[int] = []
    _torch.TorchFuture.add_done_callback(future, lambda done: seen.append(_torch.TorchFuture.wait(done)))
    future.set_result(3)
    assert seen == [3]
    assert _torch.TorchFuture.wait(future) == 3
