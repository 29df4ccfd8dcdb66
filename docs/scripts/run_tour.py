"""Run examples/tour.ipynb and store what its cells print.

    python docs/scripts/run_tour.py                  # in the notebook itself
    python docs/scripts/run_tour.py other.ipynb      # in another file

The tests compare what cells print with what is stored: only the words if the cell has the tag ``numbers-vary``, and only
that there is something if it has the tag ``varies``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
CELL_TIMEOUT_S = 120


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Nothing of the user's own IPython, and nothing left in the user's home.
        os.environ |= {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder, "JUPYTER_CONFIG_DIR": folder}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        import nbclient
        import nbformat

        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, target)


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [NOTEBOOK]))
