"""Places boxes in lanes and lines between them; numbers in, numbers out.

lane 0          lane 1          Lanes stand side by side. Each row has at most one box of a lane, and a box is below
+-----+                         all that lead to it. Lines leave at the bottom of a box and end at the top of
| box |                         another. In between they run
+-----+                           - down, in the source's lane: straight if no box is in the way, else in a *gutter*
   |                                beside the boxes,
   +--(label)---+                 - across, in the gap above the target's row: each on a *track* of its own, so that
                v                   no two labels meet.
             +-----+
             | box |
             +-----+
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

PORT: Final = 16.0  # between lines that end at one box
GUTTER: Final = 12.0  # between lines beside boxes
TRACK: Final = 14.0  # between lines that run across,
LABELLED_TRACK: Final = 30.0  # and those with labels
ROOM: Final = 16.0  # around boxes
LANE_GAP: Final = 20.0

Point = tuple[float, float]


@dataclass(slots=True, eq=False)
class Box:
    """Something in a lane; the layout says where."""

    lane: int
    width: float
    height: float
    row: int = 0
    x: float = 0.0  # of its centre
    y: float = 0.0  # of its top

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass(slots=True, eq=False)
class Line:
    """From one box to another; the layout says along which points."""

    source: Box
    target: Box
    label_width: float = 0.0  # 0 for none
    points: list[Point] = field(default_factory=list)
    label: Point = (0.0, 0.0)  # the middle of the label
    gutter: int | None = None  # number of its track there, from the boxes outwards
    start: float = 0.0  # where it leaves its source, from the middle of the box
    end: float = 0.0  # where it reaches its target, likewise

    @property
    def direction(self) -> int:
        """Whether it leads to the left (-1), stays in its lane (0) or leads to the right (1)."""
        return (self.target.lane > self.source.lane) - (self.target.lane < self.source.lane)

    @property
    def side(self) -> int:
        """Where its gutter is."""
        return self.direction or 1


@dataclass(slots=True)
class Lane:
    """A column."""

    min_width: float
    x: float = 0.0
    width: float = 0.0
    middle: float = 0.0  # of its boxes
    half: float = 0.0  # of its widest box
    num_left: int = 0  # lines in its gutters
    num_right: int = 0


class Layout:
    """Everything in its place.

    Args:
        lanes: Lanes, with the least width of each.
        boxes: Boxes, each after all that lead to it.
        lines: Lines, each from an earlier box to a later one.
        header: Room above the first row.
    """

    def __init__(self, lanes: Sequence[Lane], boxes: Sequence[Box], lines: Sequence[Line], header: float = 0.0) -> None:
        self.lanes, self.boxes, self.lines = lanes, boxes, lines
        self._header = header
        self._incoming: dict[Box, list[Line]] = {box: [] for box in boxes}
        self._outgoing: dict[Box, list[Line]] = {box: [] for box in boxes}
        for line in lines:
            self._outgoing[line.source].append(line)
            self._incoming[line.target].append(line)
        self._rows: dict[tuple[int, int], Box] = {}  # by lane and row
        self._place_rows()
        self._place_gutters()
        self._place_ends()
        self._place_lanes()
        self._place_heights()
        self.width = self.lanes[-1].x + self.lanes[-1].width if lanes else 0.0

    def _place_rows(self) -> None:
        depth: dict[Box, int] = {}
        for box in self.boxes:
            depth[box] = max((depth[line.source] + 1 for line in self._incoming[box]), default=0)
        last: dict[int, int] = {}
        for box in sorted(self.boxes, key=depth.__getitem__):
            box.row = max([last.get(box.lane, -1), *(line.source.row for line in self._incoming[box])]) + 1
            last[box.lane] = box.row
        following: dict[int, int] = {}  # row of the next box of a lane
        for box in sorted(self.boxes, key=lambda item: -item.row):
            if not self._incoming[box] and self._outgoing[box]:  # what needs nothing comes just before it is needed
                needed = [line.target.row for line in self._outgoing[box]]
                box.row = min([*needed, following.get(box.lane, needed[0])]) - 1
            following[box.lane] = box.row
            self._rows[box.lane, box.row] = box

    def _place_gutters(self) -> None:
        used: dict[tuple[int, int], list[list[range]]] = {}  # by lane and side: for each track, rows that are taken
        for line in sorted(self.lines, key=lambda item: item.target.row - item.source.row):
            lane, rows = line.source.lane, range(line.source.row, line.target.row)
            if any((lane, row) in self._rows for row in rows[1:]):
                line.gutter = _first_free(used.setdefault((lane, line.side), []), rows)
        for (lane, side), tracks in used.items():
            if side > 0:
                self.lanes[lane].num_right = len(tracks)
            else:
                self.lanes[lane].num_left = len(tracks)

    def _place_ends(self) -> None:
        """Spread the ends of lines over their boxes, in the order in which they come from the left."""
        for box in self.boxes:
            for number, line in enumerate(sorted(self._outgoing[box], key=lambda item: item.target.lane)):
                line.start = (number - (len(self._outgoing[box]) - 1) / 2) * PORT
            for number, line in enumerate(sorted(self._incoming[box], key=_arrival)):
                line.end = (number - (len(self._incoming[box]) - 1) / 2) * PORT
            num_ends = max(len(self._outgoing[box]), len(self._incoming[box]))
            box.width = max(box.width, num_ends * PORT + 8)
        for line in self.lines:
            if line.direction == 0 and line.gutter is None:  # a straight one, where one end can be moved
                if len(self._incoming[line.target]) == 1 and abs(line.start) < line.target.width / 2 - PORT / 2:
                    line.end = line.start
                elif len(self._outgoing[line.source]) == 1 and abs(line.end) < line.source.width / 2 - PORT / 2:
                    line.start = line.end

    def _place_lanes(self) -> None:
        for lane in self.lanes:
            lane.half = lane.min_width / 2
        for box in self.boxes:
            self.lanes[box.lane].half = max(self.lanes[box.lane].half, box.width / 2)
        for line in self.lines:
            if line.direction == 0:
                lane = self.lanes[line.source.lane]
                lane.half = max(lane.half, line.label_width / 2 + abs(line.end))
        right = -LANE_GAP
        for number, lane in enumerate(self.lanes):
            to_left = lane.half + ROOM + lane.num_left * GUTTER
            needed = [self._room_for(line) for line in self.lines if number and _crosses(line, number)]
            before = self.lanes[number - 1].middle if number else 0.0
            lane.middle = max([right + LANE_GAP + to_left, *(before + room for room in needed)])
            lane.x = lane.middle - to_left
            lane.width = to_left + lane.half + ROOM + lane.num_right * GUTTER
            right = lane.x + lane.width
        for box in self.boxes:
            box.x = self.lanes[box.lane].middle

    def _room_for(self, line: Line) -> float:
        """Return how far apart the middles of two lanes must be for the label between them."""
        ends = abs(line.start) + abs(line.end) + 2 * ROOM
        if line.gutter is not None and abs(line.target.lane - line.source.lane) == 1:
            ends += self.lanes[line.source.lane].half + (line.gutter + 1) * GUTTER
        return line.label_width + ends if line.label_width else 0.0

    def _place_heights(self) -> None:
        rows: dict[int, list[Box]] = {}
        for box in self.boxes:
            rows.setdefault(box.row, []).append(box)
        y, leaving = self._header, list[Line]()
        for row in sorted(rows):
            boxes = rows[row]
            y = self._place_gap(y, [line for box in boxes for line in self._incoming[box]], leaving)
            leaving = [line for box in boxes for line in self._outgoing[box] if line.gutter is not None]
            height = max(box.height for box in boxes)
            for box in boxes:
                box.y = y + (height - box.height) / 2
            y += height
        self.height = y + ROOM
        for line in self.lines:
            line.points.append((line.target.x + line.end, line.target.y))
            line.points = _without_repeats([(line.source.x + line.start, line.source.bottom), *line.points])

    def _place_gap(self, y: float, arriving: Sequence[Line], leaving: Sequence[Line]) -> float:
        """Place the lines that run across above a row; return where the row begins."""
        tracks: list[list[tuple[float, float]]] = []  # from the bottom to the top
        numbers = {line: _first_free_span(tracks, self._span(line)) for line in sorted(arriving, key=self._height)}
        jogs: list[list[tuple[float, float]]] = []  # above those
        for line in leaving:
            span = sorted((line.source.x + line.start, self._gutter_x(line)))
            numbers[line] = len(tracks) + _first_free_span(jogs, (span[0], span[1]))
        has_label = {numbers[line] for line in arriving if line.label_width}
        heights = [LABELLED_TRACK if number in has_label else TRACK for number in range(len(tracks) + len(jogs))]
        bottom = y + ROOM / 2 + sum(heights) + ROOM / 2
        levels = {}
        for line, number in numbers.items():
            levels[line] = bottom - ROOM / 2 - sum(heights[:number]) - heights[number] / 2
        for line in leaving:
            line.points += [(line.source.x + line.start, levels[line]), (self._gutter_x(line), levels[line])]
        for line in arriving:
            start, end = self._run_x(line), line.target.x + line.end
            line.points += [(start, levels[line]), (end, levels[line])]
            line.label = (self._label_x(line, start, end), levels[line])
        return bottom

    def _gutter_x(self, line: Line) -> float:
        assert line.gutter is not None
        lane = self.lanes[line.source.lane]
        return lane.middle + line.side * (lane.half + (line.gutter + 1) * GUTTER)

    def _run_x(self, line: Line) -> float:
        """Return where a line runs down."""
        return line.source.x + line.start if line.gutter is None else self._gutter_x(line)

    def _label_x(self, line: Line, start: float, end: float) -> float:
        if line.direction == 0:
            return end
        if abs(line.target.lane - line.source.lane) > 1:  # between the last two lanes
            start = self.lanes[line.target.lane - line.direction].middle
        return (start + end) / 2

    def _span(self, line: Line) -> tuple[float, float]:
        start, end = self._run_x(line), line.target.x + line.end
        label = self._label_x(line, start, end)
        half = line.label_width / 2
        return min(start, end, label - half), max(start, end, label + half)

    def _height(self, line: Line) -> tuple[int, float]:
        """Lines to one box must not cross: what comes from the left and ends to the left is lowest, and the reverse."""
        return line.target.lane, line.end * (line.direction or 1)


def _arrival(line: Line) -> tuple[int, int]:
    """Sort lines that end at one box from left to right; one from the same lane comes from its right gutter, or above."""
    side = -line.direction if line.direction else (0 if line.gutter is None else 1)
    # Of several from one side, the one from farthest comes in on top, and so nearest to the other side.
    return side, line.source.lane if side <= 0 else -line.source.lane


def _crosses(line: Line, number: int) -> bool:
    """Return whether a line's label is between this lane and the one before."""
    if line.direction == 0:
        return False
    return line.target.lane == (number if line.direction > 0 else number - 1)


def _first_free(tracks: list[list[range]], rows: range) -> int:
    for number, taken in enumerate(tracks):
        if all(rows.stop <= other.start or other.stop <= rows.start for other in taken):
            taken.append(rows)
            return number
    tracks.append([rows])
    return len(tracks) - 1


def _first_free_span(tracks: list[list[tuple[float, float]]], span: tuple[float, float]) -> int:
    low, high = span[0] - ROOM / 2, span[1] + ROOM / 2
    for number, taken in enumerate(tracks):
        if all(high <= other[0] or other[1] <= low for other in taken):
            taken.append((low, high))
            return number
    tracks.append([(low, high)])
    return len(tracks) - 1


def _without_repeats(points: Iterable[Point]) -> list[Point]:
    """Leave out points that are on the line between their neighbours."""
    found: list[Point] = []
    for point in points:
        if found and point == found[-1]:
            continue
        if len(found) > 1 and (found[-2][0] == found[-1][0] == point[0] or found[-2][1] == found[-1][1] == point[1]):
            found.pop()
        found.append(point)
    return found
