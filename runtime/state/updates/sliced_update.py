"""Updates slice by slice: what an optimizer makes on the way stays small, and in the cache.

    theirs  params [p            ]  state {p:  {step, exp_avg                  }}
    cut     params [p0 | p1 | p2 ]  state {p0: {step', part of exp_avg}, p1: ...}

AdamW makes two tensors of a parameter's size and goes some ten times over all of it. In slices all
of that stays in the cache of the cores, and on the heap, where the next slice finds it again:
larger tensors are mappings of their own (`malloc`), whose pages are touched, zeroed and given back
each time. The arithmetic is the optimizer's own.

Done with optimizers of torch that treat each element by itself, where they go through parameters
one by one (neither `foreach` nor `fused`); each way of using one is first tried on copies, bit for
bit.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from teraplan.runtime.state.memory.movable import is_dense
from teraplan.runtime.state.updates.stand_in import stand_in, take_values_over
from teraplan.runtime.state.updates.update_needs import missing_bytes
from teraplan.runtime.state.updates.update_trial import plain_step
from teraplan.units import KIB

Optimizer = torch.optim.Optimizer
State = dict[str, Any]

SLICE_BYTES = 120 * KIB
"""Of a slice, for each thread that computes: two threads' slice still comes from the heap, and has
work for both (torch gives a thread 32,768 elements at least)."""
_TRIED = 1_021
"""Elements of a slice in a trial, which is to take no memory to speak of. No vector divides it: so
most elements that a loop over a slice leaves to its end are not at the end of the whole."""
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_NOT_ONE_BY_ONE = ("foreach", "fused", "capturable", "differentiable")

_exact: dict[tuple[object, ...], bool] = {}
"""Whether slices have given the same bits, by way of using an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An optimizer with slices in the places of its parameters."""

    optimizer: Optimizer
    """What is to be stepped instead."""
    whole: Optimizer
    last: dict[torch.Tensor, torch.Tensor]
    """Last slices, by parameter: numbers in the state of one are those of its parameter."""
    uncut: Sequence[torch.Tensor]
    """Parameters that are stepped as they are; the step may make their state."""

    def join(self) -> None:
        """After the step: let the whole one have all that it has changed."""
        state, of_slices = self.whole.state, self.optimizer.state
        take_values_over(self.whole, self.optimizer)
        for parameter in self.uncut:
            if parameter in of_slices:
                state[parameter] = of_slices[parameter]
            else:
                state.pop(parameter, None)
        for parameter, piece in self.last.items():
            for name, value in of_slices[piece].items():
                own = state[parameter][name]
                if not isinstance(own, torch.Tensor):
                    state[parameter][name] = value
                elif own.numel() == 1:
                    own.copy_(value)

    def drop(self) -> None:
        """Let go of the slices, views all: PyTorch has the optimizer until its step returns."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.last.clear()


