"""`python -m transfer_queue.cli` is `tq`."""

import sys

from transfer_queue.cli import main

if __name__ == "__main__":
    sys.exit(main())
