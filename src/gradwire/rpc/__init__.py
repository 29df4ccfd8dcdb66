"""Calls to other workers."""
