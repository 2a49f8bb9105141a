"""The commands: a module's `add(commands)` puts its parsers, their examples and what they run.

Nothing heavy is imported before a command runs; the work itself is done in other rooms.
"""
