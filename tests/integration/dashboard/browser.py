"""Finds a Chromium for tests of the page; see `.ci/install_browser.sh`."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    f"no browser was found ({', '.join(NAMES)}): run `make browser`, or set GRADWIRE_BROWSER to the path of a Chromium"
)


def find_browser() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return os.environ.get("GRADWIRE_BROWSER") or next((path for name in NAMES if (path := shutil.which(name))), None)
