"""Show below each example what it printed when `docs/scripts/run_examples.py` last ran it."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

OUTPUT = """

.. rubric:: Output

.. code-block:: console

   $ {command}

.. code-block:: output

{lines}
"""


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    folder, _, name = docname.rpartition("/")
    if folder == "examples/programs":
        page, downloads, rest = source[0].partition(".. _sphx_glr_download_")
        source[0] = f".. highlight:: none\n\n{page}{stored_output(app, name)}\n{downloads}{rest}"


def stored_output(app: Sphinx, name: str) -> str:
    stored = Path(app.srcdir) / "examples" / "output" / f"{name}.txt"
    app.env.note_dependency(str(stored))
    if not stored.exists():
        return ""
    command, *lines = stored.read_text(encoding="utf-8").splitlines()
    shown = "\n".join(f"   {line}".rstrip() for line in lines)
    return OUTPUT.format(command=command.removeprefix("$ "), lines=shown)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
