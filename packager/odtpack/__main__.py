"""``python -m odtpack``."""

import sys

from odtpack.cli import main

if __name__ == "__main__":
    sys.exit(main())
