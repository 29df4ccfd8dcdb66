"""Leave out of the reference what a reader cannot use: constructors that programs do not call, and private bases.

Defaults that a dataclass makes anew are shown as an empty dict, which all of them are.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

# Programs are given these; they do not make them.
GIVEN = {
    "gradwire.Cluster",
    "gradwire.autograd.AutogradStatistics",
    "gradwire.autograd.DistAutogradContext",
    "gradwire.autograd.DistributedGraph",
    "gradwire.autograd.Explanation",
    "gradwire.autograd.GraphMessage",
    "gradwire.autograd.GraphNode",
    "gradwire.autograd.GraphWorker",
    "gradwire.checkpoint.SavedEntry",
    "gradwire.checkpoint.SavedFile",
    "gradwire.checkpoint.Summary",
    "gradwire.cluster.ClusterStatus",
    "gradwire.cluster.MembershipEvent",
    "gradwire.cluster.Worker",
    "gradwire.cluster.WorkerStatus",
    "gradwire.optim.LocalOptimizer",
    "gradwire.rpc.Agent",
    "gradwire.rpc.AgentStatistics",
    "gradwire.rpc.BackendType",
    "gradwire.rpc.CallFuture",
    "gradwire.rpc.Envelope",
    "gradwire.rref.ReferenceStatistics",
}


def process_signature(
    app: Sphinx, kind: str, name: str, value: object, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    if name in GIVEN:
        return "", None
    if signature is not None and "<factory>" in signature:  # as dataclasses print it; Sphinx cannot parse that
        return signature.replace("<factory>", "{}"), returned
    return None


def process_bases(app: Sphinx, name: str, value: object, options: Any, bases: list[Any]) -> None:
    bases[:] = [base for base in bases if not base.__name__.startswith("_")] or bases


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-process-bases", process_bases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
