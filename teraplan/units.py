"""Bytes and times as people write them, and back: "2GiB" to 2147483648 to "2.00 GiB".

Inside the program bytes and nanoseconds are ints; text appears only at the edges.
"""

import math
import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_BINARY = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_FACTORS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | _BINARY
_BY_LOWER_NAME = {name.lower(): factor for name, factor in _FACTORS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str) -> int:
    """Number of bytes that `text` names ("2GiB", "500 MB", "4096").

    Raises:
        ValueError: if `text` is no size, a size beyond all floats, or bytes of which the last is
            not whole.
    """
    match = _SIZE.fullmatch(text)
    factor = _BY_LOWER_NAME.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        units = ", ".join(_FACTORS)
        raise ValueError(f"{text!r} is not a size; write a number and one of {units}")
    number = float(match[1])
    if math.isinf(number * factor):
        raise ValueError("a size of hundreds of digits; write a smaller one")
    nbytes = round(number * factor)
    if factor == 1 and nbytes != number:
        raise ValueError(f"{text!r} is no whole number of bytes; write a unit, such as GiB")
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """`nbytes` in the largest binary unit that leaves at least 1, e.g. "1.50 GiB"."""
    for name, factor in reversed(_BINARY.items()):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {name}"
    return f"{nbytes} B"


def format_ns(duration_ns: int) -> str:
    """`duration_ns` in the largest unit of s, ms, us that leaves at least 1, e.g. "3.20 ms"."""
    for name, factor in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if abs(duration_ns) >= factor:
            return f"{duration_ns / factor:.2f} {name}"
    return f"{duration_ns} ns"


def format_bandwidth(bytes_per_s: int) -> str:
    """`bytes_per_s` in decimal GB/s or MB/s, the units in which disks are sold, or in less."""
    if bytes_per_s >= 10**9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    if bytes_per_s >= 10**5:
        return f"{bytes_per_s / 1e6:.1f} MB/s"
    return f"{bytes_per_s / 1e3:.1f} kB/s" if bytes_per_s >= 100 else f"{bytes_per_s} B/s"


def format_speed_beside(bytes_per_s: int, others: str) -> str:
    """The speed of one direction with the other busy; e.g. "waits for reads" if nothing moved.

    A speed is at least 1 byte per second: that is what was measured where nothing moved.
    """
    return format_bandwidth(bytes_per_s) if bytes_per_s > 1 else f"waits for {others}"
