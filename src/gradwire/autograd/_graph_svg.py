"""Distributed graphs as pictures: SVG without ids, scripts or fonts of its own, the same for the same graph.

It is shown as a file, as an image of a README and inside notebooks. So its styles apply to itself alone, it brings its
own background, and colours follow the reader's preference for light or dark.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape, quoteattr

from gradwire.autograd._graph_layout import Box, Lane, Layout, Line, Point
from gradwire.autograd._graph_text import count, describe, label_of
from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.autograd.distributed_graph import DistributedGraph, GraphMessage, GraphNode, GraphWorker

_MARGIN: Final = 20.0
_CORNER: Final = 7.0
_LINE: Final = 17.0  # from one line of text to the next
_MOST_CHARS: Final = 30  # of one line of text
_NUM_HUES: Final = 6

_STYLE: Final = """
.gw{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
--page:#fff;--lane:#f6f8fa;--edge:#d1d9e0;--text:#1f2328;--soft:#59636e;--alarm:#d1242f;\
--h0:#0969da;--h1:#1a7f37;--h2:#8250df;--h3:#bc4c00;--h4:#bf3989;--h5:#0a7d8c}
@media (prefers-color-scheme:dark){.gw{--page:#0d1117;--lane:#151b23;--edge:#3d444d;--text:#f0f6fc;--soft:#9198a1;\
--alarm:#f85149;--h0:#4493f8;--h1:#3fb950;--h2:#ab7df8;--h3:#f0883e;--h4:#db61a2;--h5:#39c5cf}}
.gw text{fill:var(--text);text-anchor:middle}
.gw .name{font-weight:600;font-size:14px}
.gw .soft{fill:var(--soft);font-size:11px}
.gw .left{text-anchor:start}
.gw .page{fill:var(--page);stroke:var(--edge)}
.gw .lane{fill:var(--lane);stroke:var(--edge)}
.gw .box{fill:var(--page);stroke:var(--hue);stroke-width:1.5}
.gw .root{fill:var(--hue)}
.gw .root+text,.gw .root+text+text{fill:var(--page);font-weight:600}
.gw .bar{fill:var(--hue)}
.gw .dash{stroke-dasharray:4 3}
.gw .line{fill:none;stroke:var(--hue);stroke-width:1.75}
.gw .link{fill:none;stroke:var(--soft);stroke-width:1.25}
.gw .tip{fill:var(--hue)}
.gw .link+.tip{fill:var(--soft)}
.gw .pill{fill:var(--page);stroke:var(--hue)}
.gw .h0{--hue:var(--h0)}.gw .h1{--hue:var(--h1)}.gw .h2{--hue:var(--h2)}
.gw .h3{--hue:var(--h3)}.gw .h4{--hue:var(--h4)}.gw .h5{--hue:var(--h5)}
.gw .wait{--hue:var(--alarm)}
"""


def to_svg(graph: DistributedGraph) -> str:
    return _Picture(graph).svg()


class _Picture:
    def __init__(self, graph: DistributedGraph) -> None:
        self._graph = graph
        used = {node.worker for node in graph.nodes}
        self._workers = [item for item in graph.workers if item.name in used or not graph.num_messages]
        lane_of = {worker.name: number for number, worker in enumerate(self._workers)}
        self._boxes = {node.id: _box(node, lane_of[node.worker]) for node in graph.nodes}
        self._messages = [(item, self._line(item.source, item.target, _label(item))) for item in graph.messages]
        self._links = [self._line(source, target) for source, target in graph.links]
        lanes = [Lane(max(96.0, _width(_cut(item.name), 14) + 8, _width(_state(item), 11))) for item in self._workers]
        lines = [line for _, line in self._messages] + self._links
        self._layout = Layout(lanes, list(self._boxes.values()), lines, 54 if any(map(_state, self._workers)) else 38)

    def _line(self, source: str, target: str, label: str = "") -> Line:
        return Line(self._boxes[source], self._boxes[target], _width(label, 12) + 16 if label else 0.0)

    def svg(self) -> str:
        notes = self._captions()
        height = self._layout.height
        parts = [self._lane(number) for number in range(len(self._workers))]
        parts += [_path(line.points, "link", "") for line in self._links]
        parts += [self._arrow(item, line) for item, line in self._messages]
        parts += [self._node(node) for node in self._graph.nodes]
        parts += [self._pill(item, line) for item, line in self._messages]
        parts += [_text(note, 2.0, height + 24 + _LINE * number, "soft left") for number, note in enumerate(notes)]
        wide = max([self._layout.width, *(_width(note, 11) for note in notes)]) + 2 * _MARGIN
        tall = height + 2 * _MARGIN + 12 + _LINE * len(notes) - 4
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="gw" viewBox="0 0 {_n(wide)} {_n(tall)}" '
                f'width="{_n(wide)}" height="{_n(tall)}" role="img" aria-label={quoteattr(_plain(str(self._graph)))}>\n',
                f"<style>{_STYLE}</style>\n",
                f'<rect class="page" x="0.5" y="0.5" width="{_n(wide - 1)}" height="{_n(tall - 1)}" rx="10"/>\n',
                f'<g transform="translate({_n(_MARGIN)} {_n(_MARGIN)})">\n',
                "\n".join(part for part in parts if part),
                "\n</g>\n</svg>\n",
            ]
        )

    def _captions(self) -> list[str]:
        graph = self._graph
        lines = ["Arrows: tensors of the forward pass. Gradients flow back along them."]
        if any(node.is_passed_on for node in graph.nodes):
            lines.append("Dashed boxes: passed on untouched. Gradients can skip them.")
        if any(not item.has_arrived for item in graph.messages):
            lines.append("Dashed arrows: the message has not arrived.")
        if any(item.waits_for for item in graph.messages):
            lines.append("Red: a backward pass waits for the gradient.")
        return lines + list(graph.notes)

    def _hue(self, worker: int) -> str:
        return f"h{worker % _NUM_HUES}"

    def _lane(self, number: int) -> str:
        worker, lane = self._workers[number], self._layout.lanes[number]
        dash = "" if worker.answered else " dash"
        return (
            f'<g class="{self._hue(number)}"><rect class="lane{dash}" x="{_n(lane.x)}" y="0" width="{_n(lane.width)}" '
            f'height="{_n(self._layout.height)}" rx="8"/>'
            f'<rect class="bar" x="{_n(lane.x + 12)}" y="0" width="{_n(lane.width - 24)}" height="3" rx="1.5"/>'
            + _text(_cut(worker.name), lane.middle, 26, "name")
            + _text(_state(worker), lane.middle, 43, "soft")
            + "</g>"
        )

    def _arrow(self, item: GraphMessage, line: Line) -> str:
        hue = "wait" if item.waits_for else self._hue(line.source.lane)
        return f'<g class="{hue}">{_path(line.points, "line", "" if item.has_arrived else " dash")}</g>'

    def _pill(self, item: GraphMessage, line: Line) -> str:
        label, (x, y) = _label(item), line.label
        hue = "wait" if item.waits_for else self._hue(line.source.lane)
        tensors = f", {count(item.num_tensors, 'tensor')}"
        size = "" if item.num_bytes is None else f"{tensors}, {count(item.num_bytes, 'byte')}"
        where = f", sent at {item.site}" if item.site else ""
        waits = f", waits for {item.waits_for}" if item.waits_for else ""
        return (
            f'<g class="{hue}"><title>{_plain(f"{item.function}{size}{where}{waits}")}</title>'
            f'<rect class="pill" x="{_n(x - line.label_width / 2)}" y="{_n(y - 10)}" '
            f'width="{_n(line.label_width)}" height="20" rx="10"/>{_text(label, x, y + 4)}</g>'
        )

    def _node(self, node: GraphNode) -> str:
        box, lines = self._boxes[node.id], _lines(node)
        dash = " dash" if node.is_passed_on or node.kind == "unknown" else ""
        root = " root" if node.kind == "roots" else ""
        title = f"{', '.join(node.operators) or node.kind} ({count(node.num_operators, 'operator')})"
        texts = [
            _text(line, box.x, box.y + 7 + _LINE * (number + 0.75) - 3, "" if number == 0 else "soft")
            for number, line in enumerate(lines)
        ]
        return (
            f'<g class="{self._hue(box.lane)}"><title>{_plain(title)}</title>'
            f'<rect class="box{root}{dash}" x="{_n(box.x - box.width / 2)}" y="{_n(box.y)}" width="{_n(box.width)}" '
            f'height="{_n(box.height)}" rx="{7 if len(lines) > 1 else 12}"/>{"".join(texts)}</g>'
        )


def _lines(node: GraphNode) -> list[str]:
    return [_cut(line) for line in describe(node)]


def _label(message: GraphMessage) -> str:
    name, *size = label_of(message)
    return "  ".join([_cut(name), *size])


def _state(worker: GraphWorker) -> str:
    if not worker.answered:
        return "no answer"
    return f"gradients of {count(worker.num_gradients, 'leaf', 'leaves')}" if worker.num_gradients else ""


def _box(node: GraphNode, lane: int) -> Box:
    lines = _lines(node)
    width = max(_width(line, 12 if number == 0 else 11) for number, line in enumerate(lines)) + 22
    return Box(lane, max(36.0, width), 10 + _LINE * len(lines))


def _cut(text: str) -> str:
    """Return a text that fits, with its middle left out if it is too long."""
    text = clean(text)
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS // 2]}…{text[1 - _MOST_CHARS // 2 :]}"


def _width(text: str, size: float) -> float:
    """Return how wide a text is: fonts of this kind have one width for all letters, and twice that for wide ones."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text) * size * 0.61


def _text(text: str, x: float, y: float, kind: str = "") -> str:
    if not text:
        return ""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{_n(x)}" y="{_n(y)}" xml:space="preserve">{_plain(text)}</text>'


def _path(points: Sequence[Point], kind: str, dash: str) -> str:
    """Return a line with round corners and an arrowhead; its last part leads down."""
    end_x, end_y = points[-1]
    points = [*points[:-1], (end_x, end_y - 5)]
    commands = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        start, end = _towards(corner, before), _towards(corner, after)
        commands.append(f"L{_n(start[0])} {_n(start[1])}Q{_n(corner[0])} {_n(corner[1])} {_n(end[0])} {_n(end[1])}")
    commands.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    tip = f"M{_n(end_x - 4)} {_n(end_y - 7)}L{_n(end_x)} {_n(end_y)}L{_n(end_x + 4)} {_n(end_y - 7)}z"
    return f'<path class="{kind}{dash}" d="{"".join(commands)}"/><path class="tip" d="{tip}"/>'


def _towards(corner: Point, other: Point) -> Point:
    """Return where a round corner begins or ends."""
    length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])
    share = min(_CORNER, length / 2) / length if length else 0.0
    return corner[0] + (other[0] - corner[0]) * share, corner[1] + (other[1] - corner[1]) * share


def _plain(text: str) -> str:
    return escape(clean(text))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
