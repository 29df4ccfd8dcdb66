"""The picture is XML that any reader takes, is the same every time, and no text leaves its box."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from gradwire.autograd._graph_svg import _width
from gradwire.autograd.distributed_graph import DistributedGraph, GraphMessage, GraphNode, GraphWorker, assemble
from unit.autograd.graph_samples import AWKWARD, random_views, small_graph

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(graph: DistributedGraph) -> list[str]:
    return [item.text or "" for item in ElementTree.fromstring(graph.to_svg()).iter(f"{SVG}text")]


def test_small_graph() -> None:
    graph = small_graph()
    texts = texts_of(graph)
    for text in ("driver", "worker0", "gone", "no answer", "mul", "passed on", "?", "block()  512 B", "sum"):
        assert text in texts
    assert "gradients of 2 leaves" in texts
    assert "gone did not answer." in texts
    assert graph._repr_svg_() == graph.to_svg() == small_graph().to_svg()
    assert graph.to_svg() in graph._repr_html_()
    ElementTree.fromstring(graph._repr_html_())
    assert "prefers-color-scheme:dark" in graph.to_svg()


@pytest.mark.parametrize("name", [AWKWARD, "x" * 256, "梯度" * 100, "", "\x1b[31m\n"])
def test_names_are_escaped_and_fit(name: str) -> None:
    root = ElementTree.fromstring(small_graph(name, worker=name).to_svg())
    assert {item.tag.removeprefix(SVG) for item in root.iter()} == {
        "svg",
        "style",
        "g",
        "rect",
        "path",
        "title",
        "text",
    }
    assert not [item for item in root.iter() if "id" in item.attrib or any(key.startswith("on") for key in item.attrib)]
    check_texts(root)
    assert float(root.attrib["width"]) < 2_000


def check_texts(root: ElementTree.Element) -> None:
    """Text is inside its box, lane or picture, and in none of two boxes at once."""
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        for item in group.findall(f"{SVG}text") if rect is not None else ():
            assert rect is not None
            kind = item.get("class", "")
            size = 14 if "name" in kind else 11 if "soft" in kind else 12
            half = _width(item.text or "", size) / 2
            left, wide = float(rect.attrib["x"]), float(rect.attrib["width"])
            assert left <= float(item.attrib["x"]) - half + 0.1
            assert float(item.attrib["x"]) + half <= left + wide + 0.1
            assert float(rect.attrib["y"]) < float(item.attrib["y"])
            assert float(item.attrib["y"]) < float(rect.attrib["y"]) + float(rect.attrib["height"])
    rects = [item for item in root.iter(f"{SVG}rect") if item.attrib["class"].split()[0] in ("box", "pill")]
    areas = [[float(item.attrib[key]) for key in ("x", "y", "width", "height")] for item in rects]
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(areas, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_whatever_workers_say() -> None:
    for seed in range(150):
        views = random_views(seed)
        graph = assemble(1, views)
        check_texts(ElementTree.fromstring(graph.to_svg()))
        assert graph.to_svg() == assemble(1, random_views(seed)).to_svg()


def test_graph_without_messages() -> None:
    texts = texts_of(DistributedGraph(1, (GraphWorker("driver"),)))
    assert texts[0] == "driver"


def test_large_graph_is_shortened_and_says_so() -> None:
    nodes = tuple(GraphNode(f"n{number}", "ab"[number % 2], "segment", ("tanh",), 1) for number in range(10_001))
    messages = tuple(GraphMessage(i, f"n{i}", f"n{i + 1}", "m:f", num_bytes=4) for i in range(10_000))
    graph = DistributedGraph(1, (GraphWorker("a"), GraphWorker("b")), nodes, messages, (), 10_000)
    assert "Shortened: 100 of 10,000 messages are shown." in texts_of(graph)
    assert len(graph.to_svg()) < 100_000
    assert "200 of 10,000" in graph.to_mermaid()
    assert "2,000 of 10,000" in graph.to_dot()
    assert "Shortened" not in str(graph)
