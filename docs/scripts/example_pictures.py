"""Draws a picture of each example in docs/images/examples, from the example's own functions and data.

    python docs/scripts/example_pictures.py

The pictures are cards with a background of their own, so that they can be read on light and dark pages.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

import gradwire as gw

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images" / "examples"
WIDTH, HEIGHT = 360, 220
INK, MUTED, LINE, PAPER = "#1f2937", "#64748b", "#cbd5e1", "#ffffff"
BLUE, ORANGE, GREEN, RED, VIOLET = "#2563eb", "#ea580c", "#15803d", "#dc2626", "#7c3aed"
COLOURS = (BLUE, ORANGE, GREEN, VIOLET)
TINTS = {BLUE: "#dbeafe", ORANGE: "#ffedd5", GREEN: "#dcfce7", RED: "#fee2e2", VIOLET: "#ede9fe", MUTED: "#f1f5f9"}
Point = tuple[float, float]


# Drawing.


def card(*parts: str) -> str:
    """Return a whole picture."""
    markers = "".join(
        f'<marker id="tip{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for colour in (*TINTS,)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="12">\n<defs>{markers}</defs>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="{PAPER}" stroke="{LINE}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(
    x: float, y: float, words: str, colour: str = INK, anchor: str = "middle", size: float = 12, **more: str
) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size:g}"'
    return f'<text x="{x:g}" y="{y:g}" {style}{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, label: str, below: str = "", colour: str = BLUE) -> str:
    """Return a process: its name, and what it holds."""
    middle = x + width / 2
    lines = below.split("\n") if below else []
    top = y + height / 2 + 4 - 7.5 * len(lines)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{TINTS[colour]}" stroke="{colour}"/>'
        + text(middle, top, label, font_weight="600")
        + "".join(text(middle, top + 15 * (i + 1), line, MUTED, size=11) for i, line in enumerate(lines))
    )


def arrow(
    start: Point, end: Point, label: str = "", colour: str = MUTED, shift: Point = (0, -5), dashed: bool = False
) -> str:
    (x1, y1), (x2, y2) = start, end
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    drawn = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.6"{dashes} '
        f'marker-end="url(#tip{colour[1:]})"/>'
    )
    if label:
        drawn += text((x1 + x2) / 2 + shift[0], (y1 + y2) / 2 + shift[1], label, colour, size=11)
    return drawn


def chart(
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    colours: Sequence[str] = COLOURS,
    dots: Sequence[str] = (),
    notes: Sequence[tuple[float, float, str, str]] = (),
) -> str:
    """Return curves with a legend. Those named in `dots` are drawn as dots, to show that they are on top of another."""
    left, right, top, bottom = 46, WIDTH - 16, 44, HEIGHT - 36
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    step = nice_step(max(ys))
    y_max, x_max = math.ceil(max(ys) / step) * step, max(xs)

    def place(x: float, y: float) -> Point:
        return left + x / x_max * (right - left), bottom - y / y_max * (bottom - top)

    parts = []
    for number in range(round(y_max / step) + 1):
        _, y = place(0, number * step)
        parts.append(f'<line x1="{left}" y1="{y:g}" x2="{right}" y2="{y:g}" stroke="{LINE}" stroke-width="0.7"/>')
        parts.append(text(left - 6, y + 4, f"{number * step:g}", MUTED, "end", 10.5))
    x_step = nice_step(x_max)
    for number in range(int(x_max / x_step) + 1):
        x, _ = place(number * x_step, 0)
        parts.append(text(x, bottom + 14, f"{number * x_step:g}", MUTED, size=10.5))
    parts.append(text((left + right) / 2, HEIGHT - 8, x_label, MUTED, size=11))
    parts.append(
        text(14, (top + bottom) / 2, y_label, MUTED, size=11, transform=f"rotate(-90 14 {(top + bottom) / 2:g})")
    )
    at = left
    for (label, points), colour in zip(series.items(), colours, strict=False):
        placed = [place(x, y) for x, y in points]
        if label in dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in placed]
            parts.append(f'<circle cx="{at + 7}" cy="21" r="2.6" fill="{colour}"/>')
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
            )
            parts.append(f'<line x1="{at}" y1="21" x2="{at + 14}" y2="21" stroke="{colour}" stroke-width="2.4"/>')
        parts.append(text(at + 19, 25, label, INK, "start", 11.5))
        at += 32 + round(6.4 * len(label))
    for x, y, words, colour in notes:
        px, py = place(x, y)
        parts.append(
            f'<line x1="{px:g}" y1="{top}" x2="{px:g}" y2="{bottom}" stroke="{colour}" stroke-dasharray="3 3"/>'
        )
        parts.append(text(px - 5, py, words, colour, "end", 11))
    return card(*parts)


def nice_step(largest: float) -> float:
    """Return a round number that gives three to six ticks."""
    power = 10.0 ** math.floor(math.log10(largest))
    return next(power * factor for factor in (0.1, 0.2, 0.25, 0.5, 1, 2) if largest / (power * factor) <= 5.5)


def steps(losses: Sequence[float]) -> list[Point]:
    return [(float(step), loss) for step, loss in enumerate(losses)]


def smooth(losses: Sequence[float], width: int = 5) -> list[Point]:
    """Return the mean of the last losses, for each step."""
    windows = [losses[max(0, end - width) : end] for end in range(1, len(losses) + 1)]
    return steps([sum(window) / len(window) for window in windows])


# First steps.


def remote_calls() -> str:
    kinds = (("call(f, x)", "its result", BLUE), ("submit(f, x)", "a future, then its result", ORANGE))
    parts = [box(16, 30, 84, 160, "driver", "your\nprogram", MUTED)]
    for number, (there, back, colour) in enumerate(kinds):
        y = 30 + 90 * number
        parts.append(box(252, y, 92, 70, f"worker{number}", "a process", colour))
        parts.append(arrow((104, y + 24), (248, y + 24), there, colour))
        parts.append(arrow((248, y + 50), (104, y + 50), back, colour, (0, 15), dashed=True))
    return card(*parts)


def end_to_end() -> str:
    return card(
        box(16, 40, 110, 130, "driver", "loss\nbackward\nstep", MUTED),
        box(234, 40, 110, 130, "worker0", "first\nsecond\nSGD", BLUE),
        arrow((230, 72), (130, 72), "to_here()", BLUE),
        arrow((130, 112), (230, 112), "gradients", ORANGE),
        arrow((130, 150), (230, 150), "step", GREEN),
    )


def torch_style(module: Any) -> str:
    parts = [box(130, 24, 100, 50, "worker0", "rank 0", BLUE)]
    num_others = module.WORLD_SIZE - 1
    for number in range(num_others):
        x = 40 + number * 180
        parts.append(box(x, 140, 100, 50, f"worker{number + 1}", f"rank {number + 1}", ORANGE))
        parts.append(arrow((165 + 30 * number, 78), (x + 50, 136), "rows" if number == 0 else "", BLUE, (-22, 0)))
        parts.append(
            arrow((x + 64, 136), (179 + 30 * number, 78), "sum" if number else "", ORANGE, (26, 0), dashed=True)
        )
    return card(*parts)


# Training.


def demo(module: Any) -> str:
    """Digits as the program draws them."""
    columns, rows, gap = 8, 4, 2
    images, _ = module.draw_digits(columns * rows, seed=2)
    sheet = torch.ones(rows * (module.SIDE + gap) - gap, columns * (module.SIDE + gap) - gap)
    for number, image in enumerate(images[:, 0]):
        y, x = (position * (module.SIDE + gap) for position in divmod(number, columns))
        sheet[y : y + module.SIDE, x : x + module.SIDE] = 0.1 + 0.8 * image.clamp(0, 1)
    height, width = (2.3 * size for size in sheet.shape)
    data = base64.b64encode(grey_png(sheet)).decode()
    return card(
        f'<image x="{(WIDTH - width) / 2:g}" y="{(HEIGHT - height) / 2:g}" width="{width:g}" height="{height:g}" '
        f'style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
    )


def grey_png(values: torch.Tensor) -> bytes:
    """Return an image of values between 0 and 1."""
    rows = (values * 255).byte().tolist()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def split_model(module: Any) -> str:
    with gw.Cluster.local(2):
        distributed = module.train(module.on_workers)
    local = module.train(module.in_one_process)
    return chart({"one process": steps(local), "two workers": steps(distributed)}, "step", "loss", dots=["two workers"])


def parameter_average(module: Any) -> str:
    with gw.Cluster.local(module.NUM_WORKERS) as cluster:
        losses = module.train_together(cluster)
    return chart({"loss on points from all slices": steps(losses)}, "round", "loss")


def parameter_server(module: Any) -> str:
    names = ["server", *(f"trainer{number}" for number in range(module.NUM_TRAINERS))]
    series = {}
    with gw.Cluster.local(len(names), names=names) as cluster:
        for mode in module.MODES:
            _, losses = module.train_together(cluster, mode, 60)
            series[mode] = smooth([sum(step) / len(step) for step in zip(*losses, strict=True)])
    return chart(series, "step of each trainer", "mean loss of 4 trainers")


def pipeline(module: Any) -> str:
    """When each stage worked on which micro-batch, with 1F1B."""
    taken: list[list[tuple[str, int, float, float]]] = []
    module.draw = taken.extend
    names = [f"stage{number}" for number in range(module.NUM_STAGES)]
    with gw.Cluster.local(module.NUM_STAGES, names=names):
        module.train(module.one_forward_one_backward, 8)
    begin = min(work[2] for log in taken for work in log)
    scale = (WIDTH - 76) / (max(work[3] for log in taken for work in log) - begin)
    parts = []
    for number, log in enumerate(taken):
        y = 56 + 44 * number
        parts.append(text(54, y + 20, names[number], INK, "end", 11.5))
        for kind, part, began, ended in log:
            colour = BLUE if kind == "forward" else ORANGE
            x, width = 60 + (began - begin) * scale, max((ended - began) * scale - 1, 1)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" fill="{TINTS[colour]}" stroke="{colour}"/>'
            )
            parts.append(text(x + width / 2, y + 19, str(part), colour, size=10))
    for x, label, colour in ((60, "forward", BLUE), (140, "backward", ORANGE)):
        parts.append(f'<rect x="{x}" y="20" width="14" height="12" rx="2" fill="{TINTS[colour]}" stroke="{colour}"/>')
        parts.append(text(x + 20, 30, label, INK, "start", 11.5))
    parts.append(text(WIDTH / 2, 206, "time; the number is that of the micro-batch", MUTED, size=11))
    return card(*parts)


def reinforcement_learning(module: Any) -> str:
    names = [f"actor{number}" for number in range(module.NUM_ACTORS)]
    with gw.Cluster.local(module.NUM_ACTORS, names=names):
        actors = [gw.rpc.remote(name, module.Actor, args=(seed,)) for seed, name in enumerate(names)]
        history = module.train(actors, module.make_policy(), 60)
    return chart(
        {"mean distance from the middle": smooth([-value / module.NUM_MOVES for value in history])},
        "update",
        "distance",
    )


# Sharding.


def sharded_mlp(module: Any) -> str:
    """The parts of each weight, and where they are."""
    workers = [f"worker{number}" for number in range(module.NUM_WORKERS)]
    with gw.Cluster.local(module.NUM_WORKERS):
        model = module.make_sharded_model(workers)
        weights = {
            name: [
                (shard.shard_offsets, shard.shard_sizes, str(shard.placement))
                for shard in value.metadata().shards_metadata
            ]
            for name, value in model.named_parameters()
            if isinstance(value, gw.shard.ShardedTensor) and value.dim() == 2
        }
        del model
    parts = []
    for number, (name, shards) in enumerate(weights.items()):
        height, width = (max(o[i] + s[i] for o, s, _ in shards) for i in range(2))
        tall = height > width
        drawn_height, drawn_width = (140.0, 60.0) if tall else (60.0, 190.0)
        x0 = 24.0 if number == 0 else 134.0
        y0 = 36.0
        for offsets, sizes, placement in shards:
            worker = next(index for index, name_ in enumerate(workers) if name_ in placement)
            x, y = x0 + offsets[1] / width * drawn_width, y0 + offsets[0] / height * drawn_height
            w, h = sizes[1] / width * drawn_width, sizes[0] / height * drawn_height
            colour = COLOURS[worker]
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{TINTS[colour]}" stroke="{colour}"/>'
            )
            parts.append(text(x + w / 2, y + h / 2 + 4, "x".join(map(str, sizes)), colour, size=10))
        parts.append(text(x0 + drawn_width / 2, y0 - 10, name, INK, size=11.5))
    for number, (worker, colour) in enumerate(zip(workers, COLOURS, strict=False)):
        y = 124 + 24 * number
        parts.append(f'<rect x="150" y="{y}" width="16" height="14" rx="3" fill="{TINTS[colour]}" stroke="{colour}"/>')
        parts.append(text(174, y + 11, worker, INK, "start", 11.5))
    parts.append(text(54, 200, "divided by rows", MUTED, size=11))
    parts.append(text(229, 112, "divided by columns", MUTED, size=11))
    return card(*parts)


def embedding_table(module: Any) -> str:
    names = [*module.HOLDERS, *module.TRAINERS]
    with gw.Cluster.local(len(names), names=names) as cluster:
        table, head = module.make_model()
        losses = module.train_together(cluster, table, head, 40)
        del table, head
    return chart({name: smooth(values) for name, values in losses.items()}, "step", "loss")


# Clusters.


def on_ray(module: Any) -> str:
    """The curve of the same program on this machine: the numbers do not depend on where the workers are."""
    with gw.Cluster.local(2) as cluster:
        distributed = module.train_on_workers(cluster)
    local = module.train_in_one_process()
    return chart({"one process": steps(local), "two workers": steps(distributed)}, "step", "loss", dots=["two workers"])


def under_torchrun() -> str:
    parts = [text(WIDTH / 2, 28, "torchrun --nproc-per-node=4", INK, font_family="monospace")]
    for rank in range(4):
        x = 16 + rank * 84
        colour = MUTED if rank == 0 else BLUE
        parts.append(arrow((WIDTH / 2, 36), (x + 38, 74), colour=MUTED))
        parts.append(box(x, 78, 76, 60, f"rank {rank}", "driver" if rank == 0 else f"layer {rank - 1}", colour))
        if rank:
            parts.append(
                f'<path d="M54 142 C 54 {164 + 12 * rank}, {x + 38} {164 + 12 * rank}, {x + 38} 144" fill="none" '
                f'stroke="{BLUE}" stroke-width="1.6" marker-end="url(#tip{BLUE[1:]})"/>'
            )
    parts.append(text(WIDTH / 2, 212, "rank 0 runs the program; the others hold the model", MUTED, size=11))
    return card(*parts)


# Security.


def exposed_only(module: Any) -> str:
    parts = [
        box(16, 85, 84, 50, "driver", "", MUTED),
        box(138, 24, 92, 58, "alice", "inputs\nlower half", BLUE),
        box(252, 24, 92, 58, "bob", "upper half", GREEN),
        arrow((100, 100), (150, 86), "", BLUE),
        text(104, 80, "predict", BLUE, size=11),
        arrow((232, 53), (250, 53), "", BLUE),
    ]
    for number, (description, _, _) in enumerate(module.FORBIDDEN):
        y = 122 + 28 * number
        parts.append(arrow((104, 122 + 6 * number), (128, y), "", RED))
        parts.append(text(136, y + 4, "✗ " + description, RED, "start", 11.5))
    return card(*parts)


def two_hosts_tls(module: Any) -> str:
    left, right = module.NAMES
    parts = [
        box(14, 40, 124, 74, left, f"ca.pem\n{left}.pem, {left}.key", BLUE),
        box(222, 40, 124, 74, right, f"ca.pem\n{right}.pem, {right}.key", GREEN),
        arrow((142, 66), (218, 66), "TLS 1.3", MUTED, (0, -6)),
        arrow((218, 88), (142, 88), "", MUTED),
        box(125, 148, 110, 46, "ca.key", "stays with you", ORANGE),
        arrow((140, 146), (92, 118), "signs", ORANGE, (-20, 8), dashed=True),
        arrow((220, 146), (268, 118), "signs", ORANGE, (20, 8), dashed=True),
    ]
    return card(*parts)


def split_learning(module: Any) -> str:
    first, second = module.NAMES
    return card(
        box(14, 40, 110, 130, first, "measurements\nlower layers\nits optimizer", BLUE),
        box(236, 40, 110, 130, second, "diagnoses\nupper layers\nits optimizer", GREEN),
        arrow((128, 76), (232, 76), f"{module.CUT} activations", BLUE),
        arrow((232, 116), (128, 116), "loss, gradients", GREEN),
        arrow((128, 152), (232, 152), "step", MUTED),
        text(WIDTH / 2, 200, "data, labels and weights stay where they are", MUTED, size=11),
    )


# Faults.


def checkpoint(module: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        first = module.train_until_killed(folder)
        second = module.resume(folder)
    series = {
        "two workers": [(float(step), loss) for step, loss in first.items()],
        "three workers": [(float(step), loss) for step, loss in second.items()],
    }
    killed = module.KILL_AFTER - 0.5
    return chart(
        series,
        "step",
        "loss",
        dots=["three workers"],
        notes=[(killed, max(first.values()) * 0.95, "worker1 killed", RED)],
    )


def survives_kills(module: Any) -> str:
    """How far the training is, by the number of steps tried: kills take it back to the last checkpoint."""
    tried: list[Point] = []

    class Recorded(module.Training):  # type: ignore[misc, name-defined]
        def run_step(self, step: int) -> float:
            tried.append((float(len(tried)), float(step)))
            loss: float = super().run_step(step)
            return loss

    original, module.Training = module.Training, Recorded
    try:
        module.train(40, 5, seed=0)
    finally:
        module.Training = original
    return chart(
        {"with 5 kills": tried, "undisturbed": [(0.0, 0.0), (39.0, 39.0)]}, "steps tried", "step", colours=(RED, MUTED)
    )


PICTURES: tuple[Callable[..., str], ...] = (
    remote_calls, end_to_end, torch_style, demo, split_model, parameter_average, parameter_server, pipeline,
    reinforcement_learning, sharded_mlp,
    embedding_table, on_ray, under_torchrun, exposed_only, two_hosts_tls, split_learning, checkpoint, survives_kills,
)  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:]
    for draw in PICTURES:
        if not wanted or draw.__name__ in wanted:
            module = [__import__(draw.__name__)] if draw.__code__.co_argcount else []
            (FOLDER / f"{draw.__name__}.svg").write_text(draw(*module))
            print(f"drawn: {draw.__name__}.svg")


if __name__ == "__main__":
    main()
