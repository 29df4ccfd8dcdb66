"""Objects are put in the place of others wherever these are bound, and back."""

from __future__ import annotations

import sys
import types

import pytest
import torch.distributed.rpc as rpc

import gradwire
from gradwire import compat
from gradwire.compat.import_hook import ImportHook
from gradwire.compat.patching import Patch, has_identity


def test_a_patch_that_fails_leaves_nothing(program: types.ModuleType) -> None:
    program.first = before = object()  # type: ignore[attr-defined]
    tables = {program.__name__: lambda: {"first": 1, "second": 2}}
    with pytest.raises(TypeError):
        Patch(tables, {int: {"real": 3}})  # a built-in class cannot be changed
    assert vars(program)["first"] is before
    assert "second" not in vars(program)
    assert [hook for hook in sys.meta_path if isinstance(hook, ImportHook)] == []


def test_modules_imported_before_are_reached(program: types.ModuleType) -> None:
    torch_s_own, constant = program.rpc_sync, program.UNSET
    with compat.installed():
        assert program.rpc_sync is rpc.rpc_sync
        assert program.rpc_sync is not torch_s_own
        assert program.Reference is gradwire.rpc.RRef
        assert program.Caller.__dict__["call"] is rpc.rpc_sync
        assert program.Caller.plain is rpc.rpc_sync
        assert program.UNSET is constant, "numbers stay"
    assert program.rpc_sync is torch_s_own
    assert program.Caller.__dict__["call"] is torch_s_own
    assert program.Caller.plain is torch_s_own


def test_classes_that_raise_when_looked_at_are_left_alone(program: types.ModuleType) -> None:
    class Hostile(type):
        @property
        def __module__(cls) -> str:  # type: ignore[override]
            raise ValueError("no module")

    program.strange = Hostile("Strange", (), {})  # type: ignore[attr-defined]
    with compat.installed():
        assert program.rpc_sync.__module__.startswith("gradwire.")


def test_gradwire_s_own_modules_are_left_alone() -> None:
    before = {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("gradwire.")}
    with compat.installed():
        for name, names in before.items():
            changed = [
                key for key, value in vars(sys.modules[name]).items() if key in names and names[key] is not value
            ]
            assert [key for key in changed if not key.startswith("_")] == [], name


@pytest.mark.parametrize("value", [1, 1.5, "text", None, (), sys])
def test_plain_values_have_no_identity(value: object) -> None:
    assert not has_identity(value)
    assert has_identity(has_identity)
    assert has_identity(object())
