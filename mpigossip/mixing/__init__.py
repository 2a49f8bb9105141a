"""Mixing: what happens between nodes."""
