"""Commands of the command line: their parsers, examples and functions.

The function ``add(commands)`` of each module except `arguments` adds its commands to the parser.
Large packages, such as torch, are imported only when a command runs. The work itself is in other
subpackages.
"""
