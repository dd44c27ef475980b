"""`python -m evenflow` is the command `evenflow`."""

import sys

from evenflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
