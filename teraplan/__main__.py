"""`python -m teraplan` is the command `teraplan`."""

import sys

from teraplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
