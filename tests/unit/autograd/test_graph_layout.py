"""Boxes and labels do not overlap, lines lead from box to box and through none."""

from __future__ import annotations

import itertools
import random

from gradwire.autograd._graph_layout import Box, Lane, Layout, Line

Area = tuple[float, float, float, float]  # left, top, right, bottom
LABEL_HEIGHT = 20


def random_layout(seed: int) -> Layout:
    """Some lanes, boxes and lines, as the messages of a program might give."""
    rng = random.Random(seed)
    lanes = [Lane(rng.uniform(20, 200)) for _ in range(rng.randint(1, 5))]
    boxes = [
        Box(rng.randrange(len(lanes)), rng.uniform(20, 200), rng.choice((27, 44))) for _ in range(rng.randint(1, 25))
    ]
    lines = []
    for number, target in enumerate(boxes):
        for source in rng.sample(boxes[:number], min(number, rng.randint(0, 3))):
            has_label = source.lane != target.lane or rng.random() < 0.1
            lines.append(Line(source, target, rng.uniform(20, 200) if has_label else 0.0))
    return Layout(lanes, boxes, lines, header=40)


def overlap(one: Area, other: Area) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def area_of(box: Box) -> Area:
    return box.x - box.width / 2, box.y, box.x + box.width / 2, box.bottom


def label_of(line: Line) -> Area:
    (x, y), half = line.label, line.label_width / 2
    return x - half, y - LABEL_HEIGHT / 2, x + half, y + LABEL_HEIGHT / 2


def test_nothing_overlaps() -> None:
    for layout in map(random_layout, range(100)):
        boxes = [area_of(box) for box in layout.boxes]
        labels = [label_of(line) for line in layout.lines if line.label_width]
        assert not [pair for pair in itertools.combinations([*boxes, *labels], 2) if overlap(*pair)]


def test_everything_is_inside() -> None:
    for layout in map(random_layout, range(100)):
        for lane, following in itertools.pairwise(layout.lanes):
            assert lane.x + lane.width < following.x
        for box in layout.boxes:
            lane = layout.lanes[box.lane]
            left, top, right, bottom = area_of(box)
            assert lane.x < left
            assert right < lane.x + lane.width
            assert top >= 40
            assert bottom < layout.height
        for x, y in [point for line in layout.lines for point in line.points]:
            assert 0 <= x <= layout.width
            assert 40 <= y <= layout.height
        for left, top, right, bottom in [label_of(line) for line in layout.lines if line.label_width]:
            assert left >= -1
            assert right <= layout.width + 1
            assert top >= 40
            assert bottom <= layout.height


def test_lines_lead_down_from_box_to_box_and_through_none() -> None:
    for layout in map(random_layout, range(100)):
        for line in layout.lines:
            (first_x, first_y), (last_x, last_y) = line.points[0], line.points[-1]
            assert line.source.row < line.target.row
            assert first_y == line.source.bottom
            assert abs(first_x - line.source.x) < line.source.width / 2
            assert last_y == line.target.y
            assert abs(last_x - line.target.x) < line.target.width / 2
            for (x1, y1), (x2, y2) in itertools.pairwise(line.points):
                assert x1 == x2 or y1 == y2
                assert y1 <= y2
                part = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
                for box in layout.boxes:
                    left, top, right, bottom = area_of(box)
                    assert not overlap(part, (left, top + 0.1, right, bottom - 0.1))


def test_boxes_without_lines_and_no_boxes() -> None:
    assert Layout([Lane(50)], [], []).width > 50
    assert Layout([], [], []).width == 0
    boxes = [Box(0, 30, 20), Box(0, 30, 20)]
    Layout([Lane(50)], boxes, [])
    assert boxes[0].bottom < boxes[1].y


def test_what_needs_nothing_stands_beside_what_needs_it() -> None:
    first, second, late, last = (Box(lane, 30, 20) for lane in (0, 1, 2, 0))
    Layout([Lane(50), Lane(50), Lane(50)], [first, second, late, last], [Line(first, second), *to(last, second, late)])
    assert (first.row, second.row, late.row, last.row) == (0, 1, 1, 2)


def to(target: Box, *sources: Box) -> list[Line]:
    return [Line(source, target) for source in sources]