def step_in_slices(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """The plain step of a stand-in, in slices where that can be."""
    cut = cut_up(optimizer, args, kwargs)
    stepped = optimizer if cut is None else cut.optimizer
    plain_step(stepped)(stepped, *args, **kwargs)
    if cut is not None:
        cut.join()


def cut_up(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> Cut | None:
    """The optimizer, a stand-in, cut into slices; None if there is nothing to be cut.

    Args:
        optimizer: with the parameters of a bucket.
        args: of its step.
        kwargs: of its step.
    """
    if type(optimizer) not in _ELEMENTWISE or hasattr(optimizer, "grad_scale"):
        return None
    missing = missing_bytes(optimizer)
    made, last = _empty(optimizer), dict[torch.Tensor, torch.Tensor]()
    uncut: list[torch.Tensor] = []
    for group, theirs in zip(made.param_groups, optimizer.param_groups, strict=True):
        for p in theirs["params"]:
            may_be = not missing.get(id(p)) and _may_be_cut(p, optimizer.state.get(p, {}), theirs)
            if not (may_be and _is_exact(optimizer, theirs, p, args, kwargs)):
                group["params"].append(p)
                uncut.append(p)
                if p in optimizer.state:
                    made.state[p] = optimizer.state[p]
                continue
            _put_slices(made, group, p, optimizer.state.get(p, {}), _num_elements(p))
            last[p] = group["params"][-1]
    return Cut(optimizer=made, whole=optimizer, last=last, uncut=uncut) if last else None


def _empty(optimizer: Optimizer) -> Optimizer:
    made = stand_in(optimizer, frozenset())
    made.state = defaultdict(dict)
    return made


def _num_elements(p: torch.Tensor) -> int:
    """Of a slice."""
    return SLICE_BYTES * torch.get_num_threads() // p.element_size()


def _may_be_cut(p: torch.Tensor, state: State, group: dict[str, Any]) -> bool:
    gradient = p.grad
    if gradient is None or p.numel() <= _num_elements(p) or not p.is_cpu:
        return False
    if any(group.get(name) for name in _NOT_ONE_BY_ONE):
        return False
    if not all(isinstance(value, (torch.Tensor, int, float)) for value in state.values()):
        return False
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    parts = [value for value in tensors if value.numel() != 1]
    return all(
        is_dense(t) and (t.shape, t.stride(), t.dtype) == (p.shape, p.stride(), p.dtype)
        for t in (p, gradient, *parts)
    )


def _put_slices(
    made: Optimizer, group: dict[str, Any], p: torch.Tensor, state: State, num: int
) -> None:
    assert p.grad is not None
    pieces, gradients = _slices(p, num), _slices(p.grad, num)
    parts = {
        name: _slices(value, num)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() != 1
    }
    for number, (piece, gradient) in enumerate(zip(pieces, gradients, strict=True)):
        piece.grad = gradient
        group["params"].append(piece)
        for name, value in state.items():
            if name in parts:
                made.state[piece][name] = parts[name][number]
            else:
                made.state[piece][name] = (
                    value.clone() if isinstance(value, torch.Tensor) else value
                )


def _slices(tensor: torch.Tensor, num: int) -> list[torch.Tensor]:
    flat, numel = _flat(tensor), tensor.numel()
    return [flat.narrow(0, i, min(num, numel - i)) for i in range(0, numel, num)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


# -- trials ------------------------------------------------------------------------------------


def _is_exact(
    optimizer: Optimizer,
    group: dict[str, Any],
    p: torch.Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> bool:
    """True if slices of the first elements of `p` become what these become as a whole."""
    values = ((name, v) for name, v in group.items() if name != "params")
    used = tuple((name, _is_on(v)) for name, v in values)
    key = (type(optimizer), p.dtype, used)
    if key not in _exact:
        num = min(p.numel(), 4 * _TRIED)
        number = next(i for i, g in enumerate(optimizer.param_groups) if g is group)
        plain, sliced = (_trial(optimizer, number, p, num) for _ in range(2))
        cut = _empty(sliced)
        (whole,) = sliced.param_groups[number]["params"]
        _put_slices(cut, cut.param_groups[number], whole, sliced.state[whole], _TRIED)
        before = [dict(cut.state[piece]) for piece in cut.param_groups[number]["params"]]
        for made in (plain, cut):
            plain_step(made)(made, *args, **kwargs)
        after = [cut.state[piece] for piece in cut.param_groups[number]["params"]]
        _exact[key] = all(map(_kept, before, after)) and _equal(plain, cut)
    return _exact[key]


def _is_on(value: object) -> bool:
    """Whether something in a group counts; what is neither number nor text always does."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return bool(value)
    return bool(value) if isinstance(value, (int, float, str, type(None))) else True


def _trial(optimizer: Optimizer, number: int, p: torch.Tensor, num: int) -> Optimizer:
    """A stand-in with a copy of the first elements of `p` alone, and of their state."""
    assert p.grad is not None
    made = _empty(optimizer)
    twin = _flat(p)[:num].clone()
    twin.grad = _flat(p.grad)[:num].clone()
    made.param_groups[number]["params"] = [twin]
    for name, value in optimizer.state.get(p, {}).items():
        copied = value
        if isinstance(value, torch.Tensor):
            copied = value.clone() if value.numel() == 1 else _flat(value)[:num].clone()
        made.state[twin][name] = copied
    return made


def _kept(before: State, after: State) -> bool:
    """True if the same tensors are there, so that what they have become is where it belongs."""
    return before.keys() == after.keys() and all(
        after[name] is value for name, value in before.items() if isinstance(value, torch.Tensor)
    )


def _equal(plain: Optimizer, cut: Optimizer) -> bool:
    """True if the parameters and states of both have the same bits."""
    return all(map(torch.equal, _bits(plain), _bits(cut)))


def _bits(made: Optimizer) -> Iterator[torch.Tensor]:
    """Of the parameters, then of each entry of their states, slices joined; of numbers the least
    and the largest."""
    pieces = [p for group in made.param_groups for p in group["params"]]
    yield torch.cat(pieces).view(torch.uint8)
    for name, value in made.state[pieces[0]].items():
        values = [made.state[piece][name] for piece in pieces]
        if not isinstance(value, torch.Tensor):
            yield torch.tensor([min(values), max(values)], device="cpu")
        elif value.numel() == 1:
            yield torch.stack([torch.stack(values).amin(), torch.stack(values).amax()])
        else:
            yield torch.cat(values).view(torch.uint8)
