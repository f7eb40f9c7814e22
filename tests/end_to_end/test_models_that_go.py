"""What is released when models are gone, and what works all the same."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from teraplan import backend
from tests.end_to_end.moving import adamw, budget_beside_others
from tests.end_to_end.training import MLP, UNLIMITED, bits

STEPS = 5
OPTIONS = {"kernels": "aot_eager", "profile_steps": 1}


class Broken(MLP):
    """Dynamo keeps what it has compiled for the part behind the break."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        return x.square().mean()


def make(**options: object) -> MLP:
    torch.manual_seed(5)
    model = Broken(width=192, rows=128)
    model.compile(backend="teraplan", options={**OPTIONS, **options})
    return model


def trained(model: MLP) -> str:
    """Hash of losses and parameters."""
    optimizer = adamw(model.parameters())
    losses: list[Tensor] = []
    for step in range(STEPS):
        losses.append(model(*model.batch(step)))
        torch.autograd.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return bits([*losses, *model.parameters()])


def test_a_model_in_several_graphs_leaves_no_session_and_no_file(disk: Path) -> None:
    trained(make(device_budget=UNLIMITED, storage=disk))
    assert backend.sessions()
    gc.collect()
    assert not backend.sessions()
    assert not list(disk.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("moves", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_the_next_model_has_the_graphs_of_the_last_one(moves: bool) -> None:
    torch._dynamo.reset()
    reference = trained(make(device_budget=UNLIMITED))
    budget = budget_beside_others(4 << 20) if moves else UNLIMITED
    for _ in range(3):
        model = make(device_budget=budget, training_state="moves" if moves else "stays")
        assert trained(model) == reference
        (session,) = backend.sessions()
        assert session.keeper.moves == moves
        del model, session
        gc.collect()
        assert not backend.sessions()


@pytest.mark.slow
def test_a_session_lasts_as_long_as_one_of_two_models() -> None:
    first, second = (make(device_budget=UNLIMITED) for _ in range(2))
    trained(first)
    (session,) = backend.sessions()
    trained(second)
    del first
    gc.collect()
    assert backend.sessions() == [session]
    trained(second)
    assert backend.sessions() == [session]


@pytest.mark.slow
def test_a_session_outlives_parameters_that_are_replaced() -> None:
    model = make(device_budget=UNLIMITED)
    trained(model)
    (session,) = backend.sessions()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    gc.collect()
    trained(model)
    assert backend.sessions() == [session]
    del model, weights, session
    gc.collect()
    assert not backend.sessions()


@pytest.mark.slow
def test_a_backward_after_its_model_is_gone() -> None:
    def result(**options: object) -> str:
        model = make(**options)
        x = model.batch(0)[0].requires_grad_()
        loss = model(x)
        del model
        gc.collect()
        torch.autograd.backward(loss)
        return bits([loss, x.grad])

    reference = result(device_budget=UNLIMITED)
    budget = budget_beside_others(4 << 20)
    assert result(device_budget=budget, training_state="moves") == reference
