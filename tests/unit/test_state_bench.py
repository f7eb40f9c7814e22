"""The break-even formula of the bench of moving training state."""

import pytest

from bench.state_rates import tokens_for_rate
from teraplan.values.hardware import Link

LINK = Link(
    out_bytes_per_s=2000,
    back_bytes_per_s=1000,
    out_while_back_bytes_per_s=1,
    back_while_out_bytes_per_s=1,
    latency_ns=0,
)


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_so_many_tokens_have_the_rate_with_nothing_overlapped(rate: float) -> None:
    """4,000 bytes take 2 s out, 3,000 take 3 s back; a token takes 10 ms."""
    compute_s = 0.01
    tokens = tokens_for_rate(
        rate, written_bytes=4000, read_bytes=3000, link=LINK, compute_ns_per_token=compute_s * 1e9
    )
    assert tokens * compute_s / (tokens * compute_s + 5) == pytest.approx(rate)
