"""The commands, one module each: `add(commands)` puts its parser, its examples and what it runs.

Nothing heavy is imported before a command runs; the work itself is done in other rooms.
"""
