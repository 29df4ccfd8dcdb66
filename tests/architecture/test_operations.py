"""Every operation that peers can ask for has a row in docs/concepts/trust.md: what it takes, and what is checked."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import get_args

import gradwire
from gradwire.rpc import functions
from gradwire.rref import _messages as _actions
from gradwire.testing import local_agents
from gradwire.wire import plain as _registry
from gradwire.wire.messages import MESSAGE_TYPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "trust.md"
SECTION = "## Operations that peers can ask for"
SOURCES = Path(gradwire.__file__).parent


def import_everything() -> None:
    """Operations register when their modules are imported."""
    for package in ("autograd", "checkpoint", "nn", "optim", "rref", "shard"):
        module = importlib.import_module(f"gradwire.{package}")
        for item in pkgutil.iter_modules(module.__path__, f"gradwire.{package}."):
            importlib.import_module(item.name)


def registered() -> set[str]:
    """The names of all operations, notices, notes and classes that a complete worker takes from others."""
    import_everything()
    with local_agents(1, "inproc", trust="data") as (agent,):
        server = agent.server
        assert server._keeper is not None
        found = {*server._control, *agent.notices._handlers, server._keeper[0]}
        found |= {interceptor.name for interceptor in agent.interceptors}
    found |= {name for name, item in functions.exposed.items() if _is_ours(item)}
    found |= {name for name, item in _registry.BY_NAME.items() if _is_ours(item.kind)}
    return found | in_sources()


def in_sources() -> set[str]:
    """Control operations and notices that any code registers; some workers have them only when they join or are started."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        for name in re.findall(r"(?:register_control|notices\.register)\(([^,()]+), ", path.read_text()):
            found.add("~" + (name.strip('"') if '"' in name else _constant(path, name)))
    return found - {"~self"}  # the definition


def _constant(path: Path, name: str) -> str:
    """The value that a module gives a name; the name itself where it is not a constant."""
    module = ".".join(("gradwire", *path.relative_to(SOURCES).with_suffix("").parts))
    return str(getattr(importlib.import_module(module), name, name))


def _is_ours(item: object) -> bool:
    return str(getattr(item, "__module__", "")).startswith(f"{gradwire.__name__}.")


def documented() -> set[str]:
    """The names in the first column of the section's tables."""
    text = DOCUMENT.read_text().partition(SECTION)[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_operation_has_a_row() -> None:
    missing = registered() - documented()
    assert not missing, f"docs/concepts/trust.md, {SECTION!r}, has no row for: {', '.join(sorted(missing))}"


def test_every_row_is_about_an_operation() -> None:
    messages = {kind.__name__ for kind in (*MESSAGE_TYPES.values(), *get_args(_actions.Message))}
    gone = documented() - registered() - messages
    assert not gone, f"docs/concepts/trust.md, {SECTION!r}, has rows for what is not there: {', '.join(sorted(gone))}"
