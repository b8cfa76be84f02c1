"""`python -m elman_core` is the command `elman`."""

import sys

from elman_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
