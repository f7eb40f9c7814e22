"""Runs one training program with unlimited and with little memory, and compares every bit.

A program is a function of a `Run`. It compiles its models with `run.compile`, trains, and calls
`run.record` after each step with whatever has to be equal. What it must not do is depend on
anything that differs between two runs: it makes its own model, batches and random numbers.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor, nn

import teraplan
from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.session.session import Session
from teraplan.values.status import Status

UNLIMITED = 100 << 30
_ATTEMPTS = 4
"""Memory is measured anew in every run, so the least budget of one may miss that of the next."""
_LESS = 0.2
"""For the same reason a budget that is tight in one run may be ample in the next."""


def bits(values: Iterable[Tensor | None]) -> str:
    """Hash of the values' types, shapes and bytes."""
    digest = xxhash.xxh3_128()
    for value in values:
        if value is None:
            digest.update(b"none")
            continue
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(slots=True)
class Run:
    """One execution of a program under one budget."""

    options: dict[str, object]
    recorded: list[str] = field(default_factory=list[str])
    losses: list[float] = field(default_factory=list[float])
    statuses: list[Status] = field(default_factory=list[Status])

    def compile(self, model: nn.Module, **kwargs: object) -> nn.Module:
        """`model`, compiled in place by our backend under this run's options."""
        model.compile(backend="teraplan", options=self.options, **kwargs)
        return model

    def record(
        self, loss: Tensor, *models: nn.Module, others: Iterable[Tensor | None] = ()
    ) -> None:
        """A step is over: its loss, all parameters, gradients and buffers must be equal."""
        values: list[Tensor | None] = [loss, *others]
        for model in models:
            values += [*model.parameters(), *(p.grad for p in model.parameters())]
            values += list(model.buffers())
        self.recorded.append(bits(values))
        self.losses.append(float(loss.detach().float().sum()))
        self.statuses.append(teraplan.status())

    @property
    def final(self) -> Status:
        """The status after the last step whose plan has been followed at least once."""
        return next(s for s in reversed(self.statuses) if s.managed_peak_bytes >= 0)

    @property
    def moved_bytes(self) -> int:
        """The most bytes that left the device in any planned step; 0 if there was none."""
        planned = (s for s in self.statuses if s.managed_peak_bytes >= 0)
        return max((sum(status.bytes_out.values()) for status in planned), default=0)


Program = Callable[[Run], None]


def run(program: Program, **options: object) -> Run:
    """Execute a program from a fresh start."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(7)
    this = Run({"kernels": "aot_eager", "profile_steps": 1, **options})
    program(this)
    return this


def unlimited(program: Program, **options: object) -> Run:
    """Execute a program with memory for everything: the reference."""
    reference = run(program, device_budget=UNLIMITED, **options)
    assert reference.moved_bytes == 0
    return reference


def tight(program: Program, reference: Run, fraction: float, **options: object) -> Run:
    """Execute a program with memory for `fraction` of what it saves, or the least that works.

    The training state stays: `moving.py` has what tests of one that moves share.
    """
    options = {"training_state": "stays", **options}
    plan = next(s for s in reference.statuses if s.predicted_managed_peak_bytes >= 0)
    budget = plan.unlimited_peak_bytes - int((1 - fraction) * plan.predicted_managed_peak_bytes)
    for attempt in range(_ATTEMPTS):
        try:
            return run(program, device_budget=budget, **options)
        except InfeasibleBudgetError as error:
            assert error.least_budget_bytes > budget, "the least budget that works is no more"
            budget = int(error.least_budget_bytes * (1 + 0.05 * attempt))
    raise AssertionError(f"{budget} bytes, the least budget that works, does not")


def moving(program: Program, reference: Run, fraction: float, **options: object) -> Run:
    """As `tight`, with less memory where that was ample: measured less than the reference was."""
    limited = tight(program, reference, fraction, **options)
    while limited.moved_bytes == 0 and fraction > _LESS:
        fraction -= _LESS
        limited = tight(program, reference, fraction, **options)
    return limited


def assert_same(reference: Run, other: Run) -> None:
    """Every recorded bit is equal."""
    assert len(reference.recorded) >= 1
    assert other.losses == reference.losses
    assert other.recorded == reference.recorded


def assert_kept_to_plan(limited: Run) -> None:
    """Bytes really left, and as many stayed as was predicted."""
    assert limited.moved_bytes > 0, "nothing was moved"
    final = limited.final
    assert final.predicted_managed_peak_bytes < final.unlimited_peak_bytes
    ratio = final.managed_peak_bytes / final.predicted_managed_peak_bytes
    assert abs(ratio - 1) <= 0.05, f"{ratio:.3f} of the predicted managed peak; {final}"


def check(program: Program, *fractions: float, may_stay: bool = False, **options: object) -> Run:
    """Compare the program under each budget with the unlimited one; returns the last run.

    `may_stay`: no budget that works may be so small that anything has to move.
    """
    reference = unlimited(program, **options)
    limited = reference
    for fraction in fractions or (0.4,):
        how = tight if may_stay else moving
        limited = how(program, reference, fraction, **options)
        assert_same(reference, limited)
        if not may_stay:
            assert_kept_to_plan(limited)
    return limited


def training(
    make_model: Callable[[], nn.Module],
    batches: Callable[[int], Iterable[Tensor]],
    *,
    steps: int = 8,
    loss_of: Callable[[object], Tensor] = lambda result: result,  # type: ignore[assignment,return-value]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Program:
    """The usual program: forward, backward, optimizer, `steps` times."""
    return accumulating(
        make_model,
        lambda step: [batches(step)],
        steps=steps,
        loss_of=loss_of,
        make_optimizer=make_optimizer,
    )


def accumulating(
    make_model: Callable[[], nn.Module],
    batches: Callable[[int], Iterable[Iterable[Tensor]]],
    *,
    steps: int,
    dynamic: bool | None = None,
    loss_of: Callable[[object], Tensor] = lambda result: result,  # type: ignore[assignment,return-value]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Program:
    """The same with a forward and a backward for each of the batches of a step."""

    def program(this: Run) -> None:
        model = this.compile(make_model(), dynamic=dynamic)
        parameters = list(model.parameters())
        if make_optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        else:
            optimizer = make_optimizer(parameters)
        for step in range(steps):
            loss = torch.zeros(())
            for batch in batches(step):
                loss = loss_of(model(*batch))
                torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    return program


def sessions() -> Iterator[Session]:
    """All sessions that are alive."""
    from teraplan import backend

    yield from backend.sessions()


class MLP(nn.Module):
    """A plain one: its first layer saves the model's own input."""

    def __init__(self, width: int = 64, depth: int = 6, rows: int = 2048) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def batch(self, step: int) -> tuple[Tensor]:
        """Rows of random numbers that depend on the step alone."""
        random = torch.Generator().manual_seed(step)
        return (torch.randn(self.rows, self.width, generator=random),)
