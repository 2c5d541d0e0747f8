"""`python -m tests.simulation.streams`: see the package."""

import sys

from tests.simulation.streams.stream_runs import main, quieten

if __name__ == "__main__":
    quieten()
    sys.exit(main())
