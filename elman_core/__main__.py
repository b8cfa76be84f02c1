"""The command `elman`, which is `python -m elman_core`, too."""

import os
import signal
import sys


def main() -> int:
    """Run one command, as `elman_core.cli.main`. Until its modules are imported, ^C ends it without a traceback."""
    if (before := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from elman_core import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
