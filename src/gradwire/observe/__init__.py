"""See what happens: events of calls, backward passes, optimizer steps, references, checkpoints and connections."""

from gradwire.observe.events import Event, subscribe

__all__ = ["Event", "subscribe"]
