"""The ways in which people train, each with little memory and the same bits."""

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import teraplan
from tests.end_to_end.training import (
    MLP,
    Run,
    accumulating,
    assert_same,
    check,
    tight,
    training,
    unlimited,
)


class _Broken(nn.Module):
    """Two graphs with Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(depth=3), MLP(depth=3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first.layers:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.second.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_graph_break() -> None:
    limited = check(training(_Broken, MLP().batch))
    assert limited.final.graphs == 2


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class _Blocks(nn.Module):
    """Repeated layers, each compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_repeated_blocks_share_one_graph() -> None:
    def program(this: Run) -> None:
        torch.manual_seed(1)
        model = _Blocks()
        for block in model.blocks:
            this.compile(block)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            loss = model(*MLP().batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    limited = check(program)
    assert limited.final.graphs == 2, "the first block's input needs no gradient; the others share"
    assert limited.final.diverged_steps == 0


@pytest.mark.slow
def test_evaluation_between_steps() -> None:
    def program(this: Run) -> None:
        model = this.compile(_Features(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(9):
            model.train()
            loss = model(*MLP().batch(step)).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen = model(*MLP().batch(1000 + step))
            this.record(loss, model, others=[seen])

    check(program)


def _accumulation(micro_batches: int, *, order: str, steps: int = 8) -> object:
    """Steps of several micro-batches: "fbfb" backward at once, "ffbb" and "ffbb reversed" later."""

    def program(this: Run) -> None:
        torch.manual_seed(1)
        model = this.compile(MLP(rows=1024))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(steps):
            batches = [MLP(rows=1024).batch(micro_batches * step + i) for i in range(micro_batches)]
            if order == "fbfb":
                losses = []
                for batch in batches:
                    losses.append(model(*batch) / micro_batches)
                    torch.autograd.backward(losses[-1])
            else:
                losses = [model(*batch) / micro_batches for batch in batches]
                for loss in losses if order == "ffbb" else reversed(losses):
                    torch.autograd.backward(loss)
            optimizer.step()
            this.record(torch.stack(losses).sum(), model)
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize(
    "order", ["ffbb", *(pytest.param(o, marks=pytest.mark.slow) for o in ("fbfb", "ffbb reversed"))]
)
def test_micro_batches(order: str) -> None:
    limited = check(_accumulation(3, order=order))  # type: ignore[arg-type]
    assert limited.final.diverged_steps == 0


@pytest.mark.slow
def test_interleaved_micro_batches() -> None:
    """Forward 0, forward 1, backward 0, forward 2, backward 1, ...: as a pipeline stage does it."""

    def program(this: Run) -> None:
        model = this.compile(MLP(rows=1024))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            waiting: list[Tensor] = []
            total = torch.zeros(())
            for i in range(4):
                waiting.append(model(*MLP(rows=1024).batch(4 * step + i)))
                if len(waiting) == 2:
                    loss = waiting.pop(0)
                    torch.autograd.backward(loss)
                    total += loss.detach()
            torch.autograd.backward(waiting.pop())
            optimizer.step()
            this.record(total, model)
            optimizer.zero_grad()

    check(program, 0.5)


@pytest.mark.slow
def test_last_step_with_fewer_micro_batches() -> None:
    """As at the end of an epoch: the step is another one than was planned, and right anyway."""

    def batches(step: int) -> list[tuple[Tensor, ...]]:
        return [MLP(rows=1024).batch(10 * step + i) for i in range(1 if step in (7, 8) else 3)]

    program = accumulating(lambda: MLP(rows=1024), batches, steps=12)
    reference = unlimited(program)
    limited = tight(program, reference, 0.5)
    assert_same(reference, limited)
    assert limited.statuses[-1].phase == "planned"
    assert sum(limited.statuses[-1].bytes_out.values()) > 0


@pytest.mark.slow
def test_autocast() -> None:
    def program(this: Run) -> None:
        model = this.compile(MLP(rows=1024))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*MLP(rows=1024).batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    check(program)


class _Features(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        return x


class _Decomposed(MLP):
    """Ends with a check whether its last step is possible, which the graph keeps in order."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        small = x.T @ x / len(x) + torch.eye(x.shape[1])
        loss: Tensor = torch.linalg.cholesky(small).diagonal().log().sum()
        return loss


@pytest.mark.slow
def test_ops_with_effects() -> None:
    """Their tokens are inputs of the graph that are None when it runs."""
    check(training(_Decomposed, MLP().batch))


@pytest.mark.slow
def test_dropout_loss_outside_and_other_random_numbers() -> None:
    """The random numbers of the user's own code are the same too, and so is the generator."""

    def program(this: Run) -> None:
        model = this.compile(_Features())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            out = model(*MLP().batch(step))
            loss = F.mse_loss(out, torch.randn_like(out)) + out.abs().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model, others=[out, torch.get_rng_state()])
            optimizer.zero_grad()

    check(program)


@pytest.mark.slow
def test_no_optimizer_at_all() -> None:
    def program(this: Run) -> None:
        model = this.compile(MLP())
        for step in range(8):
            loss = model(*MLP().batch(step))
            torch.autograd.backward(loss)
            this.record(loss, model)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None

    check(program)


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_two_models_in_one_process(same: bool) -> None:
    """Trained in turns, under one configuration or two."""

    def program(this: Run) -> None:
        torch.manual_seed(3)
        models: list[nn.Module] = [MLP(), _Features()]
        other = this.options if same else {**this.options, "deadline_s": 61.0}
        models[0].compile(backend="teraplan", options=this.options)
        models[1].compile(backend="teraplan", options=other)
        optimizers = [torch.optim.AdamW(m.parameters()) for m in models]
        for step, (model, optimizer) in itertools.product(
            range(9), zip(models, optimizers, strict=True)
        ):
            loss = model(*MLP().batch(step)).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    reference = unlimited(program)
    assert_same(reference, tight(program, reference, 0.6))


@pytest.mark.slow
def test_no_parameter_requires_a_gradient() -> None:
    """The input does: as in adversarial examples or feature visualization."""

    def program(this: Run) -> None:
        model = MLP()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        this.compile(model)
        x = MLP().batch(0)[0].requires_grad_()
        optimizer = torch.optim.SGD([x], lr=0.1)
        for _ in range(8):
            loss = model(x)
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, others=[x, x.grad])
            optimizer.zero_grad()

    check(program, 0.5, may_stay=True)


def test_nothing_requires_a_gradient() -> None:
    def program(this: Run) -> None:
        model = MLP().requires_grad_(False)
        expected = copy.deepcopy(model)
        this.compile(model)
        for step in range(3):
            batch = MLP().batch(step)
            assert torch.equal(model(*batch), expected(*batch))
            this.record(model(*batch))

    reference = unlimited(program)
    assert reference.statuses[-1].sites == 0


def test_all_saved_activations_small() -> None:
    """There is nothing to move, and training goes on as if we were not there."""

    def program(this: Run) -> None:
        training(lambda: MLP(rows=4), MLP(rows=4).batch, steps=5)(this)

    reference = unlimited(program)
    last = reference.statuses[-1]
    assert all(why == "small" for _, _, why in last.uncovered)
    assert 0 < last.coverage < 1 / 2, "one has ops: by its token the backward knows its step"
    assert reference.moved_bytes == 0
    assert reference.losses[0] != reference.losses[-1]


class _Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 8 * 256

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_data_loader_with_workers(context: str) -> None:
    def batches() -> Iterator[Tensor]:
        for _ in range(2):  # two epochs: workers start anew while the session's threads run
            yield from torch.utils.data.DataLoader(
                _Rows(), batch_size=512, num_workers=1, multiprocessing_context=context
            )

    def program(this: Run) -> None:
        model = this.compile(MLP())
        optimizer = torch.optim.AdamW(model.parameters())
        for x in batches():
            loss = model(x)
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    check(program, 0.5)


def test_status_before_anything_is_compiled() -> None:
    assert teraplan.status().phase == "idle"
