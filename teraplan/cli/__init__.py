"""The command line, `teraplan CMD`: one file per command, in `entry` the table of them.

A command adds its arguments to a parser and returns an exit code from parsed ones. Reading, writing
and printing happen here; what is printed comes from `teraplan.report`. Only `doctor` and `probe`
import torch, and only when they run.
"""

from teraplan.cli.entry import main

__all__ = ["main"]
