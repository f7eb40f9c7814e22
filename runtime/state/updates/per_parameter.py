"""Tries on copies whether an optimizer updates each parameter by itself, which buckets rely on.

    a alone             -> a'
    c, b and a together -> a' again?     the others' gradients are huge, tiny, or not finite: a
                                         norm, a minimum or a check of all would show

Those of torch do, but for LBFGS. Others may clip by a norm of all gradients within their step, or
go by a parameter's place among the others; nothing in them says so.
"""

import random as py_random
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch

from teraplan.errors import UnsupportedError
from teraplan.runtime.state.updates.host_state import SHARES_MEMORY, shares_memory
from teraplan.runtime.state.updates.stand_in import equal, is_of_torch, parameters_of
from teraplan.runtime.state.updates.update_trial import (
    LOUD,
    NOT_FINITE,
    QUIET,
    ClosureTwiceError,
    OutOfReachError,
    UpdateTrial,
)

Optimizer = torch.optim.Optimizer

KEPT_FOR_ALL = (
    "what it keeps in param_groups, in attributes of its own or in state under a name depends on "
    "all of them"
)
_ENDS = (OutOfReachError, ClosureTwiceError)
_OF_EACH_SORT = 2
"""Parameters of each number of dimensions: a norm may be over matrices alone."""


def why_not_by_itself(
    optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any], *, remedy: str
) -> str:
    """Why its update of one parameter depends on others, "" if it does not.

    "" without a trial for optimizers of torch. Takes the memory of a few small parameters.

    Raises:
        UnsupportedError: the step fails where others of its parameters are missing; it says what
            `remedy` says.
    """
    if is_of_torch(optimizer):
        return ""
    few, many = _to_try(optimizer)
    random, others_random = torch.get_rng_state(), _other_random_states()
    try:
        try:
            cut = frozenset(map(id, many)) - frozenset(map(id, few))
            return _why_not_any(optimizer, many, cut, args, kwargs)
        except _ENDS:
            raise
        except Exception:  # noqa: BLE001  one that needs whole matrices, perhaps
            torch.set_rng_state(random)
            return _why_not_any(optimizer, few, frozenset(), args, kwargs)
    except OutOfReachError:
        return (
            "it uses parameters, or changes tensors in containers of its own, that belong to none "
            "of those in its param_groups, which are a bucket's alone"
        )
    except ClosureTwiceError:
        return "it calls its closure more than once, which updates all parameters in between"
    except Exception as error:
        said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        raise UnsupportedError(
            f"the step of {type(optimizer).__name__} fails for one or two of its parameters alone "
            f"({said}), so it cannot run in parts; {remedy}"
        ) from error
    finally:
        torch.set_rng_state(random)
        python, numbers = others_random
        py_random.setstate(python)
        np.random.set_state(numbers)


def can_be_told(optimizer: Optimizer) -> bool:
    """False if a trial may have missed something: too few of several parameters had gradients."""
    parameters = list(parameters_of(optimizer))
    return sum(map(_can_be_tried, parameters)) >= min(2, len(parameters))


def _other_random_states() -> tuple[Any, Any]:
    return py_random.getstate(), np.random.get_state()


def not_by_itself(optimizer: Optimizer, why: str, remedy: str) -> UnsupportedError:
    """What is raised where an optimizer cannot run in parts."""
    name = type(optimizer).__name__
    return UnsupportedError(f"{name} does not update each parameter by itself: {why}; {remedy}")


def why_not_elsewhere(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Why copies of parameters, with copies of their state, do not become what they would.

    "" if they do, and without a look for optimizers of torch. Tried on copies of small parameters.
    """
    if is_of_torch(optimizer):
        return ""
    shares = any(shares_memory(s, p) for p, s in optimizer.state.items() if _is_of_one(p, s))
    random = torch.get_rng_state()
    try:
        for group in optimizer.param_groups:
            for p in sorted(filter(_can_be_tried, group["params"]), key=lambda p: p.nbytes)[:1]:
                trial = UpdateTrial(optimizer, [p], p)
                trial.run(args, kwargs)
                shares = shares or trial.state_shares_memory
        if not torch.equal(random, torch.get_rng_state()):
            return "draws random numbers, which the host would draw in another order"
    finally:
        torch.set_rng_state(random)
    return SHARES_MEMORY if shares else ""


def _is_of_one(key: object, state: object) -> bool:
    return isinstance(key, torch.Tensor) and isinstance(state, dict)


def _why_not_any(
    optimizer: Optimizer,
    tried: Sequence[torch.Tensor],
    cut: Set[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> str:
    """The first reason that one of these gives."""
    random, others_random = torch.get_rng_state(), repr(_other_random_states())
    for a in tried:
        alone = UpdateTrial(optimizer, [a], a, cut=cut)
        alone.run(args, kwargs)
        draws = not torch.equal(random, torch.get_rng_state())
        torch.set_rng_state(random)
        if alone.fills:
            return f"what it keeps in its attribute {alone.fills!r} belongs to all of them"
        others = [p for p in tried if p is not a]
        # Random numbers are drawn in the order of the parameters: a has to stay the first.
        order = [a, *others] if draws else [*others, a]
        for largest in (LOUD, QUIET, NOT_FINITE) if others else ():
            beside = UpdateTrial(optimizer, order, a, others=largest, cut=cut)
            beside.run(args, kwargs)
            torch.set_rng_state(random)
            if alone.target_bytes != beside.target_bytes:
                return "with others beside it, the same one with the same gradient becomes another"
            if not equal(alone.values, beside.values):
                return KEPT_FOR_ALL
    if repr(_other_random_states()) != others_random:
        return "it draws random numbers of Python's or NumPy's, in the order of all parameters"
    return ""


def _to_try(optimizer: Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The smallest two parameters; they, and corners of two of each other number of dimensions."""
    found = sorted(filter(_can_be_tried, parameters_of(optimizer)), key=lambda p: p.nbytes)
    few = found[:_OF_EACH_SORT]
    by_sort: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for p in found:
        if len(by_sort[p.ndim]) < _OF_EACH_SORT:
            by_sort[p.ndim].append(p)
    several = [p for of_sort in by_sort.values() for p in of_sort]
    beside = [p for p in several if not any(p is one for one in few)]
    return few, [*few, *(p for p in beside if _has_corners(optimizer, p))]


def _has_corners(optimizer: Optimizer, p: torch.Tensor) -> bool:
    """True if each tensor of its state is a number, or has its shape."""
    values = optimizer.state.get(p, {}).values()
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return all(t.numel() == 1 or t.shape == p.shape for t in tensors)


def _can_be_tried(p: torch.Tensor) -> bool:
    dense = p.grad is not None and p.grad.layout == p.layout == torch.strided
    return dense and p.numel() > 0
