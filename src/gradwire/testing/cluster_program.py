"""The driver of checks of `gradwire.testing.check_cluster`.

python -m gradwire.testing.cluster_program <start> <check> ...
"""

from __future__ import annotations

import sys

from gradwire.testing.clusters import run_checks

if __name__ == "__main__":
    run_checks(*sys.argv[1:])
