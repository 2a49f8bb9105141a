"""`python -m mpigossip`: the same as the `mpigossip` command."""

import sys

from mpigossip.cli import main

if __name__ == "__main__":
    sys.exit(main())
