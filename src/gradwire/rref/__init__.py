"""References to values on other workers, and the protocol that keeps those values alive.

rref = rpc.remote("worker1", torch.ones, args=(2,))     # created there, stays there
rref.to_here()                                          # a copy
rref.rpc_sync().sum()                                   # a method, called there
rpc.rpc_sync("worker2", f, args=(rref,))                # passed on: worker2 fetches it from worker1
"""

from __future__ import annotations

from gradwire.rref.api import PyRRef, RRef, remote
from gradwire.rref.context import ReferenceStatistics

__all__ = ["PyRRef", "RRef", "ReferenceStatistics", "remote"]
