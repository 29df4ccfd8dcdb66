"""Names of modules and tests, and what may be used where.

Some rules have exceptions that are older than the rule. `exceptions.txt` has them, and may only become shorter. After
one was removed: ``UPDATE_EXCEPTIONS=1 python -m pytest tests/architecture/test_modules.py``. Nothing is added that way.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gradwire

SOURCE = Path(gradwire.__file__).parent
UNIT_TESTS = Path(__file__).parents[1] / "unit"
LIST = Path(__file__).with_name("exceptions.txt")
MODULES = sorted(SOURCE.rglob("*.py"))

# torch has modules of these names, and programs that use torch import them from the same places here.
LIKE_TORCH_S = {
    "rpc/functions.py",
    "rpc/options.py",
    "shard/api.py",
    "shard/metadata.py",
    "shard/sharder.py",
    "shard/sharding_plan.py",
    "shard/sharding_spec.py",
}


def test_unit_tests_mirror_the_source() -> None:
    """`tests/unit/rpc/test_client.py` is about `rpc/client.py` or `rpc/_client.py`; so is `test_client_deadlines.py`."""
    known = {_unit_test_of(path).removesuffix(".py") for path in MODULES}
    found = {path.relative_to(UNIT_TESTS).as_posix() for path in UNIT_TESTS.rglob("test_*.py")}
    strays = [path for path in found if not any(path.startswith((f"{name}.py", f"{name}_")) for name in known)]
    check("mirror", Counter(strays), "is not named after a module")


def _unit_test_of(module: Path) -> str:
    relative = module.relative_to(SOURCE)
    return (relative.parent / f"test_{relative.stem.strip('_')}.py").as_posix()


def test_every_module_has_a_name_of_its_own() -> None:
    """A name in a traceback or a search then means one file. The front doors of packages are these three."""
    doors = ("__init__", "__main__", "api")
    paths = [path.relative_to(SOURCE).as_posix() for path in MODULES if path.stem not in doors]
    names = Counter(_bare(path) for path in paths if path not in LIKE_TORCH_S)
    found = [path for path in paths if path not in LIKE_TORCH_S and names[_bare(path)] > 1]
    check("basename", Counter(found), "has the name of another module")


def _bare(path: str) -> str:
    return Path(path).stem.lstrip("_")


def test_private_names_of_torch_are_in_one_module() -> None:
    """So that a new release of torch breaks one file, and its tests say which name."""
    found: Counter[str] = Counter()
    for path in MODULES:
        if path != SOURCE / "_torch.py":
            found[_package_of(path)] += len({name for name, _ in private_torch_names(ast.parse(path.read_text()))})
    check("private-torch", found, "uses more private names of torch outside gradwire/_torch.py than before")


def private_torch_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the dotted private names of torch that a module imports or uses, and their lines."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = {item.asname or item.name.split(".")[0]: item.name for item in node.names}
            named = [(item.name, node.lineno) for item in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
            named = [(f"{node.module}.{item.name}", node.lineno) for item in node.names]
        else:
            continue
        aliases |= {alias: name for alias, name in imported.items() if name.split(".")[0] == "torch"}
        yield from ((name, line) for name, line in named if _is_private_torch(name))
    aliases |= {"torch": "torch"}
    for node in ast.walk(tree):
        name, base = "", node
        while isinstance(base, ast.Attribute):
            name, base = f".{base.attr}{name}", base.value
        if name and isinstance(base, ast.Name) and base.id in aliases:
            full = aliases[base.id].rstrip(".") + name
            if _is_private_torch(full):
                yield full, node.lineno


def _is_private_torch(name: str) -> bool:
    top, *rest = name.split(".")
    return top == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_private_names_of_torch_are_found() -> None:
    text = (
        "import torch, torch._dynamo\nfrom torch.distributed import _shard, nn as n\nfrom torch import Tensor\n"
        "torch._C._get(Tensor._make(n.functional))\nother._x\ntorch.__version__\nn._private.x\n"
    )
    assert {name for name, _ in private_torch_names(ast.parse(text))} == {
        "torch._dynamo",
        "torch.distributed._shard",
        "torch._C",
        "torch._C._get",
        "torch.Tensor._make",
        "torch.distributed.nn._private",
        "torch.distributed.nn._private.x",
    }


def test_base_exceptions_are_caught_at_boundaries_alone() -> None:
    """Ctrl-C is deferred (`gradwire._interrupts`), so only code that runs the user's, or a whole process, catches all."""
    found: Counter[str] = Counter()
    for path in MODULES:
        handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
        found[_package_of(path)] += sum(map(_catches_all, handlers))
    check("base-exception", found, "catches BaseException in more places than before")


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(
        isinstance(node, ast.Name) and node.id in ("BaseException", "KeyboardInterrupt")
        for node in ast.walk(handler.type)
    )


def _package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def check(rule: str, found: Counter[str], problem: str) -> None:
    """Compare what breaks a rule with the exceptions to it, which are lines ``rule count name``."""
    lines = LIST.read_text().splitlines()
    allowed: Counter[str] = Counter()
    for line in lines:
        if line.startswith(f"{rule} "):
            _, count, name = line.split(" ", 2)
            allowed[name] = int(count)
    more = sorted((found - allowed).elements())
    assert not more, f"{problem}: {sorted(set(more))}"
    if os.environ.get("UPDATE_EXCEPTIONS"):
        kept = [line for line in lines if not line.startswith(f"{rule} ")]
        kept += [f"{rule} {count} {name}" for name, count in (found & allowed).items()]
        LIST.write_text("".join(f"{line}\n" for line in sorted(kept)))
    else:
        fewer = sorted(set((allowed - found).elements()))
        assert not fewer, f"run again with UPDATE_EXCEPTIONS=1: {LIST.name} has more than there is: {rule} of {fewer}"
