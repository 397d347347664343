"""Cut the top regions out of a model: the same as ``autokernel extract``."""

import sys

from autokernel.cli import main

if __name__ == "__main__":
    main(["extract", *sys.argv[1:]])
