"""Distributed graphs as text: what people read in pictures, DOT, Mermaid."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.autograd.distributed_graph import DistributedGraph, GraphMessage, GraphNode

_MOST_CHARS = 22  # of the operators in one node


def format_bytes(count: int) -> str:
    """Return a size for people: ``512 B``, ``1.5 KiB``, ``96 MiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def format_time(seconds: float) -> str:
    """Return a time for people: ``12 us``, ``3.4 ms``, ``1.2 s``."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            value = seconds * factor
            return f"{value:.0f} {unit}" if unit == "us" or value >= 10 else f"{value:.1f} {unit}"
    return f"{seconds:.1f} s"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 tensor``, ``2 tensors``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def describe(node: GraphNode) -> tuple[str, ...]:
    """Describe a node in one or two lines."""
    if node.kind in ("unknown", "received") or node.is_passed_on:
        return ("?" if node.kind == "unknown" else "received" if node.kind == "received" else "passed on",)
    shown: list[str] = []
    for name in node.operators:
        if shown and len(", ".join([*shown, name])) > _MOST_CHARS:
            break
        shown.append(name)
    lines = [", ".join(shown) + (" …" if len(shown) < len(node.operators) else "")]
    if node.num_leaves:
        lines.append(f"{count(node.num_leaves, 'leaf', 'leaves')}, {format_bytes(node.leaf_bytes)}")
    found = tuple(line for line in lines if line)
    return found or ("roots" if node.kind == "roots" else "sent",)


def label_of(message: GraphMessage) -> tuple[str, ...]:
    """Return the label of a message: its function, its size and how long it was on its way, as far as that is known."""
    name = re.split(r"[:.]", message.function)[-1] or message.function
    text = f"{name} result" if message.is_result else f"{name}()"
    sizes = [] if message.num_bytes is None else [format_bytes(message.num_bytes)]
    times = [] if message.time_s is None else [format_time(message.time_s)]
    return (text, ", ".join(sizes + times)) if sizes or times else (text,)


def to_dot(graph: DistributedGraph) -> str:
    lines = ["digraph context {", "  rankdir=TB;", "  node [shape=box, style=rounded];"]
    if graph.notes:
        lines.append(f"  label={_dot_string(graph.notes)};")
    for index, worker in enumerate(graph.workers):
        lines += [f"  subgraph cluster_{index} {{", f"    label={_dot_string([worker.name])};"]
        if not worker.answered:
            lines.append("    style=dashed;")
        for node in graph.nodes:
            if node.worker == worker.name:
                dashed = ', style="rounded,dashed"' if node.is_passed_on or node.kind == "unknown" else ""
                lines.append(f"    {node.id} [label={_dot_string(describe(node))}{dashed}];")
        lines.append("  }")
    for item in graph.messages:
        mark = ", color=red" if item.waits_for else "" if item.has_arrived else ", style=dashed"
        lines.append(f"  {item.source} -> {item.target} [label={_dot_string(label_of(item))}{mark}];")
    lines += [f"  {source} -> {target} [style=dotted];" for source, target in graph.links]
    return "\n".join([*lines, "}"])


def _dot_string(lines: object) -> str:
    assert isinstance(lines, list | tuple)
    return '"' + "\\n".join(_one_line(item).replace("\\", "\\\\").replace('"', '\\"') for item in lines) + '"'


def to_mermaid(graph: DistributedGraph) -> str:
    lines = ["flowchart TB", *(f"  %% {_one_line(note)}" for note in graph.notes)]
    for index, worker in enumerate(graph.workers):
        state = () if worker.answered else ("no answer",)
        lines.append(f"  subgraph w{index}[{_mermaid_string((worker.name, *state))}]")
        for node in graph.nodes:
            if node.worker == worker.name:
                lines.append(f"    {node.id}({_mermaid_string(describe(node))})")
        lines.append("  end")
    for item in graph.messages:
        arrow = "==>" if item.waits_for else "-->" if item.has_arrived else "-.->"
        lines.append(f"  {item.source} {arrow}|{_mermaid_string(label_of(item))}| {item.target}")
    lines += [f"  {source} -.-> {target}" for source, target in graph.links]
    return "\n".join(lines)


def _mermaid_string(lines: tuple[str, ...]) -> str:
    """Return lines as one string; Mermaid writes what is not plain text as ``#code;``."""
    return '"' + "<br/>".join(re.sub(r"[^\w .,:()…/-]", _entity, _one_line(line)) for line in lines) + '"'


def _entity(found: re.Match[str]) -> str:
    return f"#{ord(found[0])};"


def _one_line(text: str) -> str:
    return clean(text).replace("\n", " ").replace("\t", " ")
