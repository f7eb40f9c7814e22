"""Training state that goes to host memory, to storage, or in part to both."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from teraplan.checker.check_plan import require_valid
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.planners.base import PAGE_BYTES
from teraplan.runtime.storage.tiers import Away, Tiers
from teraplan.simulation.simulate import predict
from teraplan.values.hardware import Tier
from teraplan.values.plan import Plan
from teraplan.values.step_trace import TensorKind
from tests.end_to_end.moving import adamw, budget_beside_others, moving, run_moving, training
from tests.end_to_end.test_state_plan import planned_case
from tests.end_to_end.training import Program, Run, assert_same, run
from tests.runtime.state_arena import pages_of

MIB = 1 << 20
STATE_BYTES = 6 * 3 * 192 * 192 * 4
"""Of the program's parameters and optimizer state."""


def program(**options: object) -> Program:
    return training(adamw, steps=10, **options)  # type: ignore[arg-type]  # a dict of mixed types


def plain(program: Program) -> Run:
    return run(program, device_budget=100 << 30, training_state="stays")


def test_it_goes_to_host_memory_where_there_is_some() -> None:
    reference = plain(program())
    limited = run_moving(program(), host_budget=64 * MIB)
    assert_same(reference, limited)
    _, plan = planned_case()
    kinds = {plan.trace.tensors[m.tensor_id].kind for m in plan.migrations if m.tier is Tier.HOST}
    assert TensorKind.OPTIMIZER_STATE in kinds
    last = limited.statuses[-1]
    assert last.state_to_host_bytes > 0 < last.state_from_host_bytes
    assert "to / from host per step" in str(last)


@pytest.mark.slow
@pytest.mark.parametrize(
    "host_budget", [STATE_BYTES // 3, pytest.param(160 * 1024, marks=pytest.mark.exhaustive), 4096]
)
def test_what_host_memory_has_no_room_for_goes_to_storage(host_budget: int) -> None:
    reference = plain(program())
    limited = run_moving(program(), host_budget=host_budget)
    assert_same(reference, limited)
    host = pages_of(moving().arena).tiers.host
    assert host is not None
    assert host.bytes_in_use + host.free_bytes <= host_budget
    (memory,) = host.traffic.stores
    assert os.fstat(memory.arena.fd).st_blocks * 512 <= host_budget
    traffic = moving().arena.log.traffic
    assert traffic.written_bytes > 0
    assert (traffic.to_host_bytes > 0) == (host_budget > 150_000)


@pytest.mark.slow
def test_a_host_budget_in_per_cent_holds_before_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it comes to the plan tells: until then nothing goes there."""
    most: list[int] = []
    put = Tiers.put

    def watched(self: Tiers, *args: Any, **kwargs: Any) -> Away:  # noqa: ANN401
        away = put(self, *args, **kwargs)
        assert self.host is not None
        most.append(self.host.bytes_in_use)
        return away

    monkeypatch.setattr(Tiers, "put", watched)
    reference = plain(program())
    assert_same(reference, run_moving(program(), host_budget="40%"))
    _, plan = planned_case()
    assert 0 < max(most) <= plan.budgets.host_bytes
    first = next(number for number, nbytes in enumerate(most) if nbytes)
    assert first > STATE_BYTES // (192 * 192 * 4), "in the first steps as much as there is has left"


@pytest.mark.slow
@pytest.mark.parametrize("host_part", [pytest.param(0.5, marks=pytest.mark.exhaustive), 1.0])
def test_a_plan_with_host_memory_is_replayed(tmp_path: Path, host_part: float) -> None:
    reference = plain(program())
    options: dict[str, object] = {"training_state": "moves", "host_budget": 64 * MIB}
    options["device_budget"] = budget_beside_others(4 * MIB)
    run(program(), **options, report=str(tmp_path))
    plan = in_host_memory(read_plan(tmp_path / "plan.json"), host_part)
    write_plan(plan, tmp_path / "again.json")
    replayed = run(program(), **options, plan=str(tmp_path / "again.json"))
    assert_same(reference, replayed)
    assert replayed.statuses[-1].diverged_steps == 0
    last, said = replayed.statuses[-1], plan.prediction
    if host_part == 1:
        assert last.state_written_bytes == 0
    else:
        assert 0 < last.state_written_bytes <= said.out_bytes[Tier.STORAGE]
        assert last.state_to_host_bytes > 0


def in_host_memory(plan: Plan, part: float) -> Plan:
    """The plan, with such a part of whatever moves in host memory and the rest in storage."""
    tensors = plan.step.tensors
    sizes = [
        int(tensors[m.tensor_id].nbytes * part) // PAGE_BYTES * PAGE_BYTES for m in plan.migrations
    ]
    migrations = tuple(
        replace(m, tier=Tier.HOST, host_bytes=0)
        if part == 1
        else replace(m, tier=Tier.STORAGE, host_bytes=nbytes)
        for m, nbytes in zip(plan.migrations, sizes, strict=True)
    )
    said = predict(plan.trace, plan.hardware, migrations, recomputed=plan.recomputed)
    plan = replace(plan, migrations=migrations, prediction=said)
    require_valid(plan)
    return plan


@pytest.mark.slow
def test_user_code_reads_and_writes_what_lies_there() -> None:
    def between(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.999)
                parameter[0] += float(parameter.sum())
            for state in optimizer.state.values():
                state["exp_avg"] *= 0.5

    changing = program(between=between)
    assert_same(plain(changing), run_moving(changing, host_budget=64 * MIB))


@pytest.mark.slow
def test_host_memory_is_given_back_with_the_model() -> None:
    before = _memory_files()
    run_moving(program(), host_budget=64 * MIB)
    assert _memory_files() > before
    torch._dynamo.reset()
    gc.collect()
    assert _memory_files() <= before, "other tests may have left some, too"


def _memory_files() -> int:
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())
    return sum("teraplan-host" in link for link in links)


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
