"""`python -m tests.mutants`: break the package in many places, one at a time, and say which test fails; see `program`."""

import sys

from .program import main

if __name__ == "__main__":
    sys.exit(main())
