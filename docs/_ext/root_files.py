"""Links that leave `docs/` lead to the page of the site that shows the same: they work on the site and in a checkout.

A page may link to ``../../examples/demo.py``, which is shown in the gallery, and to ``../CONTRIBUTING.md``, which is a page.
Such pages consist of an ``include`` of the file; the links in that file are those of the root folder, and are changed, too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

PAGES = {
    "CHANGELOG.md": "docs/changelog.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "SECURITY.md": "docs/security.md",
    "README.md": "docs/index.md",
    "examples": "docs/examples/index.md",
    "examples/README.md": "docs/examples/index.md",
}
INCLUDE = re.compile(r"^```\{include\} (\.\./[A-Z]+\.md)\n```$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^()#\s:]+)(?=[)#])")


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    root = Path(app.srcdir).parent
    page = f"docs/{docname}.md"
    if not (root / page).is_file():
        return

    def include(match: re.Match[str]) -> str:
        path = os.path.normpath(root / "docs" / match[1])
        app.env.note_dependency(path)
        return on_page(Path(path).read_text(encoding="utf-8"), ".", page, root)

    text = on_page(source[0], os.path.dirname(page), page, root)
    source[0] = INCLUDE.sub(include, text)


def on_page(text: str, folder: str, page: str, root: Path) -> str:
    """Change the links in a text that was written in `folder` so that they hold on `page`; both are relative to the root."""

    def change(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, match[1]))
        if not (root / target).exists():
            return match[1]
        return os.path.relpath(page_of(target), os.path.dirname(page))

    return LINK.sub(change, text)


def page_of(path: str) -> str:
    """The page that shows a file or folder of the project; the path itself if there is none."""
    if re.fullmatch(r"examples/\w+\.py", path):
        return f"docs/examples/programs/{Path(path).stem}.rst"
    if path.startswith("docs/") and "." not in Path(path).name:
        return f"{path}/index.md"
    return PAGES.get(path, path)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
