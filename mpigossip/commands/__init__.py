"""Commands: ``add(commands)`` of each module adds its parsers with examples and functions.

Nothing large is imported before a command runs. Other subpackages do the work itself.
"""
