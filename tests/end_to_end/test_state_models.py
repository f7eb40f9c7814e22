"""Thirty steps of many kinds of models whose training state moves: every bit is the same."""

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from bench.models import convnet, gpt, moe
from tests.end_to_end.moving import Optimizers, adamw, check, states
from tests.end_to_end.training import MLP, Program, Run, assert_same, run

pytestmark = pytest.mark.slow

STEPS = 30
GPT = gpt.GPTConfig(num_layers=1, width=128, context=32, vocab_size=256)
KIB = 1 << 10
BUDGET = 2 << 20
"""About half of what the smallest of these models has; the least that works if that is more."""

Batches = Callable[[int], Iterable[Tensor]]
Makers = tuple[Callable[[], nn.Module], Batches]


def training(
    make_model: Callable[[], nn.Module],
    batches: Batches,
    *,
    make_optimizer: Optimizers = adamw,
    accumulate: int = 1,
    clip: bool = False,
    autocast: bool = False,
    loss_of: Callable[[object], Tensor] = lambda result: result,  # type: ignore[assignment,return-value]
) -> Program:
    def program(this: Run) -> None:
        torch.manual_seed(3)
        net = make_model()
        this.compile(net)
        optimizer = make_optimizer([p for p in net.parameters() if p.requires_grad])
        for step in range(STEPS):
            total = torch.zeros(())
            for micro in range(accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(net(*batches(step * accumulate + micro))) / accumulate
                torch.autograd.backward(loss)
                total += loss.detach()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            this.record(total, net, others=states(optimizer))
            optimizer.zero_grad()

    return program


def gpt_of(**changes: object) -> Makers:
    config = dataclasses.replace(GPT, **changes)  # type: ignore[arg-type]
    return lambda: gpt.build(config), lambda step: gpt.batch(config, 2, step)


def mlp() -> Makers:
    return lambda: MLP(width=160, depth=3, rows=64), MLP(width=160, rows=64).batch


OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW": adamw,
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        ("AdamW", 1),
        ("AdamW", 4),
        ("SGD momentum", 4),
        ("Adagrad", 4),
        pytest.param("SGD momentum", 1, marks=pytest.mark.exhaustive),
        pytest.param("Adagrad", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_optimizers(name: str, accumulate: int) -> None:
    program = training(*mlp(), make_optimizer=OPTIMIZERS[name], accumulate=accumulate)
    check(program, budget=500 * KIB, least=True)


def test_clipping_and_accumulation() -> None:
    check(training(*gpt_of(), clip=True, accumulate=4), budget=BUDGET, least=True)


def test_autocast_over_weights_in_float32() -> None:
    check(training(*gpt_of(), autocast=True, clip=True), budget=BUDGET, least=True)


def test_tied_embeddings() -> None:
    check(training(*gpt_of(tie_embeddings=True)), budget=BUDGET, least=True)


class Adapted(nn.Module):
    """A frozen layer beside a product of two small ones that are trained (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def test_frozen_weights_beside_trained_ones() -> None:
    def make_model() -> nn.Module:
        net = MLP(width=192, depth=6, rows=64)
        net.layers = nn.ModuleList(Adapted(layer, 96) for layer in net.layers)  # type: ignore[arg-type]
        return net

    state = check(training(make_model, MLP(width=192, rows=64).batch), budget=BUDGET, least=True)
    frozen = 6 * 192 * 192 * 4
    trained = 6 * 2 * 96 * 192 * 4
    assert state.arena.log.traffic.written_bytes <= frozen + 4 * trained * (STEPS + 1), (
        "written once"
    )


def test_mixture_of_experts() -> None:
    config = moe.MoEConfig(width=128, num_layers=1, num_experts=2, experts_per_token=1)
    check(
        training(lambda: moe.build(config), lambda step: moe.batch(config, 4, step)),
        budget=BUDGET,
        least=True,
    )


def test_convolutions_with_batch_norm() -> None:
    config = convnet.ConvNetConfig(image_size=8, channels=64, num_stages=2, blocks_per_stage=1)
    check(
        training(lambda: convnet.build(config), lambda step: convnet.batch(config, 4, step)),
        budget=BUDGET,
        least=True,
    )


class WithLabels(nn.Module):
    """A Hugging Face model that is given its labels by position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> object:
        return self.inner(input_ids=tokens, labels=tokens)


def tokens(step: int) -> tuple[Tensor]:
    return (torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(step)),)


def loss_of(result: object) -> Tensor:
    loss = result.loss  # type: ignore[attr-defined]  # an output of one of many classes
    assert isinstance(loss, Tensor)
    return loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return WithLabels(LlamaForCausalLM(config))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256, d_model=128, d_kv=32, d_ff=256, num_layers=1, num_heads=4,
        decoder_start_token_id=0,  # type: ignore[call-arg]  # a field of the base class
    )  # fmt: skip
    return WithLabels(T5ForConditionalGeneration(config))


@pytest.mark.parametrize("make_model", [pytest.param(llama, marks=pytest.mark.exhaustive), t5])
def test_hugging_face(make_model: Callable[[], nn.Module]) -> None:
    check(training(make_model, tokens, loss_of=loss_of), budget=BUDGET, least=True)


def test_fused_kernels() -> None:
    check(training(*mlp(), clip=True), budget=500 * KIB, least=True, kernels="inductor")


class Words(nn.Module):
    """Nearly all of its training state is that of an embedding, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40_000, 64, sparse=True)
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.words(x).mean(1))
        return result.square().mean()


@pytest.mark.parametrize("state", ["auto", "moves"])
def test_gradients_that_are_sparse_are_not_counted_as_dense(state: str) -> None:
    """They were, and temporaries of their size: a budget of 1.5 times the peak was refused."""

    def train(this: Run) -> None:
        net = Words()
        this.compile(net)
        sparse = torch.optim.SparseAdam(net.words.parameters())
        others = adamw(net.last.parameters())
        for step in range(6):
            random = torch.Generator().manual_seed(step)
            loss = net(torch.randint(0, 40_000, (64, 4), generator=random))
            torch.autograd.backward(loss)
            for optimizer in (sparse, others):
                optimizer.step()
            net.zero_grad()
            this.record(loss, net)

    reference = run(train, device_budget=100 << 30, training_state="stays")
    budget = int(1.1 * reference.final.unlimited_peak_bytes)
    assert_same(reference, run(train, device_budget=budget, training_state=state))
