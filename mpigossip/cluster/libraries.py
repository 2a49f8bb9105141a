"""The shared libraries that this process has loaded."""

from __future__ import annotations

from pathlib import Path


def loaded() -> list[str]:
    """Their paths, in alphabetical order (Linux; elsewhere none)."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})
