"""Judge one kernel file: the same as ``autokernel bench``."""

import sys

from autokernel.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
