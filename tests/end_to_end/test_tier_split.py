"""Training with tensors split between host pool and storage: equal bits, and bytes as planned."""

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from teraplan.checker.check_plan import require_valid
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.planners.base import PAGE_BYTES
from teraplan.runtime.session import feedback
from teraplan.simulation.simulate import predict
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from teraplan.values.plan import Plan
from tests.end_to_end.training import MLP, Run, assert_same, run, tight, training, unlimited
from tests.fakes.faulty_calls import Fault, injected
from tests.fakes.slow_link import link_of, plan_with_storage

_MODEL = MLP(rows=65_536)
PROGRAM = training(lambda: MLP(rows=65_536), _MODEL.batch, steps=12)
"""What it saves has 16 MiB each."""
POOL = 10 * MIB
"""Of host memory: less than any of that."""


SLOW = 200_000_000
"""Bytes per second: each step waits for storage."""


@pytest.fixture(scope="module")
def reference() -> Run:
    return unlimited(PROGRAM)


def moved_per_step(plan: Plan) -> dict[str, int]:
    """Bytes out by tier that follow from the migrations."""
    total: Counter[str] = Counter()
    for m in plan.migrations:
        for tier, nbytes in m.parts(plan.step.tensors[m.tensor_id].nbytes):
            total[tier.value] += 0 if m.clean else nbytes
    return dict(total)


@pytest.mark.slow
def test_a_pool_that_holds_a_part_of_a_tensor_is_used(
    reference: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_with_storage(monkeypatch, link_of(SLOW))
    monkeypatch.setattr(feedback, "_COMPARED_AFTER", ())
    options = {"host_budget": POOL, "recompute": "never", "report": str(tmp_path)}
    limited = tight(PROGRAM, reference, 0.2, **options)
    assert_same(reference, limited)
    plan = read_plan(tmp_path / "plan.json")
    require_valid(plan)
    assert any(m.host_bytes for m in plan.migrations)
    assert 0 < plan.prediction.host_peak_bytes <= POOL
    assert limited.final.bytes_out["host"] > 0
    assert limited.final.bytes_out["storage"] > 0


@pytest.fixture(scope="module")
def halved(reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in which whatever moves is half in host memory, half in storage."""
    folder = tmp_path_factory.mktemp("plan")
    tight(PROGRAM, reference, 0.4, host_budget="1GiB", report=str(folder))
    plan = read_plan(folder / "plan.json")
    moves = tuple(
        replace(
            m,
            tier=Tier.STORAGE,
            host_bytes=plan.step.tensors[m.tensor_id].nbytes // 2 // PAGE_BYTES * PAGE_BYTES,
        )
        for m in plan.migrations
    )
    assert moves
    said = predict(plan.trace, plan.hardware, moves, recomputed=plan.recomputed)
    plan = replace(plan, migrations=moves, prediction=said)
    require_valid(plan)
    write_plan(plan, folder / "halved.json")
    return folder / "halved.json"


@pytest.mark.slow
def test_a_replayed_plan_with_splits_gives_the_same_bits(reference: Run, halved: Path) -> None:
    limited = run(PROGRAM, plan=str(halved), host_budget="1GiB")
    assert_same(reference, limited)
    assert dict(limited.final.bytes_out) == moved_per_step(read_plan(halved))
    assert limited.final.bytes_out["host"] > 16 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("at", [8, pytest.param(14, marks=pytest.mark.exhaustive)])
def test_a_split_tensor_survives_a_disk_that_fails(reference: Run, halved: Path, at: int) -> None:
    with injected(Fault(call="write", what=errno.EIO, at=at, times=1 << 30)) as calls:
        limited = run(PROGRAM, plan=str(halved), host_budget="1GiB")
    assert calls.num_injected > 0
    assert_same(reference, limited)
