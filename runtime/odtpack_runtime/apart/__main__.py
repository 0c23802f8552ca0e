"""``python -m odtpack_runtime.apart``: the process that answers questions."""

import sys

from odtpack_runtime.apart import child

if __name__ == "__main__":
    sys.exit(child.main())
