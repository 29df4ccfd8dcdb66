"""References to values on other workers, and the protocol that keeps those values alive."""
