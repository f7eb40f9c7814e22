"""Bytes written are shown, and plans keep to the number of them that a user allows."""

import pytest

from teraplan.errors import InfeasibleBudgetError
from tests.end_to_end.moving import adamw, moving, run_moving
from tests.end_to_end.moving import training as moving_training
from tests.end_to_end.training import MLP, Run, assert_same, run, tight, training, unlimited

PROGRAM = training(lambda: MLP(rows=8192), MLP(rows=8192).batch, steps=10)


@pytest.mark.slow
def test_the_status_shows_what_was_written_and_the_share_of_the_endurance() -> None:
    best = unlimited(PROGRAM)
    limited = tight(PROGRAM, best, 0.5, endurance="1GB")
    (store,) = limited.statuses[-1].stores
    assert store.written_bytes > 0
    assert store.written_per_day_bytes > store.written_bytes
    assert limited.statuses[-1].endurance_used == store.written_bytes / 1e9
    assert "per day" in str(limited.statuses[-1])
    assert "endurance used by this run" in str(limited.statuses[-1])


@pytest.mark.slow
def test_what_moving_training_state_writes_counts_too() -> None:
    last = run_moving(moving_training(adamw), endurance="1GB").statuses[-1]
    written, (store,) = moving().arena.log.traffic.written_bytes, last.stores
    assert written > 0
    # Of what was queued last, some may not have been written yet.
    assert store.written_bytes + moving().arena.total_bytes > written
    assert last.endurance_used == store.written_bytes / 1e9


@pytest.mark.slow
def test_a_plan_writes_no_more_per_day_than_it_may() -> None:
    best = unlimited(PROGRAM)
    free = tight(PROGRAM, best, 0.5, host_budget="1GiB")
    allowed = run(
        PROGRAM,
        device_budget=free.options["device_budget"],
        host_budget="1GiB",
        daily_writes=1,  # nothing may go to storage, so it goes to host memory
    )
    assert_same(best, allowed)
    assert _planned_writes(allowed) == 0


@pytest.mark.slow
def test_too_few_writes_for_any_plan_is_an_error_that_says_so() -> None:
    limited = tight(PROGRAM, unlimited(PROGRAM), 0.5)
    budget = limited.options["device_budget"]
    assert isinstance(budget, int)
    with pytest.raises(InfeasibleBudgetError, match=r"daily_writes allows .* in each step; raise"):
        run(PROGRAM, device_budget=budget * 17 // 16, daily_writes=1, training_state="stays")


def _planned_writes(limited: Run) -> int:
    planned = [s for s in limited.statuses if s.managed_peak_bytes >= 0]
    return max(status.bytes_out.get("storage", 0) for status in planned)


def test_a_percentage_is_no_number_of_writes() -> None:
    from teraplan.config import Config
    from teraplan.errors import ConfigError

    with pytest.raises(ConfigError, match=r"expected a size such as .500GB., not a percentage"):
        Config.resolve({"daily_writes": "50%"}, {})
