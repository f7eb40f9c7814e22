"""Rows of text in aligned columns, and plain characters for terminals that have no others."""

from collections.abc import Sequence

TIMES = "\N{MULTIPLICATION SIGN}"

_ASCII = str.maketrans(
    {
        TIMES: "x",
        "·": "-",
        "→": "->",
        "…": "...",
        "─": "-",
        "│": "|",
        "┤": "|",
        "└": "+",
        "█": "#",
        "░": ".",
        "✓": "ok",
        "✗": "x",
        "≤": "<=",
    }
    | {chr(code): "#" for code in range(0x2584, 0x2588)}
    | {chr(code): " " for code in range(0x2581, 0x2584)}
)


def aligned(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """`rows` with their columns padded to equal width, two spaces between them.

    `align` has one of "<" and ">" for each column; columns beyond it go left.
    """
    num_columns = max((len(row) for row in rows), default=0)
    sides = align.ljust(num_columns, "<")
    padded = [[*row, *[""] * (num_columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in padded) for column in range(num_columns)]
    return [
        "  ".join(
            cell.rjust(width) if side == ">" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in padded
    ]


def to_ascii(text: str) -> str:
    """`text` with every character that our reports use beyond ASCII replaced by plain ones."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def shorten(text: str, width: int) -> str:
    """`text`, with its middle left out if it is wider than `width`."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
