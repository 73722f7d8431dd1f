"""`python -m mote`, which launchers of several processes need: `accelerate launch … -m mote train RECIPE`."""

import sys

from mote.cli import main

if __name__ == "__main__":
    sys.exit(main())
