"""What users do between steps with a model and an optimizer whose state moves."""

import copy
import io

import pytest
import torch
from torch import Tensor

from tests.end_to_end.moving import (
    DEPTH,
    ROWS,
    STEPS,
    WIDTH,
    adamw,
    check,
    little_for_state,
    looping,
    model,
    run_moving,
    states,
    training,
    weight,
)
from tests.end_to_end.training import MLP, Run, sessions

# -- code between steps ----------------------------------------------------------------------------


@pytest.mark.slow
def test_averaged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.optim.swa_utils` makes a copy of the model and averages into it."""
    little_for_state(monkeypatch, 0.3)
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


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_memory_taken_between_steps_is_not_theirs(step: int) -> None:
    """A checkpoint or an evaluation after the measured step, or after one under a plan."""

    def between(net: MLP, _: torch.optim.Optimizer, now: int) -> None:
        if now == step:
            assert torch.ones(200 << 20, dtype=torch.uint8).sum() > len(net.layers)

    this = run_moving(training(adamw, between=between))
    assert 0 < max(s.actual_peak_bytes for s in this.statuses) < 100 << 20


@pytest.mark.slow
def test_what_code_between_steps_leaves_in_the_heap_is_given_back() -> None:
    """Copies of all weights that go into a hash or a log, say."""

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        if step >= 2:
            copies = [b"x" * (6 << 20) for _ in range(20)]
            assert len(copies) > len(net.layers)

    this = run_moving(training(adamw, between=between, steps=10))
    assert 0 < max(s.actual_peak_bytes for s in this.statuses) < 100 << 20


@pytest.mark.slow
def test_a_step_that_begins_with_a_new_graph_is_not_measured() -> None:
    """Its backward is compiled in it, which takes memory that later steps do not."""
    measured: list[bool] = []

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        case = next(s.active for s in sessions() if s.active is not None)
        measured.append(case.memory is not None)
        if step == 2:
            net.layers[0].requires_grad_(False)

    # Before 2.13 Dynamo does not see otherwise that a parameter is frozen by now.
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
        run_moving(training(adamw, between=between))
    assert measured[:2] == [False, False]
    assert measured[3:5] == [False, False]
    assert measured[5]


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
