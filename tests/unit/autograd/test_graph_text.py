"""DOT and Mermaid, read back; names that could break out of a string do not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from gradwire.autograd._graph_text import describe, format_bytes, label_of
from gradwire.autograd.distributed_graph import GraphMessage, GraphNode
from gradwire.wire.exceptions import clean
from unit.autograd.graph_samples import AWKWARD, small_graph

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[{}\[\];=,]|\w+)')


def tokens_of(dot: str) -> Iterator[str]:
    """The words of DOT, strings unescaped; raises where there is none."""
    place = 0
    while place < len(dot.rstrip()):
        found = _TOKEN.match(dot, place)
        assert found is not None, dot[place : place + 40]
        place = found.end()
        word = found[1]
        yield re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], word[1:-1]) if word[0] == '"' else word


@pytest.mark.parametrize("name", ["layers:block", AWKWARD])
def test_dot(name: str) -> None:
    graph = small_graph(name, worker=name)
    words = list(tokens_of(graph.to_dot()))
    assert words[:3] == ["digraph", "context", "{"]
    assert words.count("{") == words.count("}") == 1 + len(graph.workers)
    assert words.count("subgraph") == len(graph.workers)
    arrows = [(words[i - 1], words[i + 1]) for i, word in enumerate(words) if word == "->"]
    assert arrows == [(m.source, m.target) for m in graph.messages] + list(graph.links)
    labels = {words[i - 2]: words[i + 2] for i, word in enumerate(words) if word == "label" and words[i - 1] == "["}
    assert labels["n0"] == "mul\n1 leaf, 1 KiB"
    assert {"n0", "n1", "n2", "n3", "n4"} <= labels.keys()
    assert clean(name) in words  # as the label of a worker
    assert "gone did not answer." in words
    assert "dashed" in words


@pytest.mark.parametrize("name", ["layers:block", AWKWARD])
def test_mermaid(name: str) -> None:
    graph = small_graph(name, worker=name)
    lines = graph.to_mermaid().splitlines()
    assert lines[0] == "flowchart TB"
    string = r'"[^"&<>|#]*(?:(?:<br/>|#\d+;)[^"&<>|#]*)*"'
    patterns = {
        "note": r"  %% .*",
        "subgraph": rf"  subgraph w\d\[({string})\]",
        "node": rf"    (n\d)\(({string})\)",
        "end": "  end",
        "message": rf"  (n\d) (-->|-\.->|==>)\|({string})\| (n\d)",
        "link": r"  (n\d) -\.-> (n\d)",
    }
    found: dict[str, list[re.Match[str]]] = {kind: [] for kind in patterns}
    for line in lines[1:]:
        kind, match = next((k, m) for k, p in patterns.items() if (m := re.fullmatch(p, line)))
        found[kind].append(match)
    assert len(found["subgraph"]) == len(found["end"]) == len(graph.workers)
    assert [(m[1], m[4]) for m in found["message"]] == [(m.source, m.target) for m in graph.messages]
    assert [m[2] for m in found["message"]] == ["-->", "==>", "-.->"]
    assert [m.groups() for m in found["link"]] == list(graph.links)
    assert [m[1] for m in found["node"]] == ["n0", "n2", "n4", "n1", "n3"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (1 << 55, "32768 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_what_nodes_are() -> None:
    assert describe(GraphNode("n0", "w", "unknown")) == ("?",)
    assert describe(GraphNode("n0", "w", "received")) == ("received",)
    assert describe(GraphNode("n0", "w", "segment")) == ("sent",)
    assert describe(GraphNode("n0", "w", "segment", is_passed_on=True)) == ("passed on",)
    assert describe(GraphNode("n0", "w", "roots")) == ("roots",)
    assert describe(GraphNode("n0", "w", "segment", (), 0, 1, 4)) == ("1 leaf, 4 B",)
    many = GraphNode("n0", "w", "roots", ("convolution", "native_batch_norm", "relu"), 9, 1234, 4096)
    assert describe(many) == ("convolution …", "1,234 leaves, 4 KiB")


def test_what_messages_are() -> None:
    assert label_of(GraphMessage(1, "n0", "n1", "pkg.layers:Block.forward", num_bytes=3)) == ("forward()", "3 B")
    assert label_of(GraphMessage(1, "n0", "n1", "layers:block", is_result=True)) == ("block result",)
