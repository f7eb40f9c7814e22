"""Training state that moves through the CUDA back end, with the CPU as the device that computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from teraplan import backend
from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.cuda.storage_pointers import why_not
from teraplan.values.step_trace import TensorKind
from tests.end_to_end import moving, test_state_models
from tests.end_to_end.costs import by_cost
from tests.end_to_end.moving import adamw, model, sgd, training, weight
from tests.end_to_end.test_state_plan import planned_case
from tests.end_to_end.training import MLP, UNLIMITED, Program, Run, assert_same, run

pytestmark = [
    pytest.mark.usefixtures("cuda_path"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def check(
    program: Program, *, budget: int = moving.BUDGET, least: bool = False, **options: object
) -> Run:
    """The same bits with parameters, gradients and optimizer state in host memory for the most.

    `least`: the budget is the least that works, in which the first steps may not.
    """
    reference = run(program, device_budget=UNLIMITED, training_state="stays", **options)
    limited = moving.run_least(program, budget, **options)
    assert_same(reference, limited)
    arena = moving.moving().arena
    traffic = arena.log.traffic
    assert traffic.from_host_bytes > arena.total_bytes, "little had to come back"
    assert traffic.written_bytes == 0
    assert least or arena.overrun_bytes == 0
    assert limited.final.phase == "planned"
    return limited


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", by_cost(["aot_eager", "inductor"], quick=["aot_eager"], rare=["inductor"])
)
def test_it_moves_to_host_memory_under_a_plan(kernels: str) -> None:
    limited = check(training(adamw), kernels=kernels)
    assert limited.final.state_to_host_bytes > 0
    assert limited.final.state_from_host_bytes > 0
    assert not limited.final.fallbacks
    case, plan = planned_case()
    kinds = {tensor.name: tensor.kind for tensor in plan.trace.tensors}
    moved = {kinds[transfer.tensor] for record in case.runs for transfer in record.transfers}
    assert TensorKind.OPTIMIZER_STATE in moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "set_to_none"),
    [
        (sgd, True),
        (adamw, False),
        pytest.param(sgd, False, marks=pytest.mark.exhaustive),
        pytest.param(adamw, True, marks=pytest.mark.exhaustive),
    ],
)
def test_accumulation_and_clipping(make: moving.Optimizers, set_to_none: bool) -> None:
    check(training(make, accumulate=2, clip=0.01, set_to_none=set_to_none), budget=7 << 19)


@pytest.mark.slow
def test_gpt_with_tied_embeddings() -> None:
    check(test_state_models.training(*test_state_models.gpt_of(tie_embeddings=True)))


@pytest.mark.slow
def test_what_users_do_between_steps() -> None:
    """Weights that are read, written and saved while they are away, or on their way."""
    averages = moving.Averages()

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        averages.take_in(net, step)
        if step % 2:
            averages.put_into(net)
        with torch.no_grad():
            for p in net.parameters():
                p.data.mul_(0.9)
            net(*net.batch(100))
        optimizer.load_state_dict(optimizer.state_dict())
        twin = model()
        twin.load_state_dict(net.state_dict())
        assert all(map(torch.equal, twin.parameters(), net.parameters()))

    check(training(adamw, between=between, steps=8), budget=7 << 19)


class _Normed(MLP):
    """Changes its own weights in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for number in range(len(self.layers)):
                weight(self, number).mul_(0.99)
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_weights_that_the_forward_changes(kernels: str) -> None:
    """They leave before it and in it, so a copy from before must not be taken for theirs."""
    program = training(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        make_model=lambda: _Normed(moving.WIDTH, depth=12, rows=moving.ROWS),
    )
    check(program, budget=1 << 19, least=True, kernels=kernels)


def test_without_host_memory_it_stays_and_says_so(cuda_path: Callable[[int], None]) -> None:
    cuda_path(0)
    stays = run(training(adamw), device_budget=UNLIMITED, training_state="moves")
    (fallback,) = stays.final.fallbacks
    assert "no host memory that it could go to; raise host_budget" in fallback


@pytest.mark.slow
def test_beside_updates_on_the_host_it_stays_and_says_so() -> None:
    reference = run(training(adamw), device_budget=UNLIMITED)
    options = {"training_state": "moves", "host_updates": 0.5}
    stays = run(training(adamw), device_budget=UNLIMITED, **options)
    assert_same(reference, stays)
    assert any("stay on the device with host_updates" in text for text in stays.final.fallbacks)
    assert stays.final.host_updates > 0


def test_it_starts_to_move_only_where_that_is_asked_for() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(training(adamw), device_budget=moving.budget_beside_others(moving.BUDGET))
    assert 'training_state="moves" lets them leave' in caught.value.__notes__[0]


@pytest.mark.slow
def test_updates_in_the_backward_are_not_done() -> None:
    reference = run(training(adamw), device_budget=UNLIMITED, training_state="stays")
    limited = moving.run_least(training(adamw), moving.BUDGET, update="gradient")
    assert_same(reference, limited)
    assert any("parameters are updated in the step" in text for text in limited.final.fallbacks)


@pytest.mark.slow
def test_what_is_kept_after_the_session_has_its_bits() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        kept.append((weight(net, 0), weight(net, 0).detach().clone()))

    moving.run_moving(training(adamw, between=keep))
    for session in backend.sessions():
        session.close()
    tensor, values = kept[-1]
    assert torch.equal(tensor, values)


@pytest.mark.slow
def test_a_model_from_the_meta_device() -> None:
    check(moving.from_meta)
    arena = moving.moving().arena
    assert arena.memory.held.peak_bytes < arena.total_bytes
