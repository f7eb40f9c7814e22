"""The demonstration's verdict: what it must refuse, and what it measures with."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.demo.corpus import standard_library_text, text_batch
from bench.demo.memory import PeakMeter
from bench.demo.outcome import Outcome, hash_of, loss_bits
from bench.demo.size import CPU, TINY
from bench.demo.verdict import problems, table
from teraplan.units import MIB

REPO = Path(__file__).resolve().parents[2]

UNLIMITED = Outcome(
    losses=(loss_bits(2.5), loss_bits(1.25)),
    parameters="aa",
    optimizer_state="bb",
    num_parameters=10,
    measured_peak_bytes=1100 * MIB,
    step_ns=(3, 4, 5),
    unlimited_peak_bytes=1000 * MIB,
    actual_peak_bytes=990 * MIB,
)
LIMITED = dataclasses.replace(
    UNLIMITED,
    budget_bytes=600 * MIB,
    actual_peak_bytes=599 * MIB,
    predicted_peak_bytes=598 * MIB,
    measured_peak_bytes=700 * MIB,
    bytes_out=400 * MIB,
)


def test_equal_runs_within_budget_have_no_problem() -> None:
    assert problems(UNLIMITED, LIMITED) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"losses": (loss_bits(2.5), loss_bits(1.2500001))}, "the loss of step 2 has bits"),
        ({"parameters": "ab"}, "the parameters .* differ"),
        ({"optimizer_state": "b"}, "the optimizer's state .* differs"),
        ({"actual_peak_bytes": 647 * MIB}, "is over the budget of 600.00 MiB"),
        ({"measured_peak_bytes": 747 * MIB}, "operating system counts 647.00 MiB"),
        ({"bytes_out": 0}, "nothing was moved"),
    ],
)
def test_each_broken_promise_is_one_problem(change: dict[str, object], problem: str) -> None:
    found = problems(UNLIMITED, dataclasses.replace(LIMITED, **change))  # type: ignore[arg-type]
    assert len(found) == 1
    with pytest.raises(ValueError, match=problem):
        raise ValueError(found[0])


def test_losses_are_compared_by_their_bits() -> None:
    assert loss_bits(0.0) != loss_bits(-0.0)
    assert UNLIMITED.loss_values() == [2.5, 1.25]


def test_hash_sees_one_changed_bit() -> None:
    left, right = torch.ones(2, 3), torch.ones(2, 3)
    assert hash_of([left]) == hash_of([right])
    right.view(torch.int32)[1, 2] ^= 1
    assert hash_of([left]) != hash_of([right])
    assert hash_of([torch.ones(2, 3, requires_grad=True), torch.tensor(1.0)])


def test_outcome_survives_its_file(tmp_path: Path) -> None:
    LIMITED.write(tmp_path / "o.json")
    assert Outcome.read(tmp_path / "o.json") == LIMITED


def test_table_has_budget_prediction_and_measurement() -> None:
    text = table(UNLIMITED, LIMITED)
    for number in (
        "600.00 MiB",
        "598.00 MiB",
        "599.00 MiB",
        "1.07 GiB",
        "700.00 MiB",
        "400.00 MiB",
    ):
        assert number in text


def test_text_is_real_and_batches_follow_it() -> None:
    text = standard_library_text()
    assert b"import " in bytes(text[:100_000].tolist())
    tokens, targets = text_batch(text, TINY.model, 3, step=4)
    assert tokens.shape == targets.shape == (3, TINY.model.context)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, text_batch(text, TINY.model, 3, step=5)[0])


def test_the_model_has_25_million_parameters_and_saves_500_mib() -> None:
    model, tokens = CPU.model, CPU.batch_size * CPU.model.context
    assert 25e6 < 12 * model.num_layers * model.width**2 < 50e6
    saved_floats = (1 + 3 + 1 + 1 + 1 + 4 + 4) * model.width * model.num_layers * tokens
    assert saved_floats * 4 > 500 * MIB


def test_meter_sees_memory_that_has_been_freed_again() -> None:
    meter = PeakMeter(torch.device("cpu"))
    meter.reset()
    meter.update()
    before = meter.peak_bytes
    data = torch.ones(64 * MIB, dtype=torch.uint8)
    assert data.sum() == 64 * MIB
    del data
    meter.update()
    assert meter.peak_bytes - before > 60 * MIB
    meter.reset()
    meter.update()
    assert meter.peak_bytes < before + 32 * MIB


@pytest.mark.slow
def test_the_demonstration_keeps_its_promises_and_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.demo", "--tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal in every bit" in done.stdout
    for name in ("step.png", "timeline.json.gz", "budget/plan.json", "budget/trace.json"):
        assert (tmp_path / name).stat().st_size > 0
