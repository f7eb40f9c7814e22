"""teraplan: a memory compiler for PyTorch training. Importing it imports no torch."""

__version__ = "0.1.0"
