"""The programs run while other tests of the file are looked at, so leaks are looked for at its end."""

from __future__ import annotations

from per_file import leak_check, template_ends_with_the_session

__all__ = ["leak_check", "template_ends_with_the_session"]
