"""What users do with a model and an optimizer whose state moves: each has a test that names it."""

import copy
import io
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.errors import FallbackRefusedError
from tests.end_to_end.moving import (
    BUDGET,
    DEPTH,
    ROWS,
    STEPS,
    WIDTH,
    adamw,
    check,
    little_for_state,
    model,
    run_moving,
    states,
    training,
)
from tests.end_to_end.training import MLP, Run

Between = Callable[[MLP, torch.optim.Optimizer, int], None]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def weight(net: MLP, layer: int) -> Tensor:
    found = net.layers[layer].weight
    assert isinstance(found, Tensor)
    return found


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters()]
    return [g for g in found if g is not None]


def looping(
    step_of: Callable[[MLP, torch.optim.Optimizer, int], Tensor],
    make_model: Callable[[], MLP] = model,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Callable[[Run], None]:
    """A loop whose steps are the user's own, and end with `zero_grad`."""

    def program(this: Run) -> None:
        net = make_model()
        this.compile(net)
        optimizer = make_optimizer(net.parameters())
        for step in range(STEPS):
            loss = step_of(net, optimizer, step)
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    return program


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clip_grad_value() -> None:
    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_value_(net.parameters(), 1e-6)
        optimizer.step()
        return loss

    check(looping(step))


def test_clipping_in_a_closure() -> None:
    """The gradients change between the last graph and the first bucket, while they leave."""

    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        def closure() -> float:
            losses = [net(*net.batch(2 * step + micro)) for micro in range(2)]
            for loss in losses:
                torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            return float(sum(loss.item() for loss in losses))

        return torch.tensor(optimizer.step(closure))

    check(looping(step, make_optimizer=sgd), budget=9 << 18)


@pytest.mark.slow
def test_gradients_that_a_hook_of_the_user_changes() -> None:
    """Each after it was added to, while the backward goes on and it is about to leave."""

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            for p in net.parameters():
                p.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
                p.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]

    check(training(sgd, between=between, accumulate=3), budget=9 << 18)


