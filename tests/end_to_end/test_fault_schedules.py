"""Every operation of a training run fails once in every way; then many of them at random.

A run ends with equal bits or with an error of ours, with the parameters of the last whole step,
with no file, thread or byte of storage left, and the next run on the same graphs is right again.
"""

import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from errno import EIO, ENODEV

import pytest
import torch

from tests.end_to_end.faulty_training import FAULTS, FaultyTraining, Outcome, random_faults
from tests.fakes.faulty_calls import Fault

EXHAUSTIVE = bool(os.environ.get("TERAPLAN_TEST_EXHAUSTIVE"))
"""All operations and schedules, some ten minutes; without it, a sample of them."""
SCHEDULES = 1000 if EXHAUSTIVE else 60
pytestmark = pytest.mark.exhaustive
ABSORBED = ("short", "slow")
"""What must never end a run."""


@pytest.fixture(scope="module", params=["one store", "two stores"])
def workload(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyTraining]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("spill")
    names = ("a", "b") if request.param == "two stores" else ("a",)
    directories = [directory / name for name in names]
    for one in directories:
        one.mkdir()
    training = FaultyTraining(directories)
    gc.collect()
    gc.freeze()  # every error is followed by a collection, which need not look at all of torch
    yield training
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone() -> None:
    """In the place of this folder's fixture: the graphs of `workload` outlive a test."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "what"), [(call, what) for call, all_of in FAULTS.items() for what in all_of]
)
@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "from there on"])
def test_fail_the_kth_operation(
    workload: FaultyTraining, call: str, what: int | str, times: int
) -> None:
    outcomes: list[Outcome] = []
    for at in range(1, 1000, 1 if EXHAUSTIVE else 9):
        outcome = workload.round(Fault(call=call, what=what, at=at, times=times))
        outcomes.append(outcome)
        if not outcome.num_injected:
            break
    assert not outcomes[-1].num_injected, "the number of calls should have been passed"
    assert len(outcomes) > 1, "nothing failed"
    if what in ABSORBED or (what == EIO and times == 1 and call != "grow"):
        assert all(outcome.error is None for outcome in outcomes)
    if what == ENODEV and call == "read":
        assert all(outcome.error is not None for outcome in outcomes[:-1])


@pytest.mark.slow
def test_random_schedules(workload: FaultyTraining) -> None:
    ends: Counter[str] = Counter()
    for seed in range(SCHEDULES // 2):
        faults = random_faults(seed)
        try:
            outcome = workload.round(*faults)
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(map(str, faults))}")
            raise
        ends[type(outcome.error).__name__] += 1
    assert ends["NoneType"] > 2
    assert sum(ends.values()) - ends["NoneType"] > 2


@pytest.mark.slow
def test_interrupts_at_any_time_leave_everything_usable(workload: FaultyTraining) -> None:
    num_interrupted = 0
    for seed in range(100 if EXHAUSTIVE else 30):
        num_interrupted += workload.interrupted_round(random.Random(seed).uniform(0.0005, 0.04))
        if seed % 10 == 9:
            assert workload.round().error is None
    assert num_interrupted > (10 if EXHAUSTIVE else 2)
