"""Tests of ``torch.distributed._shard`` from a checkout of PyTorch's sources, made to run without GPUs.

The installed torch does not have these tests, only what they have in common. Nothing of them is copied: they are read where
they are, and changed on the way from text to code. ``"rank:1/cuda:1"`` becomes ``"rank:1/cpu"``, ``.cuda(...)`` becomes
``.cpu()``, NCCL becomes gloo, and the decorators that skip a test without GPUs let it run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from conformance.expected import SHARD_LEFT_OUT
from conformance.suites import Case, cases_of, stand_in_for_expecttest

FOLDER = "test/distributed/_shard"
"""Where the tests are in a checkout."""

_HELPERS = "torch.testing._internal.distributed._shard"
_PACKAGE = "pytorch_checkout"
_GPU = re.compile(r"\bcuda(:\d+)?(?![\w:])")
_NCCL = re.compile(r"^nccl$")
_GPU_OF = re.compile(r"\bcuda:$")
"""The text before a number that is filled in."""


def load_checkout(checkout: Path) -> list[Case]:
    """List the tests of a checkout, except for those that need GPUs for what they look at.

    Raises:
        FileNotFoundError: The folder is not a checkout of PyTorch's sources.
        ImportError: It is of another version than the installed torch.
    """
    files = sorted((checkout / FOLDER).rglob("test_*.py"))
    if not files:
        raise FileNotFoundError(f"{checkout / FOLDER} has no tests; point to a checkout of PyTorch's sources")
    stand_in_for_expecttest()
    _satisfy_decorators()
    sys.meta_path.insert(0, _HelperFinder())
    importlib.import_module(f"{_HELPERS}.sharded_tensor").with_comms = with_comms  # type: ignore[attr-defined]
    return [case for file in files for case in _load_file(file, checkout / FOLDER)]


def _load_file(file: Path, folder: Path) -> Iterator[Case]:
    name = ".".join([_PACKAGE, *file.relative_to(folder).with_suffix("").parts])
    spec = importlib.util.spec_from_file_location(name, file, loader=_CpuLoader(name, str(file)))
    assert spec is not None
    for package in _parents_of(name):
        sys.modules.setdefault(package, types.ModuleType(package))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # tests send their functions to other ranks, by name
    try:
        _CpuLoader(name, str(file)).exec_module(module)
    except ImportError as error:
        version = torch.__version__.partition("+")[0]
        raise ImportError(f"{file} is not for the installed torch; use a checkout of version {version}") from error
    for suite in vars(module).values():
        if isinstance(suite, type) and issubclass(suite, unittest.TestCase) and suite.__module__ == name:
            yield from (case for case in cases_of(suite) if case.name not in SHARD_LEFT_OUT)


def _parents_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]


# -- no GPUs, no NCCL --------------------------------------------------------------------------------------------------


def _satisfy_decorators() -> None:
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_lt_x_gpu = lambda *_: _unchanged  # type: ignore[attr-defined]
    common.requires_nccl = lambda: _unchanged  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]


def _unchanged(test: Any) -> Any:
    return test


def with_comms(func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
    """Run a test in a process group of gloo, and among RPC workers; torch's takes NCCL, and skips the test without it."""
    if func is None:
        return lambda test: with_comms(test, init_rpc)

    @wraps(func)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.init_comms(init_rpc=init_rpc, backend="gloo")
        func(self, *args, **kwargs)
        self.destroy_comms(destroy_rpc=init_rpc)

    return run


# -- from text to code -------------------------------------------------------------------------------------------------


class _CpuLoader(importlib.abc.Loader):
    """Runs a file with its GPUs replaced. Writes no bytecode: it would be taken for that of the file as it is."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(to_cpu(Path(self._path).read_text()), self._path, "exec"), vars(module))


class _HelperFinder(importlib.abc.MetaPathFinder):
    """Finds what the tests have in common, in the installed torch, for the same treatment."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_HELPERS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _CpuLoader(fullname, spec.origin)
        return spec


def to_cpu(source: str) -> ast.Module:
    """A program that does on the CPU, with gloo, what another does on GPUs with NCCL."""
    tree: ast.Module = ast.fix_missing_locations(_ToCpu().visit(ast.parse(source)))
    return tree


class _ToCpu(ast.NodeTransformer):
    """Puts ``cpu`` where the GPUs were."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        return ast.copy_location(ast.Constant(_NCCL.sub("gloo", _GPU.sub("cpu", node.value))), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        match node.value:
            case ast.Call(func=ast.Attribute(attr="set_device_map" | "set_device_index" | "set_device")):  # of GPUs
                return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values: list[ast.expr] = []
        for value in node.values:
            if isinstance(value, ast.FormattedValue) and values and _is_text(values[-1], _GPU_OF.search):
                values[-1] = ast.Constant(_GPU_OF.sub("cpu", values[-1].value))  # type: ignore[attr-defined]
            else:
                values.append(value if _is_text(value, _GPU_OF.search) else self.visit(value))
        return ast.copy_location(ast.JoinedStr(values), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name("torch"), attr="device"):
                node.args = [ast.Constant("cpu") if _is_number(argument) else argument for argument in node.args]
            case ast.Attribute(attr="cuda"):
                node.func.attr = "cpu"
                node.args = []
        return node


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _is_text(node: ast.expr, found: Callable[[str], Any]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(found(node.value))
