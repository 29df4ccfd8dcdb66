"""Modules on other workers: PyTorch's `RemoteModule`, complete.

encoder = gradwire.nn.RemoteModule("worker1/cpu", Encoder, args=(784, 256))
encoder(x)                                              # runs there; inside a context it is recorded
encoder.remote_parameters()                             # for a DistributedOptimizer
"""

from __future__ import annotations

from gradwire.nn.remote_module import OwnerHook, RemoteModule

__all__ = ["OwnerHook", "RemoteModule"]
