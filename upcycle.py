"""Turn a dense text encoder into a MoTE: `python upcycle.py --src SRC [--out DIR] [--push]`. Same as `mote upcycle`."""

import sys

from mote.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "upcycle")
    sys.exit(main())
