"""Random programs for people to read."""

from __future__ import annotations

from autograd.programs import NUM_INPUTS, Body, Call, Change, Hook, Program, Wait


def describe(program: Program) -> str:
    """The program for people: one line for each statement, callees indented."""
    head = f"# seed {program.seed}: run by {program.runner}, {program.plan}, size {program.size}, waits={program.waits}"
    return "\n".join(
        (head, *_lines(program.body, NUM_INPUTS, 0), f"roots: {program.roots}, targets: {program.targets}")
    )


def _lines(body: Body, num_args: int, depth: int) -> list[str]:
    lines, pad, num, started = [], "    " * depth, num_args, []
    for item in body.statements:
        match item:
            case Call(to, way, args, inner, via):
                via = f" via {via}" if via else ""
                lines += [f"{pad}{way} {to}{via} {args}:", *_lines(inner, len(args), depth + 1)]
                if way in ("async", "then"):
                    started.append(len(inner.results))
                    lines.append(f"{pad}  started {len(started) - 1}")
                elif way not in ("fail", "cancel"):
                    lines.append(f"{pad}  v{num}..v{num + len(inner.results) - 1}")
                    num += len(inner.results)
            case Wait(number):
                lines.append(f"{pad}v{num}..v{num + started[number] - 1} = wait {number}")
                num += started[number]
            case Change() | Hook():
                lines.append(f"{pad}{item}")
            case _:
                lines.append(f"{pad}v{num} = {item}")
                num += 1
    return [*lines, f"{pad}return {body.results}"]
