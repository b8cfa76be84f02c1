import sys

from elman_core._streams import ready_to_print

from .command import main

ready_to_print()
sys.exit(main(sys.argv[1:]))
