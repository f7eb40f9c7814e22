"""The models of tests and measurements: they train, repeat exactly, and do what they say."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench.models import convnet, encoder, gpt, mixer, moe

SMALL_GPT = gpt.GPTConfig(context=16, num_layers=2, num_heads=2, width=32)


def make_gpt() -> nn.Module:
    return gpt.build(SMALL_GPT)


def make_tied_gpt() -> nn.Module:
    return gpt.build(dataclasses.replace(SMALL_GPT, tie_embeddings=True))


def make_checkpointed_gpt() -> nn.Module:
    return gpt.build(dataclasses.replace(SMALL_GPT, checkpoint=True))


def make_dropout_gpt() -> nn.Module:
    return gpt.build(dataclasses.replace(SMALL_GPT, dropout=0.2))


def make_encoder() -> nn.Module:
    return encoder.build(encoder.EncoderConfig(context=16, num_layers=2, width=32, dropout=0.1))


def make_convnet() -> nn.Module:
    return convnet.build(convnet.ConvNetConfig(image_size=8, channels=4))


def make_mixer() -> nn.Module:
    return mixer.build(mixer.MixerConfig(image_size=8, width=16, num_layers=2))


def make_moe() -> nn.Module:
    return moe.build(moe.MoEConfig(context=8, width=16))


def text(step: int) -> tuple[Tensor, Tensor]:
    return gpt.batch(SMALL_GPT, 2, step)


def masked_text(step: int) -> tuple[Tensor, Tensor]:
    return encoder.batch(encoder.EncoderConfig(context=16), 2, step)


def images(step: int) -> tuple[Tensor, Tensor]:
    return convnet.batch(convnet.ConvNetConfig(image_size=8), 2, step)


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]
CASES: tuple[Case, ...] = (
    (make_gpt, text),
    (make_tied_gpt, text),
    (make_checkpointed_gpt, text),
    (make_dropout_gpt, text),
    (make_encoder, masked_text),
    (make_convnet, images),
    (make_mixer, images),
    (make_moe, text),
)


def train(case: Case, steps: int) -> list[Tensor]:
    """Losses and final parameters of `steps` steps on one batch."""
    torch.manual_seed(7)
    make, batch = case
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    results: list[Tensor] = []
    for _ in range(steps):
        loss: Tensor = model(*batch(0))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        results.append(loss.detach())
    return [*results, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0].__name__))
def test_a_model_learns_its_batch_and_repeats_in_every_bit(case: Case) -> None:
    first, second = train(case, 6), train(case, 6)
    assert first[5] < first[0]
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0].__name__))
def test_data_depends_on_the_step_alone(case: Case) -> None:
    batch = case[1]
    torch.manual_seed(1)
    again = batch(3)
    for left, right in zip(batch(3), again, strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(batch(3)[0], batch(4)[0])


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_gpt()
    text(0)
    assert torch.equal(torch.rand(3), expected)


def test_tied_embeddings_are_one_parameter() -> None:
    model = gpt.build(gpt.GPTConfig(tie_embeddings=True))
    assert model.head.weight is model.tokens.weight


def test_checkpointing_changes_no_bit() -> None:
    saved, recomputed = make_gpt(), make_checkpointed_gpt()
    recomputed.load_state_dict(saved.state_dict())
    for model in (saved, recomputed):
        model(*text(0)).backward()
    for left, right in zip(saved.parameters(), recomputed.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad)


def test_a_gpt_does_not_look_ahead() -> None:
    model = gpt.build(SMALL_GPT)
    tokens, targets = text(0)
    targets = targets.clone()
    targets[:, 1:] = -100
    changed = tokens.clone()
    changed[:, 1:] = (changed[:, 1:] + 1) % 256
    assert torch.equal(model(tokens, targets), model(changed, targets))


def test_an_encoder_does_not_look_at_padding() -> None:
    config = encoder.EncoderConfig(context=16, num_layers=1, width=32)
    model = encoder.build(config)
    tokens, targets = encoder.batch(config, 4)
    padded = tokens == encoder.PADDING
    assert padded.any()
    assert (targets[padded] == encoder.IGNORED).all()
    loss: Tensor = model(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.tokens.weight.grad is not None
    assert not model.tokens.weight.grad[encoder.PADDING].any()


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_every_row_meets_its_experts_once(experts_per_token: int) -> None:
    config = moe.MoEConfig(experts_per_token=experts_per_token, num_layers=1)
    model = moe.build(config)
    num_rows: list[int] = []
    for module in model.modules():
        if isinstance(module, moe.Expert):
            module.register_forward_hook(
                lambda _module, args, _output: num_rows.append(int(args[0].shape[0]))
            )
    model(*moe.batch(config, 2))
    assert sum(num_rows) == 2 * config.context * experts_per_token
    assert len(set(num_rows)) > 1
