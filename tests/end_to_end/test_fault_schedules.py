"""Every operation of a training run fails once in every way; then many of them at random.

A run ends with equal bits or with an error of ours, with the parameters of the last whole step,
with no file, thread or byte of storage left, and the next run on the same graphs is right again.

    pytest -m slow -k "fault_schedules and some"          a sample, in CI
    pytest -m exhaustive -k "fault_schedules and every"   all of it
"""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from errno import EINTR, EIO, ENODEV

import pytest
import torch

from tests.end_to_end.conftest import forget_everything
from tests.end_to_end.faulty_training import FAULTS, FaultyTraining, Outcome, random_faults
from tests.fakes.faulty_calls import Fault

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive
SEEDS = (
    pytest.param(range(30), id="some"),
    *(
        pytest.param(range(first, first + 100), id=f"every from {first}", marks=EXHAUSTIVE)
        for first in range(0, 500, 100)
    ),
)
INTERRUPTS = (pytest.param(30, id="some"), pytest.param(100, id="every", marks=EXHAUSTIVE))
FOR_EVER = 10**9
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
    forget_everything()
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone() -> None:
    """In the place of this folder's fixture: the graphs of `workload` outlive a test."""


def _kinds() -> Iterator[object]:
    for call, all_of in FAULTS.items():
        for what in all_of:
            for times in (1, FOR_EVER):
                name = f"{call}-{Fault.name_of(what)}-{'once' if times == 1 else 'from there on'}"
                if what != EINTR or times == 1:  # the others take a deadline each
                    yield pytest.param(call, what, times, 13, id=f"some-{name}")
                yield pytest.param(call, what, times, 1, id=f"every-{name}", marks=EXHAUSTIVE)


@pytest.mark.parametrize(("call", "what", "times", "stride"), list(_kinds()))
def test_fail_the_kth_operation(
    workload: FaultyTraining, call: str, what: int | str, times: int, stride: int
) -> None:
    deadline_s = 1.0 if what == EINTR and times == FOR_EVER else 5.0
    outcomes: list[Outcome] = []
    for at in range(1, 1000, stride):
        outcome = workload.round(
            Fault(call=call, what=what, at=at, times=times), deadline_s=deadline_s
        )
        outcomes.append(outcome)
        if not outcome.num_injected:
            break
    assert not outcomes[-1].num_injected, "the number of calls should have been passed"
    assert len(outcomes) > 1, "nothing failed"
    if what in ABSORBED or (what == EIO and times == 1 and call != "grow"):
        assert all(outcome.error is None for outcome in outcomes)
    if what == ENODEV and call == "read":
        assert all(outcome.error is not None for outcome in outcomes[:-1])


@pytest.mark.parametrize("seeds", SEEDS)
def test_random_schedules(workload: FaultyTraining, seeds: range) -> None:
    ends: Counter[str] = Counter()
    for seed in seeds:
        faults = random_faults(seed)
        try:
            outcome = workload.round(*faults)
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(map(str, faults))}")
            raise
        ends[type(outcome.error).__name__] += 1
    assert ends["NoneType"] > 2
    assert sum(ends.values()) - ends["NoneType"] > 2


@pytest.mark.parametrize("number", INTERRUPTS)
def test_interrupts_at_any_time_leave_everything_usable(
    workload: FaultyTraining, number: int
) -> None:
    num_interrupted = 0
    for seed in range(number):
        num_interrupted += workload.interrupted_round(random.Random(seed).uniform(0.0005, 0.04))
        if seed % 10 == 9:
            assert workload.round().error is None
    assert num_interrupted > number // 15
