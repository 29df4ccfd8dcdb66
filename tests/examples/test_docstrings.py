"""The examples in docstrings run. They are excerpts, so each is given what a reader has to imagine."""

from __future__ import annotations

import contextlib
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.optim import DistributedOptimizer
from gradwire.shard import ChunkShardingSpec, Sharder

SOURCES = Path(gradwire.__file__).parent
EXAMPLE = re.compile(r"^( *)Example::\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)
EXAMPLES = {
    f"{path.relative_to(SOURCES)}-{number}": textwrap.dedent(match[2])
    for path in sorted(SOURCES.rglob("*.py"))
    for number, match in enumerate(EXAMPLE.finditer(path.read_text()))
}


class MySharder(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


PUBLIC = {
    name: getattr(module, name) for module in (gradwire.optim, gradwire.shard, gradwire) for name in module.__all__
}


def imagined(cluster: gradwire.Cluster) -> dict[str, Any]:
    layer = cluster.workers[0].module(nn.Linear, 4, 1)
    by_rows, by_columns = (ChunkShardingSpec(dim, ["worker0/cpu", "worker1/cpu"]) for dim in (0, 1))
    return {
        "cluster": cluster,
        "train": lambda: cluster.workers[0].call(torch.add, 1, 2),
        "compute_loss": lambda: layer(torch.ones(2, 4)).sum(),
        "optimizer": DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1),
        "model": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
        "columns": by_columns,
        "rows": by_rows,
        "by_rows": by_rows,
        "MySharder": MySharder,
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_in_docstrings(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    text = EXAMPLES[example]
    names = {"gradwire": gradwire, "torch": torch, "x": torch.ones(2), "y": torch.ones(2), **PUBLIC}
    with contextlib.ExitStack() as stack:
        if "Cluster.local(" not in text:
            names |= imagined(stack.enter_context(gradwire.Cluster.local(2)))
        exec(compile(text, example, "exec"), names)


def test_no_example_in_a_docstring_is_missed() -> None:
    assert len(EXAMPLES) == sum(path.read_text().count("Example::") for path in SOURCES.rglob("*.py")) > 0
