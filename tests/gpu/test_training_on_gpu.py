"""Training on a GPU under tight budgets: the same bits, under the budget, copies beside kernels.

Written without a GPU at hand: not run yet.
"""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from bench.models import convnet, gpt
from teraplan.runtime.cuda import device as cuda_device
from teraplan.runtime.session import feedback
from tests.end_to_end.training import (
    Program,
    Run,
    assert_kept_to_plan,
    assert_same,
    sessions,
    tight,
    training,
    unlimited,
)
from tests.fakes.slow_link import link_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPT = gpt.GPTConfig(num_layers=6, width=512, num_heads=8, context=256)
IMAGES = convnet.ConvNetConfig(image_size=64, channels=32)
TIERS: dict[str, dict[str, object]] = {
    "host": {"host_budget": "4GiB"},
    "storage": {"host_budget": 0},
    "both": {"host_budget": "160MiB"},
}


def on_gpu(batch: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.cuda() for tensor in batch)


def gpt_program(steps: int = 8) -> Program:
    return training(
        lambda: gpt.build(GPT).cuda(), lambda step: on_gpu(gpt.batch(GPT, 16, step)), steps=steps
    )


def conv_program() -> Program:
    return training(
        lambda: convnet.build(IMAGES).cuda(),
        lambda step: on_gpu(convnet.batch(IMAGES, 64, step)),
    )


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make_program", [gpt_program, conv_program])
def test_same_bits(make_program: object, kernels: str, tiers: str) -> None:
    program = gpt_program() if make_program is gpt_program else conv_program()
    reference = unlimited(program, kernels=kernels)
    limited = tight(program, reference, 0.4, kernels=kernels, **TIERS[tiers])
    assert_same(reference, limited)
    assert_kept_to_plan(limited)
    used = {tier for tier, nbytes in limited.final.bytes_out.items() if nbytes}
    assert used
    if tiers == "storage":
        assert used == {"storage"}


@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
def test_computed_again(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the trial finds equal bits: PyTorch's own kernels are the same ones twice."""
    monkeypatch.setattr(cuda_device, "storage_link", lambda *_, **__: link_of(10_000_000))
    monkeypatch.setattr(feedback, "_COMPARED_AFTER", ())
    program = gpt_program()
    reference = unlimited(program, kernels=kernels)
    limited = tight(program, reference, 0.5, kernels=kernels, recompute="auto", host_budget=0)
    assert_same(reference, limited)
    if kernels == "aot_eager":
        assert limited.final.recomputed_bytes > 0


@pytest.mark.parametrize("tiers", TIERS)
def test_peak_is_under_the_budget(tiers: str) -> None:
    program = gpt_program()
    reference = unlimited(program)
    budget = 0

    def measured(this: Run) -> None:
        nonlocal budget
        program(this)
        budget = this.final.device_budget_bytes
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    limited = tight(measured, reference, 0.4, **TIERS[tiers])
    assert_same(reference, limited)
    assert 0 < limited.final.actual_peak_bytes <= budget


def test_copies_run_beside_kernels() -> None:
    program = gpt_program()
    reference = unlimited(program)
    overlapping: list[int] = []

    def recorded(this: Run) -> None:
        program(this)
        for session in sessions():
            for case in session.cases.values():
                for run in case.runs:
                    starts = run.site_start_ns
                    overlapping.append(
                        sum(any(t.start_ns < s < t.end_ns for s in starts) for t in run.transfers)
                    )

    tight(recorded, reference, 0.4, **TIERS["host"])
    assert overlapping
    assert max(overlapping) > 0, "no site was reached while a copy ran"


def test_user_code_on_a_stream_of_its_own() -> None:
    inner = gpt_program()

    def program(this: Run) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            inner(this)
        torch.cuda.current_stream().wait_stream(stream)

    reference = unlimited(program)
    assert_same(reference, tight(program, reference, 0.4, **TIERS["both"]))


def test_memory_pressure_during_prefetch() -> None:
    """User code allocates, fills and frees between the forward and the backward."""

    def program(this: Run) -> None:
        model = this.compile(gpt.build(GPT).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            loss = model(*on_gpu(gpt.batch(GPT, 16, step)))
            for nbytes in (1 << 20, 16 << 20, 5 << 20):
                torch.empty(nbytes, dtype=torch.uint8, device=loss.device).fill_(0xEE)
            loss.backward()
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    reference = unlimited(program)
    assert_same(reference, tight(program, reference, 0.4, **TIERS["both"]))
