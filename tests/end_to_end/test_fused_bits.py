"""The same bits in lower precision, with fused kernels, whether the training state stays or moves.

What one kernel passes on within itself is not rounded, so other kernels give other bits.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from teraplan.errors import FallbackRefusedError, InfeasibleBudgetError
from tests.end_to_end.moving import adamw, moving, run_moving
from tests.end_to_end.training import MLP, UNLIMITED, Run, assert_same, run

WIDTH, CONTEXT, HEADS, VOCABULARY, BATCH = 256, 64, 4, 300, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.shape[0], CONTEXT, HEADS, WIDTH // HEADS
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        down: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + down


class Model(nn.Module):
    """A GPT with a large parameter between its embedding and the first norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.rand(BATCH, CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def evaluation_program(this: Run) -> None:
    """Evaluates in lower precision within each step; the result takes part in the loss."""
    model = this.compile(Model())
    optimizer = adamw(model.parameters())
    for step in range(5):
        random = torch.Generator().manual_seed(step)
        size = (2, BATCH, CONTEXT)
        tokens, targets = torch.randint(0, VOCABULARY, size, generator=random)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                before = model(targets, tokens)
            loss = model(tokens, targets) * before
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        this.record(loss, model, others=[before])


class Gated(nn.Module):
    """With large parameters that are added and multiplied: Inductor would fuse across their ops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        size = (3 * CONTEXT, WIDTH)
        self.embed, self.head = nn.Linear(48, WIDTH), nn.Linear(WIDTH, 10)
        self.positions, self.scale = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))
        self.gates = nn.ParameterList(torch.rand(size) / 8 for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu((self.embed(x) + self.positions) * self.scale)
        for layer, norm, gate in zip(self.layers, self.norms, self.gates, strict=True):
            x = x + F.silu(layer(norm(x) * (1 + gate)) + gate)
        logits: Tensor = self.head(x.mean(1))
        return logits


def gated_program(this: Run, *, autocast: bool) -> None:
    """Trains in bfloat16: of all, or of what autocast chooses."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = this.compile(Gated().to(dtype))
    optimizer = adamw(model.parameters())
    for step in range(5):
        random = torch.Generator().manual_seed(step)
        x = torch.rand(BATCH, 3 * CONTEXT, 48, generator=random).to(dtype)
        labels = torch.randint(10, (BATCH,), generator=random)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x).float(), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        this.record(loss, model)


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "budget_bytes"),
    [
        pytest.param(evaluation_program, 64 << 20, id="evaluation", marks=EXHAUSTIVE),
        pytest.param(partial(gated_program, autocast=False), 11 << 20, id="bfloat16"),
        pytest.param(
            partial(gated_program, autocast=True), 16 << 20, id="autocast", marks=EXHAUSTIVE
        ),
    ],
)
def test_kernels_are_the_same_under_every_budget(
    program: Callable[[Run], None], budget_bytes: int
) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        reference = run(program, device_budget=UNLIMITED, kernels="inductor")
        limited = run_moving(program, budget_bytes, kernels="inductor")
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert moving().arena.total_bytes > 0
    assert_same(reference, limited)


@pytest.mark.slow
def test_graphs_call_kernels_from_python_whatever_inductor_is_told() -> None:
    """What moves tensors between kernels is Python: errors keep their names."""

    def program(this: Run) -> None:
        net = MLP(width=WIDTH, depth=2, rows=64)
        this.compile(net)
        for step in range(3):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            this.record(loss, net)

    with inductor_config.patch(cpp_wrapper=True):
        made = run(program, device_budget=UNLIMITED, kernels="inductor")
        with pytest.raises(InfeasibleBudgetError):
            run(program, device_budget=1 << 18, kernels="inductor")
        with pytest.raises(FallbackRefusedError, match="cpp_wrapper is set"):
            run(program, device_budget=UNLIMITED, kernels="inductor", strict=True)
    assert any("cpp_wrapper is set" in text for text in made.statuses[-1].fallbacks)


class Causal(nn.Module):
    """A row of the padded is 770 elements: of the last 2, a kernel may read 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixed = nn.Embedding(64, 96), nn.Conv1d(96, 96, 1)
        self.dilated = nn.Conv1d(96, 96, 2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).transpose(1, 2)
        result: Tensor = self.dilated(F.pad(h + self.mixed(h), (2, 0))).square().mean()
        return result


@pytest.mark.slow
def test_no_kernel_reads_behind_the_end_of_a_tensor() -> None:
    """Memory ends there, so it would be the end of the process."""

    def program(this: Run) -> None:
        net = Causal()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(6):
            torch.manual_seed(step)
            loss = net(torch.randint(0, 64, (12, 768)))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        reference = run(program, device_budget=UNLIMITED, kernels="inductor")
        assert_same(reference, run_moving(program, 24 << 20, kernels="inductor"))
    finally:
        torch.use_deterministic_algorithms(deterministic)
