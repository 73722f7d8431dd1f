"""`python -m mote`, for launchers of several processes: `accelerate launch … -m mote train RECIPE`."""

import sys

from mote.cli import main

if __name__ == "__main__":
    sys.exit(main())
