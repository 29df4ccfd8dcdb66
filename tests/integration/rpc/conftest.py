"""The fixtures of these tests."""

from rpc.fixtures import make_agents, make_puppets, meeting, nursery, pair, workers

__all__ = ["make_agents", "make_puppets", "meeting", "nursery", "pair", "workers"]
