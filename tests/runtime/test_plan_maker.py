"""Plans that correct another one, made of its choices as far as they still hold."""

from types import SimpleNamespace
from typing import cast

import pytest

from teraplan.checker.check_plan import check_plan
from teraplan.config import Config
from teraplan.errors import InfeasibleBudgetError
from teraplan.planners import make_plan
from teraplan.runtime.device import Device
from teraplan.runtime.session.plan_maker import PlanMaker
from teraplan.runtime.session.report_files import ReportFiles
from tests.planning.test_recompute import GELU, half, machine, too_large, with_recipes


@pytest.mark.slow
def test_what_cannot_be_computed_again_any_more_is_chosen_anew() -> None:
    """What it needs at once does not fit under the lower budget; the plan without it does."""
    trace = too_large(with_recipes(), GELU)
    budgets, slow = half(trace), machine(2_000_000_000)
    with pytest.raises(InfeasibleBudgetError):
        make_plan(trace, slow, budgets, recompute=[GELU])
    plans = PlanMaker(
        Config(),
        cast("Device", SimpleNamespace(tier_of_state=lambda _: None)),
        ReportFiles(None, strict=False),
        chunk_bytes=lambda: 0,
    )
    plan = plans._make_plan(trace, slow, budgets, recompute=[GELU])
    assert not check_plan(plan)
    chosen = [choice.tensor_id for choice in plan.recomputed]
    assert chosen
    assert GELU not in chosen
    fewer = plans._make_plan(trace, slow, budgets, recompute=chosen[:1])
    assert [choice.tensor_id for choice in fewer.recomputed] == chosen[:1], "what holds is kept"
