"""Rounds of measurements in, rows of the table out.

Times are medians of the rounds. Ratios are taken within each round, between neighbours in time, then their median.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from autograd_cases import AutogradCase, Side
from cases import Case


def call_row(case: Case, rounds: dict[str, list[float]]) -> dict[str, Any]:
    """A row of `gradwire.rpc`."""
    seconds = {name: median(times) for name, times in rounds.items() if times}
    show = (lambda s: f"{1 / s:,.0f}/s") if case.operation == "async" else duration
    row: dict[str, Any] = {"case": case.name, "bar": f">= {case.bar}x", "seconds": seconds, "rounds": rounds}
    row |= {role: show(seconds[name]) for role, name in case.roles.items() if name in seconds}
    if case.gradwire not in seconds:
        return row
    if case.torch in seconds:
        row["torch_ratio"] = ratio_of(rounds[case.torch], rounds[case.gradwire])
        row["ratio"], row["met"] = f"{row['torch_ratio']:.1f}x", row["torch_ratio"] >= case.bar
    if case.beside in ("Floor", "BulkFloor") and case.beside in seconds:
        row["floor_ratio"] = ratio_of(rounds[case.gradwire], rounds[case.beside])
        row["beside"] = f"floor {row['beside']}, gradwire {row['floor_ratio']:.1f}x"
        if case.floor_bar:
            row["beside"] += f" (bar <= {case.floor_bar}x)"
            row["met"] = row.get("met", True) and row["floor_ratio"] <= case.floor_bar
    elif case.beside in seconds:
        row["tls_ratio"] = ratio_of(rounds[case.beside], rounds[case.gradwire])
        row["beside"] = f"with TLS {row['beside']}, {row['tls_ratio']:.2f}x"
    return row


def autograd_row(case: AutogradCase, rounds: dict[Side, list[float]]) -> dict[str, Any]:
    """A row of `gradwire.autograd`.."""
    seconds = {side: median(times) for side, times in rounds.items() if times}
    row: dict[str, Any] = {"case": case.name, "bar": f">= {case.bar}x" if case.bar else "-"}
    row["seconds"] = {f"{side.peer}: {side.work}": value for side, value in seconds.items()}
    row["rounds"] = {f"{side.peer}: {side.work}": times for side, times in rounds.items()}
    for role in ("torch", "gradwire", "beside"):
        if (side := getattr(case, role)) in seconds:
            row[role] = duration(seconds[side])
    if case.gradwire in seconds:
        _add_ratios(row, case, {side: rounds[side] for side in seconds})
    return row


def _add_ratios(row: dict[str, Any], case: AutogradCase, rounds: dict[Side, list[float]]) -> None:
    met = []
    if case.beside in rounds:
        row["beside_ratio"] = ratio_of(rounds[case.gradwire], rounds[case.beside])
        row["beside"] = f"{case.beside_name} {row['beside']}, gradwire {row['beside_ratio']:.2f}x"
        if case.beside_bar:
            row["beside"] += f" (bar <= {case.beside_bar}x)"
            met.append(row["beside_ratio"] <= case.beside_bar)
    if case.torch in rounds:
        row["torch_ratio"] = ratio_of(rounds[case.torch], rounds[case.gradwire])
        row["ratio"] = f"{row['torch_ratio']:.1f}x"
        met.append(row["torch_ratio"] >= case.bar)
    if met:
        row["met"] = all(met)


def ratio_of(these: list[float], those: list[float]) -> float:
    return median(a / b for a, b in zip(these, those, strict=False))


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"
