"""From a model written as operations to a whole training step: micro-batches, then AdamW.

Parameters, their gradients, and the optimizer's state are tensors of the trace like activations.
In 32 bits a parameter takes 4 bytes, its gradient 4 and its two moments 8. In 16 bits it takes 2
and its gradient 2, and the optimizer keeps a master copy in 32 bits and the moments, 12: 16 in
all, too.
Parameters change in the update alone, gradients whenever a micro-batch adds to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from teraplan.library.builder import StepBuilder, Tape, Work
from teraplan.library.costs import Roofline
from teraplan.values.step_trace import StepTrace, TensorKind

_ADAM_FLOPS = 12
"""Per parameter: two moments, a root, a division, weight decay."""


@final
class Parameters:
    """Parameters of a model by name, with their gradients; made at first use."""

    def __init__(self, builder: StepBuilder) -> None:
        self._builder = builder
        self._ids: dict[str, int] = {}
        self.gradients: dict[int, int] = {}

    def get(self, name: str, shape: Sequence[int], layer: str) -> int:
        """Id of the parameter `name`."""
        if name not in self._ids:
            made = self._builder.tensor(
                name, TensorKind.PARAMETER, shape, layer=layer, persistent=True
            )
            gradient = f"{name}.grad"
            self._ids[name] = made
            self.gradients[made] = self._builder.tensor(
                gradient, TensorKind.GRADIENT, shape, layer=layer
            )
        return self._ids[name]

    def items(self) -> list[tuple[str, int]]:
        """Name and id of each parameter, in order of first use."""
        return list(self._ids.items())

    @property
    def count(self) -> int:
        """Number of parameters, in elements."""
        return sum(self._builder.numel(i) for i in self._ids.values())


Forward = Callable[[Tape, Parameters], None]
"""Writes down the forward of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of micro-batches."""

    micro_batches: int = 1
    in_flight: int = 1
    """Forwards that run before the first backward; 2 in the first of two pipeline stages."""
    kernels: int = 1
    """Sites that each operation is cut into."""
    clipped: bool = False
    """Whether gradients are scaled by the norm of all of them: no update begins before the last."""


def training_step(
    forward: Forward, costs: Roofline, dtype: str, schedule: Schedule, device: str
) -> StepTrace:
    """The trace of one step: forwards and backwards as scheduled, then one update per parameter."""
    builder = StepBuilder(costs, dtype, schedule.kernels)
    parameters = Parameters(builder)
    waiting: list[Tape] = []
    for call in range(schedule.micro_batches):
        tape = Tape(builder, call, parameters.gradients)
        forward(tape, parameters)
        waiting.append(tape)
        if len(waiting) == schedule.in_flight:
            waiting.pop(0).backward()
    for tape in waiting:
        tape.backward()
    ready = builder.num_sites if schedule.clipped else None
    call = schedule.micro_batches
    for name, parameter in parameters.items():
        _update(builder, name, (parameter, parameters.gradients[parameter]), call, ready)
    return builder.build(device)


def _update(
    builder: StepBuilder, name: str, pair: tuple[int, int], call: int, ready: int | None
) -> None:
    parameter, gradient = pair
    kinds = ["exp_avg", "exp_avg_sq"] + (["master"] if builder.dtype != "float32" else [])
    states = [
        builder.tensor(
            f"{name}.{kind}",
            TensorKind.OPTIMIZER_STATE,
            (builder.numel(parameter),),
            dtype="float32",
            persistent=True,
        )
        for kind in kinds
    ]
    work = Work(flops=_ADAM_FLOPS * builder.numel(parameter), dtype="float32")
    builder.update(call, ((parameter,), (gradient,), states), work, ready=ready)
