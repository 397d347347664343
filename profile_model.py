"""Profile a model: the same as ``autokernel profile``."""

import sys

from autokernel.cli import main

if __name__ == "__main__":
    main(["profile", *sys.argv[1:]])
