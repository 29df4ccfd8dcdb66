"""The fixtures of these tests."""

from rpc.fixtures import free_port, make_agents, make_puppets, meeting, nursery, pair, tcp_meeting, workers

__all__ = ["free_port", "make_agents", "make_puppets", "meeting", "nursery", "pair", "tcp_meeting", "workers"]
