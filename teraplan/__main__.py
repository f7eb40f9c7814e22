"""`python -m teraplan` is the command `teraplan`."""

import sys

_INTERRUPTED = 130


def main() -> int:
    """The command; an interrupt while it is imported is one of it."""
    try:
        from teraplan.cli import main as run
    except KeyboardInterrupt:
        return _INTERRUPTED
    return run()


if __name__ == "__main__":
    sys.exit(main())
