"""The gallery: cards for the index, and below each example what it printed when `docs/scripts/run_examples.py` last ran it.

A block ``{gallery}`` in `examples/index.md` has names of examples, one in a line. Title and text of a card are those of the
example's docstring; its picture is `images/examples/<name>.svg`. An example that is in no block is in no table of contents, which
fails the build.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sphinx.application import Sphinx

INDEX = "examples/index"
PROGRAMS = "examples/programs"
BLOCK = re.compile(r"^```\{gallery\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CARD = """\
:::{{grid-item-card}} {title}
:link: programs/{name}
:link-type: doc
{picture}
{text}
:::
"""
PICTURE = """\
:img-top: ../images/examples/{name}.svg
:img-alt: {title}
"""
OUTPUT = """

.. rubric:: Output

.. code-block:: console

   $ {command}

.. code-block:: output

{lines}
"""


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    folder, _, name = docname.rpartition("/")
    if docname == INDEX:
        pages = "\n".join(f"programs/{name}" for block in BLOCK.findall(source[0]) for name in block.split())
        source[0] = BLOCK.sub(lambda block: grid(app, block[1].split()), source[0])
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    elif folder == PROGRAMS:
        source[0] = f".. highlight:: none\n\n{source[0]}{stored_output(app, name)}"


def grid(app: Sphinx, names: list[str]) -> str:
    cards = "".join(card(app, name) for name in names)
    return f"::::{{grid}} 1 2 2 3\n:gutter: 3\n:class-container: gw-gallery\n\n{cards}::::"


def card(app: Sphinx, name: str) -> str:
    path = Path(app.srcdir).parent / "examples" / f"{name}.py"
    app.env.note_dependency(str(path))
    title, _, text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")
    paragraph = text.partition("\n\n")[2].partition("\n\n")[0]
    text = re.match(r".*?\.(?=\s|$)|.*", paragraph, re.DOTALL)[0]
    has_picture = (Path(app.srcdir) / "images" / "examples" / f"{name}.svg").exists()
    picture = PICTURE.format(name=name, title=title) if has_picture else ""
    return CARD.format(name=name, title=title, text=text, picture=picture)


def stored_output(app: Sphinx, name: str) -> str:
    stored = Path(app.srcdir) / "examples" / "output" / f"{name}.txt"
    if not stored.exists():
        return ""
    app.env.note_dependency(str(stored))
    command, *lines = stored.read_text(encoding="utf-8").splitlines()
    return OUTPUT.format(
        command=command.removeprefix("$ "), lines="\n".join(f"   {line}".rstrip() for line in lines)
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
