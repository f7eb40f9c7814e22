"""What stands for a gradient that an update in the backward has used up: it has no memory.

p.grad is None       False, until `zero_grad`
p.grad.shape, print  work
anything else        GradientGoneError
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch

from teraplan.errors import GradientGoneError
from teraplan.runtime.process.names import described

_REMEDY = (
    'set update to "step" to read, clip, scale or add to gradients; under "gradient" call '
    "zero_grad() after each step"
)
_PASSED_ON = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Autograd calls these on what it takes over as a parameter's gradient."""


class TakenGradient(torch.Tensor):
    """As `like`, without values."""

    @staticmethod
    def __new__(cls: "type[TakenGradient]", like: torch.Tensor) -> "TakenGradient":
        """As `like`, a parameter, or as another such gradient of one."""
        made: TakenGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.parameter = like.parameter if isinstance(like, cls) else weakref.ref(like)
        return made

    parameter: "weakref.ref[torch.Tensor]"
    """Whose gradient it was."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Refuse whatever is to be done with it."""
        taken = next(a for a in _flat((*args, *(kwargs or {}).values())) if isinstance(a, cls))
        if func in _PASSED_ON:
            return cls(taken)
        raise gone(taken, func.overloadpacket.__name__)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """What it is."""
        return f"TakenGradient({'x'.join(map(str, self.shape))}, used up by its parameter's update)"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise gone(self, "reading its memory")

    # These do not go through `__torch_dispatch__`.
    data_ptr = numpy = tolist = item = _refuse
    __array__ = __dlpack__ = __reduce_ex__ = _refuse


def gone(taken: TakenGradient, what: str) -> GradientGoneError:
    """The error of using a gradient that has been used up."""
    parameter = taken.parameter()
    whose = described(taken if parameter is None else parameter)
    return GradientGoneError(
        f"the gradient of a parameter ({whose}) is needed ({what}), and was used up in the "
        'backward: update is "gradient", and the parameter was updated with it as it was; '
        f"{_REMEDY}. If it was to be changed before the update, load a checkpoint"
    )


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
