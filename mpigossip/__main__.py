"""Program of `python -m mpigossip`, which is the `mpigossip` command."""

import sys

from mpigossip.cli import main

if __name__ == "__main__":
    sys.exit(main())
