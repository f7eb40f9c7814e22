"""How amounts are written for people."""

import pytest

from teraplan.units import format_bandwidth


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (2_500_000_000, "2.50 GB/s"),
        (480_000_000, "480.0 MB/s"),
        (100_000, "0.1 MB/s"),
        (4_200, "4.2 kB/s"),
        (100, "0.1 kB/s"),
        (7, "7 B/s"),
    ],
)
def test_no_speed_is_written_as_none(bytes_per_s: int, text: str) -> None:
    assert format_bandwidth(bytes_per_s) == text
