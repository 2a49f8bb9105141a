"""Commands: `add(commands)` of each module adds its parsers, their examples and functions.

Nothing heavy is imported before a command runs; the work itself is done in other subpackages.
"""
