"""What an optimizer's update of some parameters uses, and what memory it takes."""

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from teraplan.runtime.process.census import STATES_OF_UNKNOWN, states_to_come
from teraplan.runtime.state.updates.stand_in import parameters_of
from teraplan.runtime.state.updates.taken_gradient import TakenGradient, gone

TEMPORARIES = 2
"""Tensors of a parameter's size that AdamW makes on the way; of others none makes more."""
_MOST_BUCKETS = 64
"""About as many, if no tensor is large. Fewer have less to do with each other: one computes, one
comes in, one goes out."""
_SGD_MAKES_ONE_FOR = ("weight_decay", "nesterov", "maximize")

Optimizer = torch.optim.Optimizer


def tensors_of(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """All that a step uses of `parameters`; none for those that it leaves out.

    Raises:
        GradientGoneError: a gradient has been used up before.
    """
    found: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if isinstance(parameter.grad, TakenGradient):
            raise gone(parameter.grad, "another step")
        found += [parameter, parameter.grad]
        state = optimizer.state.get(parameter, {})
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided]


def missing_bytes(optimizer: Optimizer) -> dict[int, int]:
    """Bytes of the state that the step will make, by identity of the parameter."""
    to_come = states_to_come(optimizer, unknown=STATES_OF_UNKNOWN)
    return {id(p): count * p.nbytes for p, count in to_come if p.grad is not None}


def buckets_of(optimizer: Optimizer, updated: Set[int], *, order_matters: bool) -> list[set[int]]:
    """Identities of the parameters of each bucket, those of the last layers first.

    What the next forward needs first is then used last, and still in memory. A bucket takes as
    much as the largest parameter does: that has to fit in any case, and it is the same in every
    step, whatever memory there is.

    Args:
        optimizer: the user's, or a stand-in with those of its parameters that are to be updated.
        updated: identities of those that have been updated in the backward.
        order_matters: those of the first layers come first.
    """
    parameters = [p for p in parameters_of(optimizer) if id(p) not in updated]
    missing = missing_bytes(optimizer)
    if not order_matters:
        parameters.reverse()
    sizes = [
        sum(t.nbytes for t in tensors_of(optimizer, [p])) + missing.get(id(p), 0)
        for p in parameters
    ]
    limit = max([sum(sizes) // _MOST_BUCKETS, *sizes])
    buckets: list[set[int]] = [set()]
    nbytes = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        if nbytes and nbytes + size > limit:
            buckets.append(set())
            nbytes = 0
        buckets[-1].add(id(parameter))
        nbytes += size
    return buckets


def num_temporaries(optimizer: Optimizer) -> int:
    """Tensors of a parameter's size that the update of one makes on the way, at most."""
    if not _is_plain(optimizer):
        return TEMPORARIES
    return max(map(_of_group, optimizer.param_groups), default=0)


def _is_plain(optimizer: Optimizer) -> bool:
    """True for SGD whose parameters are updated one by one."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    several = any(map(_is_together, optimizer.param_groups))
    return type(optimizer) is torch.optim.SGD and not several and all(p.is_cpu for p in parameters)


def _of_group(group: dict[str, Any]) -> int:
    return min(TEMPORARIES, sum(bool(group.get(option)) for option in _SGD_MAKES_ONE_FOR))


def temporary_bytes(optimizer: Optimizer) -> int:
    """What a step over the parameters in `param_groups` allocates for all of them at once."""
    several = (group["params"] for group in optimizer.param_groups if _is_together(group))
    nbytes: int = TEMPORARIES * sum(p.nbytes for parameters in several for p in parameters)
    return nbytes


def _is_together(group: dict[str, Any]) -> bool:
    """True if one kernel updates many parameters: asked for, or PyTorch's own choice on a GPU."""
    asked = group.get("foreach")
    if asked is not None or "foreach" not in group or group.get("fused"):
        return bool(asked)
    differentiable = bool(group.get("differentiable"))
    _, together = _default_to_fused_or_foreach(group["params"], differentiable, use_fused=False)
    return together
