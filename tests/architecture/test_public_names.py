"""The public surface is what `public_names.txt` says, no more and no less.

After a change that is meant: ``UPDATE_PUBLIC_NAMES=1 python -m pytest tests/architecture/test_public_names.py``, and look
at the difference before it is committed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest

LIST = Path(__file__).with_name("public_names.txt")
ALWAYS = ("gradwire", "gradwire.rpc", "gradwire.config", "gradwire.errors", "gradwire.testing")
IF_EXPORTED = (
    "gradwire.autograd",
    "gradwire.checkpoint",
    "gradwire.cluster",
    "gradwire.compat",
    "gradwire.dashboard",
    "gradwire.nn",
    "gradwire.observe",
    "gradwire.optim",
    "gradwire.rref",
    "gradwire.shard",
    "gradwire.shard.sharded_tensor",
    "gradwire.telemetry",
    "gradwire.transports.tls",
)


def names_of(module: ModuleType) -> list[str]:
    """What `__all__` says; without one, what the module defines itself."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(declared)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    constants = {name for name in vars(module) if name.isupper() and not name.startswith("_")}
    return sorted(name for name in own | constants if not name.startswith("_"))


def public_modules() -> list[ModuleType]:
    modules = [importlib.import_module(name) for name in ALWAYS]
    for name in IF_EXPORTED:
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            modules += [module] if hasattr(module, "__all__") else []
    return modules


def actual_lines() -> list[str]:
    return sorted(f"{module.__name__}.{name}" for module in public_modules() for name in names_of(module))


def test_the_surface_is_the_one_that_was_agreed() -> None:
    actual = actual_lines()
    if os.environ.get("UPDATE_PUBLIC_NAMES"):
        LIST.write_text("".join(f"{line}\n" for line in actual))
    agreed = LIST.read_text().splitlines()
    added, missing = sorted(set(actual) - set(agreed)), sorted(set(agreed) - set(actual))
    assert (added, missing) == ([], []), f"set UPDATE_PUBLIC_NAMES=1 if this is meant: added {added}, missing {missing}"
    assert agreed == actual


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_every_name_is_there_and_documented(module: ModuleType) -> None:
    for name in names_of(module):
        value = getattr(module, name)
        if get_origin(value) is not None:
            continue  # an alias such as Callable[...], which Python 3.10 takes for a class
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            assert inspect.getdoc(value), f"{module.__name__}.{name} has no docstring"
    assert len(set(names_of(module))) == len(names_of(module))
