"""What a status says as text."""

import pytest

from teraplan.units import MIB
from teraplan.values.status import Status


@pytest.mark.parametrize(
    ("predicted", "said"),
    [
        (60, "64.00 MiB"),
        (-1, "64.00 MiB"),
        (
            80,
            "64.00 MiB of tensors; the budget has room for 16.00 MiB of free memory besides",
        ),
    ],
)
def test_memory_that_waits_is_no_part_of_what_tensors_take(predicted: int, said: str) -> None:
    nbytes = predicted * MIB if predicted > 0 else predicted
    shown = str(Status(phase="planned", unlimited_peak_bytes=64 * MIB, predicted_peak_bytes=nbytes))
    assert f"  peak unlimited             {said}\n" in shown


def test_what_is_not_known_says_so() -> None:
    assert "  peak unlimited             not known yet\n" in str(Status(phase="first step"))