@pytest.mark.slow
def test_an_optimizer_for_each_parameter_that_steps_in_the_backward() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizers = {p: adamw([p]) for p in net.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            this.record(loss, net, others=[t for o in optimizers.values() for t in states(o)])

    check(program)


@pytest.mark.slow
def test_gradients_taken_and_given_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.autograd.grad` returns them; the user sums them up and puts them in."""

    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        parameters = list(net.parameters())
        loss: Tensor = net(*net.batch(step))
        first = torch.autograd.grad(loss, parameters)
        second = torch.autograd.grad(net(*net.batch(100 + step)), parameters)
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = a + b
        optimizer.step()
        return loss.detach()

    little_for_state(monkeypatch, 0.1)
    check(looping(step), budget=16 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    """With scaling up and down, and steps that are left out since a gradient is infinite."""
    scales: list[float] = []

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(scaler.scale(loss))
            if step == 3:
                gradients(net)[4][0] = torch.inf
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    check(program)
    assert scales[:STEPS] == scales[STEPS:]
    assert max(scales) > 2**10, "it has grown"
    assert any(b < a for a, b in itertools.pairwise(scales)), "it has shrunk"


@pytest.mark.slow
def test_autocast() -> None:
    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    check(looping(step))


# -- what models are made of -----------------------------------------------------------------------


class Twice(MLP):
    """Goes through its layers twice: each parameter is used twice in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_shared_modules() -> None:
    check(training(adamw, make_model=lambda: Twice(width=WIDTH, depth=DEPTH, rows=ROWS)))


class WithBuffers(MLP):
    """A running mean as large as a weight, and one that is read only."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)
        self.register_buffer("mean", torch.zeros(ROWS, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach(), 0.1)
        loss: Tensor = super().forward((x - self.mean) @ self.scale)
        return loss


@pytest.mark.slow
def test_buffers() -> None:
    check(training(adamw, make_model=WithBuffers), budget=BUDGET + (1 << 19))


def tied_by_memory() -> MLP:
    net = model()
    weight(net, -1).data = weight(net, 0).data
    return net


def test_parameters_that_share_their_memory_stay_and_are_reported() -> None:
    """Two Parameter objects over one memory: both are updated, each by its own gradient."""
    check(training(adamw, make_model=tied_by_memory))
    fallbacks = teraplan.status().fallbacks
    assert any("a parameter (192x192, 144.00 KiB) stays in memory" in text for text in fallbacks)
    with pytest.raises(FallbackRefusedError, match=r"a parameter \(192x192.* stays in memory"):
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
    parameters = [b for b in state.arena.blocks.values() if b.label.startswith("parameter")]
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

    check(looping(step, make_optimizer=make_optimizer), budget=7 << 18)


# -- code between steps ----------------------------------------------------------------------------


@pytest.mark.slow
def test_averaged_models() -> None:
    """`torch.optim.swa_utils` makes a copy of the model and averages into it."""
    averages: list[Tensor] = []

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        average = torch.optim.swa_utils.AveragedModel(
            net,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5),  # type: ignore[no-untyped-call]
        )
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            average.update_parameters(net)
            with torch.no_grad():
                averages.append(average(*net.batch(50)))
            this.record(loss, net, others=[*states(optimizer), *average.parameters()])
            optimizer.zero_grad()

    check(program, budget=5 << 20)
    assert len(set(map(float, averages))) == STEPS


class Decoder(MLP):
    """Predicts its own next input from a few rows; generating is calling it again and again."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if targets is None else (x - targets).square().mean()


@pytest.mark.slow
def test_evaluation_and_generation_between_steps() -> None:
    generated: list[Tensor] = []

    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        (x,) = net.batch(step)
        loss: Tensor = net(x, x.roll(1))
        torch.autograd.backward(loss)
        optimizer.step()
        net.eval()
        with torch.no_grad():
            net(x, x.roll(2))
        with torch.inference_mode():
            token = x[:2]
            for _ in range(3):
                token = net(token)
        generated.append(token.clone())
        net.train()
        return loss

    check(looping(step, make_model=lambda: Decoder(width=WIDTH, depth=DEPTH, rows=ROWS)))
    for with_it, without_it in zip(generated[STEPS:], generated[:STEPS], strict=True):
        assert torch.equal(with_it, without_it)


@pytest.mark.slow
def test_printing_everything() -> None:
    texts: list[str] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        names = [f"{name} {p}" for name, p in net.named_parameters()]
        texts.append("\n".join([repr(net), *names, repr(dict(optimizer.state)), str(optimizer)]))

    check(training(adamw, between=between))
    assert texts[:STEPS] == texts[STEPS:]
    assert "Parameter containing" in texts[0]


@pytest.mark.slow
def test_copies_of_model_and_optimizer_go_their_own_way() -> None:
    """A deep copy of both trains by itself, and the original knows nothing of it."""
    losses: list[list[float]] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step != 1:
            return
        losses.append([])
        twin, its = copy.deepcopy((net, optimizer))
        assert [id(p) for p in twin.parameters()] == [id(p) for p in its.param_groups[0]["params"]]
        for mine, other in zip(states(optimizer), states(its), strict=True):
            assert torch.equal(mine, other)
        for _ in range(2):
            loss = twin(*twin.batch(step))
            torch.autograd.backward(loss)
            its.step()
            its.zero_grad()
            losses[-1].append(loss.item())

    check(training(adamw, between=between), least=True)
    assert len(losses[0]) == 2
    assert losses[0] == losses[-1]


@pytest.mark.slow
def test_a_whole_model_saved() -> None:
    saved: list[bytes] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step != 2:
            return
        buffer = io.BytesIO()
        torch.save((net, optimizer), buffer)
        saved.append(buffer.getvalue())
        buffer.seek(0)
        twin, its = torch.load(buffer, weights_only=False)
        for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)
        for one, two in zip(states(optimizer), states(its), strict=True):
            assert torch.equal(one, two)

    check(training(adamw, between=between))
    assert saved[0] == saved[1], "the same bytes as without moving"


@pytest.mark.slow
def test_memory_that_others_take_over() -> None:
    """`share_memory()` gives parameters memory that other processes have, too: they stay there."""

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            net.layers[0].share_memory()
        if step > 1:
            assert weight(net, 0).is_shared()  # type: ignore[no-untyped-call]

    check(training(adamw, between=between))


@pytest.mark.slow
def test_resizing_the_memory_of_what_moves_is_an_error_of_torch() -> None:
    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        with pytest.raises(RuntimeError, match="not resizable"):
            weight(net, 0).untyped_storage().resize_(0)

    run_moving(training(adamw, between=between))


@pytest.mark.slow
def test_generation_before_the_first_step() -> None:
    """Parameters that are taken in under inference mode are trained all the same."""

    def program(this: Run) -> None:
        net = Decoder(width=WIDTH, depth=DEPTH, rows=ROWS)
        this.compile(net)
        (x,) = net.batch(0)
        with torch.inference_mode():
            net(x)
        for p in net.parameters():  # is taken in when a graph that has seen it is followed by one
            p.data = p.data.clone()
        with torch.inference_mode():
            net(x)
            net(x)
        assert not any(p.is_inference() for p in net.parameters())
        optimizer = adamw(net.parameters())
        for step in range(STEPS):
            loss = net(x, x.roll(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    check(program)
