"""Parameters that share, get and lose their memory while the training state moves."""

from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import teraplan
from teraplan.errors import FallbackRefusedError
from tests.end_to_end.moving import (
    DEPTH,
    ROWS,
    STEPS,
    WIDTH,
    adamw,
    check,
    looping,
    model,
    run_moving,
    states,
    training,
    weight,
)
from tests.end_to_end.training import MLP, Run


def tied_by_memory() -> MLP:
    net = model()
    weight(net, -1).data = weight(net, 0).data
    return net


@pytest.mark.slow
def test_parameters_that_share_their_memory_stay_and_are_reported() -> None:
    """Two Parameter objects over one memory: both are updated, each by its own gradient."""
    check(training(adamw, make_model=tied_by_memory))
    fallbacks = teraplan.status().fallbacks
    assert any("192x192, 144.00 KiB) stays in memory" in text for text in fallbacks)
    with pytest.raises(FallbackRefusedError, match=r"\(layers\.\d\.weight, 192x192, .* stays in"):
        run_moving(training(adamw, make_model=tied_by_memory), strict=True)


@pytest.mark.slow
def test_a_view_from_before_the_first_step_stays_one() -> None:
    kept: list[Tensor] = []

    def make_model() -> MLP:
        net = model()
        kept[:] = [net.state_dict()["layers.2.weight"]]
        return net

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        assert torch.equal(kept[0], weight(net, 2))

    check(training(adamw, make_model=make_model, between=between))


@pytest.mark.slow
def test_a_parameter_that_has_others_within_it_stays() -> None:
    """As those of FSDP: there is no memory to ask for."""

    def program(this: Run) -> None:
        net, make_pair = model(), cast("Any", TwoTensor)
        pair = make_pair(torch.ones(WIDTH), torch.ones(WIDTH))
        net.register_parameter("pair", nn.Parameter(pair))
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for step in range(STEPS):
            mean: Any = net.get_parameter("pair").square().mean()
            loss = net(*net.batch(step)) + mean.a
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net.layers, others=[pair.a, pair.b])
            optimizer.zero_grad()

    check(program, budget=9 << 18, kernels="aot_eager")


# -- parameters that come, go and change -----------------------------------------------------------


class Growing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_parameters_added_and_removed_between_steps() -> None:
    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            torch.manual_seed(9)
            layer = nn.Linear(WIDTH, WIDTH)
            net.layers.append(layer)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        if step == 3:
            for p in net.layers[0].parameters():
                optimizer.state.pop(p)
                optimizer.param_groups[0]["params"] = [
                    q for q in optimizer.param_groups[0]["params"] if q is not p
                ]
            del net.layers[0]

    make = lambda: Growing(width=WIDTH, depth=DEPTH, rows=ROWS)  # noqa: E731
    check(training(adamw, make_model=make, between=between), least=True)


@pytest.mark.slow
def test_parameters_frozen_and_thawed_between_steps() -> None:
    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        net.layers[step % 3].requires_grad_(step % 2 == 1)
        net.layers[4].requires_grad_(step > 2)

    check(training(adamw, between=between))


@pytest.mark.slow
def test_state_that_is_made_later_than_that_of_the_bucket_lasts() -> None:
    """Weights of several slices, one without state beside others that have some."""
    kept: list[MLP] = []
    made: list[float] = []

    def make_model() -> MLP:
        kept[:] = [MLP(width=384, depth=4, rows=64)]
        kept[0].layers[1].requires_grad_(False)
        return kept[0]

    def make_optimizer(_: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw(kept[0].parameters())

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        net.layers[1].requires_grad_(step > 0)
        made.append(len(states(optimizer)) / len(list(net.parameters())))

    check(training(make_optimizer, make_model=make_model, between=between), budget=12 << 20)
    assert made[-1] == 3  # exp_avg, exp_avg_sq and step of each


@pytest.mark.slow
def test_other_memory_for_parameters() -> None:
    """Weights swapped by `.data`, as averaging does, and from a flat vector: they move again."""

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            for p in net.parameters():
                p.data = p.data * 0.5
        if step == 1:
            vector = nn.utils.parameters_to_vector(net.parameters())
            nn.utils.vector_to_parameters(vector * 2, net.parameters())
        if step == 2:
            for p in net.parameters():
                p.data = p.data.clone()

    state = check(training(adamw, between=between))
    parameters = [b for b in state.arena.blocks if b.label.startswith("parameter")]
    assert len(parameters) == DEPTH


@pytest.mark.slow
def test_new_parameters_in_the_old_ones_places() -> None:
    """`load_state_dict(assign=True)` and an optimizer for what is there then."""

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        for _ in range(2):
            optimizer = adamw(net.parameters())
            for step in range(STEPS // 2):
                loss = net(*net.batch(step))
                torch.autograd.backward(loss)
                optimizer.step()
                this.record(loss, net, others=states(optimizer))
                optimizer.zero_grad()
            weights = {name: value.clone() for name, value in net.state_dict().items()}
            net.load_state_dict(weights, assign=True)

    check(program)


@pytest.mark.slow
def test_another_type_between_steps() -> None:
    """`model.double()` gives every parameter other memory."""

    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step == 3:
            net.double()
        batch = net.batch(step)[0].to(next(net.parameters()).dtype)
        loss: Tensor = net(batch)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    check(looping(step, make_optimizer=make_optimizer), budget=9 << 18)
