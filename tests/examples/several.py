"""Runs programs one after the other in one interpreter, as a world of one worker; what each prints goes to files beside it.

To import torch once for all of them, and not twice for each, saves most of their time.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path


def run(program: Path) -> int:
    """Its exit code. It sees itself as the main module, started in its own folder."""
    os.chdir(program.parent)
    sys.argv[:] = [str(program)]
    sys.path[0] = str(program.parent)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    try:
        runpy.run_path(str(program), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(programs: list[str]) -> None:
    for program in map(Path, programs):
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            file = os.open(program.with_suffix(suffix), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        code = run(program)
        sys.stdout.flush()
        sys.stderr.flush()
        program.with_suffix(".code").write_text(str(code))


if __name__ == "__main__":
    main(sys.argv[1:])
