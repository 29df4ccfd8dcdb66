"""``python -m gradwire``: the same as the `gradwire` command."""

from __future__ import annotations

from gradwire.cli import main

if __name__ == "__main__":
    main()
