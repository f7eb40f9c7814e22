"""Every model of the benchmarks and two of Hugging Face's: the same bits with little memory."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.models import convnet, encoder, gpt, mixer, moe
from tests.end_to_end.training import MLP, assert_same, check, run, training, unlimited

GPT = gpt.GPTConfig(num_layers=2, width=64, context=64, vocab_size=64)
BUDGETS = 0.7, 0.5, 0.3
"""Shares of what each model saves; where so little cannot work, the least budget that can."""
FEWER = 0.7, 0.3
STEPS = 20


@pytest.mark.slow
def test_plain_mlp_saves_its_own_input() -> None:
    check(training(MLP, MLP().batch), 0.3)


_twenty = functools.partial(training, steps=STEPS)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gpt_with_dropout() -> None:
    config = dataclasses.replace(GPT, dropout=0.1)
    check(_twenty(lambda: gpt.build(config), lambda step: gpt.batch(config, 8, step)), *BUDGETS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tie_embeddings": True}, marks=pytest.mark.exhaustive),
        {"checkpoint": True, "dropout": 0.1},
    ],
)
def test_gpt_variants(change: dict[str, Any]) -> None:
    config = dataclasses.replace(GPT, **change)
    check(
        _twenty(lambda: gpt.build(config), lambda step: gpt.batch(config, 8, step)),
        *FEWER,
        may_stay=config.checkpoint,
    )


@pytest.mark.slow
def test_encoder() -> None:
    config = encoder.EncoderConfig(num_layers=2, width=64, context=32, dropout=0.1, vocab_size=64)
    program = _twenty(lambda: encoder.build(config), lambda step: encoder.batch(config, 16, step))
    check(program, *FEWER)


@pytest.mark.slow
def test_convnet_with_batch_norm() -> None:
    config = convnet.ConvNetConfig(num_stages=2, blocks_per_stage=1, image_size=16)
    program = _twenty(lambda: convnet.build(config), lambda step: convnet.batch(config, 32, step))
    check(program, *FEWER)


class Attention(nn.Module):
    """Its heads are views of one product; PyTorch's own kernel drops some of what they attend."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + out


def test_attention_with_dropout_in_two_layers() -> None:
    def batch(step: int) -> Sequence[Any]:
        torch.manual_seed(step)
        return (torch.randn(4, 64, 64),)

    check(training(TwoLayers, batch), 0.5)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)).square().mean()
        return result


@pytest.mark.slow
def test_mixer() -> None:
    config = mixer.MixerConfig(num_layers=2, width=64)
    check(_twenty(lambda: mixer.build(config), lambda step: mixer.batch(config, 8, step)), *FEWER)


def _loss_of(result: object) -> Tensor:
    loss = result.loss  # type: ignore[attr-defined]  # an output of one of many classes
    assert isinstance(loss, Tensor)
    return loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _tokens(step: int, shape: tuple[int, int] = (8, 64)) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(step))


class _WithLabels(nn.Module):
    """A Hugging Face model that is given its labels by position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> object:
        return self.inner(input_ids=tokens, labels=tokens)


@pytest.mark.slow
def test_huggingface_llama() -> None:
    def batches(step: int) -> Iterable[Tensor]:
        return (_tokens(step),)

    check(_twenty(lambda: _WithLabels(_llama()), batches, loss_of=_loss_of), *FEWER)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_huggingface_t5() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    def make() -> nn.Module:
        torch.manual_seed(1)
        config = T5Config(
            vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0,  # type: ignore[call-arg]  # a field of the base class
        )  # fmt: skip
        return _WithLabels(T5ForConditionalGeneration(config))

    check(_twenty(make, lambda step: (_tokens(step, (8, 48)),), loss_of=_loss_of), *FEWER)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_experts_with_data_dependent_routing() -> None:
    """Sizes differ from step to step, so no plan is exact: only the numbers have to be."""
    config = moe.MoEConfig(width=64, context=64)
    program = _twenty(lambda: moe.build(config), lambda step: moe.batch(config, 64, step))
    reference = unlimited(program)
    for budget in ("85%", "75%"):
        limited = run(program, device_budget=budget)
        assert_same(reference, limited)
        last = limited.statuses[-1]
        assert last.phase != "planned"
        assert last.unplanned_because
        assert last.bytes_out["storage"] > 0


class _Selected(nn.Module):
    """Layers over rows of which the values say how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = x[(x[:, 0] > -0.5).nonzero(as_tuple=True)[0]]
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return rows.square().mean()


@pytest.fixture
def sizes_of_values() -> Iterator[None]:
    """Dynamo compiles what has as many rows as there are values that are not zero, say."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("sizes_of_values")
def test_activations_whose_sizes_follow_from_values(kernels: str) -> None:
    """PyTorch traces them as of no known size; they leave all the same."""

    def batch(step: int) -> tuple[Tensor]:
        return (torch.randn(6144, 128, generator=torch.Generator().manual_seed(step)),)

    torch.manual_seed(1)
    program = _twenty(_Selected, batch)
    reference = unlimited(program, kernels=kernels)
    assert reference.final.coverage > 0.9
    limited = run(program, kernels=kernels, device_budget="85%")
    assert_same(reference, limited)
    assert limited.statuses[-1].bytes_out["storage"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("turns", [(6.0, 0.0), (6.0, 6.0, 0.0)])
@pytest.mark.usefixtures("sizes_of_values")
def test_steps_with_far_more_rows_than_planned_keep_to_the_budget(turns: Sequence[float]) -> None:
    """Nothing tells when a step begins: the plan is left where tensors are so much larger."""

    def batch(step: int) -> tuple[Tensor]:
        x = torch.randn(16384, 128, generator=torch.Generator().manual_seed(step))
        x[512:, 0] -= turns[step % len(turns)]
        return (x,)

    torch.manual_seed(1)
    program = _twenty(_Selected, batch)
    reference = unlimited(program)
    budget = 60 << 20  # with nothing moved it is 92
    limited = run(program, device_budget=budget)
    assert_same(reference, limited)
    peaks = [s.actual_peak_bytes for s in limited.statuses if s.phase == "planned"]
    assert 0 < max(peaks) < 1.1 * budget
    assert sum(status.bytes_out.get("storage", 0) > 20 << 20 for status in limited.statuses) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("sizes_of_values")
def test_experts_in_one_graph(kernels: str) -> None:
    """Each expert's activations have as many rows as the router says."""
    config = moe.MoEConfig(width=64, context=64)
    program = _twenty(lambda: moe.build(config), lambda step: moe.batch(config, 64, step))
    reference = unlimited(program, kernels=kernels)
    assert reference.statuses[-1].graphs == 1
    for budget in ("80%", "60%"):
        limited = run(program, kernels=kernels, device_budget=budget)
        assert_same(reference, limited)
        assert limited.statuses[-1].bytes_out["storage"] > 0


@pytest.mark.slow
def test_gpt_with_fused_kernels() -> None:
    """Dropout takes random numbers; without it the demonstration trains one."""
    config = dataclasses.replace(GPT, dropout=0.1)
    program = _twenty(lambda: gpt.build(config), lambda step: gpt.batch(config, 16, step))
    check(program, 0.4, kernels="inductor")
