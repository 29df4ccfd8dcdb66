"""Resolve names in annotations and docstrings that Sphinx alone cannot.

Annotations are strings (`from __future__ import annotations`), and names that are imported for type checkers only cannot be
evaluated, so a reference may be as short as ``Tensor`` or ``Worker``. It becomes a link if exactly one documented object, or
one object in the inventories, has that last part. Names of gradwire's own that are not documented are internal, and stay
text.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.intersphinx import resolve_reference_detect_inventory

import gradwire

# What annotations name, and where it is documented.
SPELLINGS = {
    "nn.Module": "torch.nn.Module",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.Future": "torch.futures.Future",
    "torch._C.Future": "torch.futures.Future",
    "dist.ProcessGroup": "torch.distributed.ProcessGroup",
}


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """Try the full name of a short one; leave internal names as text."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    for name in _candidates(env, target):
        node["reftarget"] = name
        found = env.domains["py"].resolve_any_xref(
            env, env.current_document.docname or node["refdoc"], app.builder, name, node, content
        )
        if found:
            return found[0][1]
        external = resolve_reference_detect_inventory(env, node, content)
        if external is not None:
            return external
    node["reftarget"] = target
    return content if _is_internal(target) else None


def _is_internal(target: str) -> bool:
    last = target.rpartition(".")[2]
    return last.startswith("_") or target.startswith("msgspec.") or last in _names_in_gradwire()


@functools.cache
def _names_in_gradwire() -> set[str]:
    """Every name that a module of gradwire defines or imports: a misspelt one is none of them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(gradwire.__file__).parent.rglob("*.py")]
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("torch"):
            found |= {item.asname or item.name for item in node.names}
    return found


def _candidates(env: BuildEnvironment, target: str) -> list[str]:
    if target in SPELLINGS:
        return [SPELLINGS[target]]
    return sorted(_by_last_part(env)[target.rpartition(".")[2]]) if "." not in target or _is_ours(target) else []


def _is_ours(target: str) -> bool:
    return target.startswith("gradwire.")


def _by_last_part(env: BuildEnvironment) -> dict[str, set[str]]:
    """Full names of classes and functions by their last part; a name that several have is left out."""
    if not hasattr(env, "gradwire_last_parts"):
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name, entry in env.domains["py"].objects.items():
            if not entry.aliased and entry.objtype in ("class", "exception", "function", "data"):
                found[name.rpartition(".")[2]].add(name)
        for inventory in getattr(env, "intersphinx_inventory", {}).items():
            if inventory[0] in ("py:class", "py:exception"):
                for name in inventory[1]:
                    found[name.rpartition(".")[2]].add(name)
        env.gradwire_last_parts = defaultdict(set, {last: full for last, full in found.items() if len(full) == 1})
    return env.gradwire_last_parts


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve, priority=900)
    app.connect("env-updated", _forget)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _forget(app: Sphinx, env: BuildEnvironment) -> None:
    if hasattr(env, "gradwire_last_parts"):
        del env.gradwire_last_parts
