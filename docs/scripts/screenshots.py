"""Take pictures of the built site in Chromium: light and dark, wide and narrow. Report pages that are wider than the window.

    make docs
    pip install playwright
    python docs/scripts/screenshots.py /tmp/pictures                       # pages that show every kind of content
    python docs/scripts/screenshots.py /tmp/pictures --all --check-only    # no pictures, all pages: only look for wide ones

It uses the browser that is installed: ``--browser`` names it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

SITE = Path(__file__).resolve().parents[1] / "_build" / "html"
PAGES = (
    "index.html",
    "quickstart.html",
    "tutorial/1-calls.html",
    "guides/index.html",
    "guides/parameter-server.html",
    "concepts/backward.html",
    "concepts/trust.html",
    "errors.html",
    "performance.html",
    "examples/index.html",
    "examples/programs/demo.html",
    "reference/index.html",
    "reference/rpc.html",
    "reference/cluster.html",
    "reference/errors.html",
    "internals/architecture.html",
)
WIDTHS = (1440, 390)
SCHEMES = ("light", "dark")


def main() -> None:
    options = parse()
    pages = [path.relative_to(SITE).as_posix() for path in sorted(SITE.rglob("*.html"))] if options.all else PAGES
    pages = [page for page in (options.pages or pages) if not page.startswith("_modules")]
    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES[:1] if options.check_only else SCHEMES:
                page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
                for name in pages:
                    if not (SITE / name).exists():
                        print(f"{name}: not built")
                        continue
                    page.goto((SITE / name).as_uri())
                    wide = page.evaluate("document.documentElement.scrollWidth")
                    if wide > width:
                        print(f"{name}: {wide} px wide in a window of {width}")
                    if not options.check_only:
                        picture = f"{name.removesuffix('.html').replace('/', '-')}-{scheme}-{width}.png"
                        page.screenshot(path=options.folder / picture, full_page=options.full)
                page.close()
        browser.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("pages", nargs="*", help="as in docs/_build/html; a selection without them")
    parser.add_argument("--all", action="store_true", help="every page")
    parser.add_argument("--full", action="store_true", help="whole pages, not one screen")
    parser.add_argument("--check-only", action="store_true", help="no pictures")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
