"""Connections between workers, chosen by the scheme of an address."""
