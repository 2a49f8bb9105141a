"""Interfaces of the engine to a user's own program."""
