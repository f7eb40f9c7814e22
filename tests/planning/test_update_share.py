"""Which share of the updates is fastest on the host: the linear program against trying all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraplan.planners.updates.update_share import UpdateRates, share_on_host
from teraplan.values.hardware import Link

RATES = st.floats(1e8, 1e13)
GB = 10**9


def link(out: float, back: float) -> Link:
    """With these speeds while both directions are busy."""
    return Link(
        out_bytes_per_s=int(2 * out),
        back_bytes_per_s=int(2 * back),
        out_while_back_bytes_per_s=int(out),
        back_while_out_bytes_per_s=int(back),
        latency_ns=0,
    )


def adamw(device: float, host: float, out: float, back: float) -> float:
    """The share for 10^9 parameters in float32 with two states."""
    return share_on_host(
        work_bytes=28 * GB,
        gradient_bytes=4 * GB,
        parameter_bytes=4 * GB,
        rates=UpdateRates(device_bytes_per_s=device, host_bytes_per_s=host),
        link=link(out, back),
    )


def step_s(share: float, device: float, host: float, out: float, back: float) -> float:
    """The step's length, written down once more."""
    on_host = (28 * GB * share / host, 8 * GB * share / int(out), 4 * GB * share / int(back))
    return max(28 * GB * (1 - share) / device, *on_host)


@given(RATES, RATES, RATES, RATES)
def test_no_other_share_is_faster(device: float, host: float, out: float, back: float) -> None:
    found = adamw(device, host, out, back)
    assert 0 <= found <= 1
    best = min(step_s(n / 200, device, host, out, back) for n in range(201))
    assert step_s(found, device, host, out, back) <= best * (1 + 1e-9)


def test_equal_places_share_equally() -> None:
    assert adamw(100e9, 100e9, 1e12, 1e12) == pytest.approx(0.5)


def test_a_slow_link_leaves_little_to_the_host() -> None:
    # (1 - y) 28 / 100 = y 8 / 1
    assert adamw(100e9, 100e9, 1e9, 1e9) == pytest.approx(0.28 / 8.28)
    # H100: 2 TB/s of its memory, 100 GB/s of the host's cores, 25 GB/s of the link
    assert adamw(2e12, 100e9, 25e9, 25e9) == pytest.approx(0.014 / 0.334)
