"""The test files that take longest.

`make test` begins with them: one process would be alone with such a file at the end otherwise. `make check` leaves them out.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
LONGEST = (  # files of 15 s and more on two processors, in this order
    "examples/test_examples.py",
    "contracts/test_clusters.py",
    "accelerator/test_backward.py",  # compiles the stand-in accelerator, which the other files there need
    "integration/rpc/test_rendezvous.py",
    "unit/compat/test_main.py",
    "integration/cluster/test_ray.py",  # not beside the start of Ray for the examples: a node has 30 s for it
    "integration/cluster/test_from_env.py",
    "properties/test_ownership_exhaustive.py",
    "integration/cluster/test_ray_programs.py",
    "integration/shard/test_ops_elementwise.py",
    "properties/test_ownership_mutations.py",
    "conformance/test_conformance.py",
    "faults/test_two_hosts.py",
    "integration/rref/test_lifetime.py",
    "integration/cluster/test_scripts.py",
    "integration/cluster/test_ray_node_loss.py",
    "integration/cluster/test_cluster.py",
    "integration/cluster/test_local_launcher.py",
    "integration/cluster/test_slurm.py",
    "integration/shard/test_linear.py",
    "integration/autograd/test_programs.py",
    "faults/test_three_hosts.py",
    "integration/cluster/test_supervision.py",
    "integration/shard/test_ops_reductions.py",
    "integration/cli/test_run.py",
)
COMPILED = "accelerator"  # the tests of this folder need a library that takes a compiler 15 s
_NUMBERS = {TESTS / name: number for number, name in enumerate(LONGEST)}


def number_of(path: Path) -> int:
    """Return where a file stands in the order; those that are not listed come after all that are."""
    return _NUMBERS.get(path, len(_NUMBERS))


def is_slow(path: Path) -> bool:
    """Return whether all tests of a file count as slow."""
    return path in _NUMBERS or path.parent == TESTS / COMPILED
