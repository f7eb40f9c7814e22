"""Parameters, gradients and optimizer state that leave a GPU for pinned host memory.

Written without a GPU at hand: not run yet.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import teraplan
from bench.models import gpt
from teraplan import backend
from teraplan.config import Config
from teraplan.runtime.cuda.device import CudaDevice
from teraplan.runtime.open_device import open_device
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.units import MIB
from teraplan.values.step_trace import TensorKind

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPT = gpt.GPTConfig(num_layers=6, width=512, num_heads=8, context=256)
STEPS = 8


def test_kernels_read_and_write_what_is_away() -> None:
    """With views, products of matrices, copies to the host, and reductions."""
    device = open_device(Config.resolve({"host_budget": "1GiB"}, {}), torch.device("cuda", 0))
    assert isinstance(device, CudaDevice)
    assert device.why_state_stays == ""
    arena = StateArena(device.state_memory(), 256 * MIB)
    values = torch.randn(2048, 2048, device="cuda")
    block = arena.open(
        values.nbytes, (TensorKind.PARAMETER, 0), "parameter", shape=(2048, 2048), dtype="float32"
    )
    arena.use(block, writes=True, may_write=True)
    tensor = arena.place(block, values).copy_(values)
    view = tensor.t()[:100]
    arena.done(block, leaves=False)
    for _ in range(3):
        arena.send_out(block)
        arena.see_out(block)
        assert arena.held_bytes == 0
        assert torch.equal(tensor, values)
        assert torch.equal(tensor.cpu(), values.cpu())
        torch.testing.assert_close(view @ tensor, values.t()[:100] @ values)
        tensor.add_(1.0)
        values.add_(1.0)
        assert torch.equal(tensor.sum(dim=0), values.sum(dim=0))
        arena.user_may_have_run()
        arena.fetch(block)
        arena.use(block)
        assert tensor.data_ptr() == block.address
        assert torch.equal(tensor, values)
        tensor.mul_(0.5)
        values.mul_(0.5)
        arena.user_may_have_run()
        arena.done(block, leaves=False)
    arena.close()
    device.close()
    assert torch.equal(tensor, values)


def trained(budget: object, state: str, **options: object) -> tuple[list[Tensor], list[float]]:
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = gpt.build(GPT).cuda()
    model.compile(
        backend="teraplan",
        options={
            "device_budget": budget,
            "host_budget": "4GiB",
            "training_state": state,
            **options,
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for step in range(STEPS):
        loss = model(*(tensor.cuda() for tensor in gpt.batch(GPT, 8, step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 4:
            between(model)
    return [p.detach().cpu() for p in model.parameters()], losses


def between(model: nn.Module) -> None:
    """What users do between two steps, with tensors that are away."""
    twin = copy.deepcopy(model)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)
        mine.data.lerp_(its * 0.9, 0.5)
    saved = model.state_dict()
    model.load_state_dict({name: value.cpu() for name, value in saved.items()})


@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
@pytest.mark.parametrize("part", [0.6, 0.4])
def test_same_bits_under_the_budget(kernels: str, part: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    values, losses = trained("1TiB", "stays", kernels=kernels)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found, found_losses = trained(int(peak * part), "moves", kernels=kernels)
    assert found_losses == losses
    assert all(map(torch.equal, found, values))
    status = teraplan.status()
    assert status.phase == "planned"
    assert status.state_from_host_bytes > 0
    assert torch.cuda.max_memory_allocated() <= peak * part * 1.1 + 64 * MIB


def test_tensors_stay_usable_when_the_session_is_closed() -> None:
    torch._dynamo.reset()
    model = gpt.build(GPT).cuda()
    options = {"device_budget": "200MiB", "host_budget": "4GiB", "training_state": "moves"}
    model.compile(backend="teraplan", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(*(tensor.cuda() for tensor in gpt.batch(GPT, 4, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for session in backend.sessions():
        session.close()
    total = sum(p.double().sum() for p in model.parameters())
    torch.cuda.synchronize()
    assert torch.isfinite(torch.as_tensor(total))
