"""Runs `optimizer.step()` in buckets: some parameters at a time, with all that belongs to them.

    hooks of the user | bucket n-1 | ... | bucket 1 | the optimizer's own call: bucket 0 | hooks

Each bucket is the optimizer's own step with `param_groups` narrowed to the bucket's parameters, so
the arithmetic is its own. The last bucket is left to the call that the user has made. This is exact
for every optimizer that updates each parameter by itself.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer

from teraplan.errors import UnsupportedError
from teraplan.runtime.state.training_state import TrainingState

_NOT_PER_PARAMETER = ("LBFGS",)
_BUCKET_SHARE = 3
"""Buckets take at most this part of the limit: one computes, one comes in, one goes out."""

Optimizer = torch.optim.Optimizer
Groups = list[list[torch.Tensor]]


class OptimizerSteps:
    """The steps of all optimizers that update parameters of one training state."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._handles: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._whole: tuple[Optimizer, Groups, ExitStack] | None = None
        hook = _calling(weakref.ref(self), "_before_hooks")
        self._hook = torch_optimizer.register_optimizer_step_pre_hook(hook)

    def close(self) -> None:
        """Leave all optimizers alone from now on."""
        self._restore()
        self._hook.remove()
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    # -- hooks -----------------------------------------------------------------------------------

    def _before_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Let ours be the last hook before and the first after, if the optimizer updates ours."""
        if _is_nested(optimizer):
            return
        self._restore()
        if not any(self._is_ours(p) for p in _parameters(optimizer)):
            return
        if optimizer not in self._handles:
            before, after = (_calling(weakref.ref(self), name) for name in ("_before", "_after"))
            self._handles[optimizer] = (
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            )
        before_handle, after_handle = self._handles[optimizer]
        _ordered(optimizer._optimizer_step_pre_hooks).move_to_end(before_handle.id)
        _ordered(optimizer._optimizer_step_post_hooks).move_to_end(after_handle.id, last=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Run all buckets but one, and leave that one in `param_groups`."""
        if _is_nested(optimizer):
            return None
        name = type(optimizer).__name__
        if name in _NOT_PER_PARAMETER:
            raise UnsupportedError(
                f"{name} updates all parameters together, which is not possible where the "
                'training state moves; use another optimizer, or set training_state to "stays"'
            )
        self._state.arena.user_may_have_run()
        args, kwargs = _called_once(args, kwargs)
        buckets = self._buckets(optimizer)
        whole: Groups = [group["params"] for group in optimizer.param_groups]
        self._whole = (optimizer, whole, ExitStack())
        try:
            self._run(optimizer, whole, buckets[:-1], args[1:], kwargs)
            self._narrow(optimizer, whole, buckets[-1])
        except BaseException:
            self._restore()
            raise
        return args, kwargs

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if not _is_nested(optimizer):
            self._restore()

    def _restore(self) -> None:
        """The bucket in `param_groups` is done: make them whole."""
        if self._whole is None:
            return
        optimizer, whole, using = self._whole
        self._whole = None
        self._state.stepped()
        using.close()
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            if group["params"] is not parameters:
                self._adopt(optimizer, group["params"])
            group["params"] = parameters

    # -- buckets ---------------------------------------------------------------------------------

    def _run(
        self,
        optimizer: Optimizer,
        whole: Groups,
        buckets: Sequence[set[int]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        before = _settings(optimizer)
        first: list[dict[str, object]] | None = None
        for bucket in buckets:
            _set_again(optimizer, before)
            self._narrow(optimizer, whole, bucket)
            step(optimizer, *args, **kwargs)
            self._widen(optimizer)
            after = _settings(optimizer)
            if first is not None and not _equal(first, after):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} does not update each parameter by itself: what it "
                    'keeps in param_groups depends on all of them; set training_state to "stays"'
                )
            first = after
        _set_again(optimizer, before)

    def _narrow(self, optimizer: Optimizer, whole: Groups, bucket: set[int]) -> None:
        assert self._whole is not None
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [p for p in parameters if id(p) in bucket]
        tensors = _tensors(optimizer, _parameters(optimizer))
        self._whole[2].enter_context(self._state.using(tensors, writes=True))

    def _widen(self, optimizer: Optimizer) -> None:
        assert self._whole is not None
        self._whole[2].close()
        for group in optimizer.param_groups:
            self._adopt(optimizer, group["params"])

    def _adopt(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if self._is_ours(parameter) and parameter in optimizer.state:
                self._state.adopt_state(optimizer.state[parameter])

    def _buckets(self, optimizer: Optimizer) -> list[set[int]]:
        """Identities of the parameters of each bucket, those of the last layers first.

        What the next forward needs first is then used last, and still in memory. But where state
        is made for the first time, it is made in the order in which a plain step makes it.
        """
        parameters = list(_parameters(optimizer))
        if all(parameter in optimizer.state for parameter in parameters):
            parameters.reverse()
        limit = self._state.arena.limit_bytes // _BUCKET_SHARE
        buckets: list[set[int]] = [set()]
        nbytes = 0
        for parameter in parameters:
            size = sum(t.nbytes for t in _tensors(optimizer, [parameter]))
            if nbytes + size > limit and buckets[-1]:
                buckets.append(set())
                nbytes = 0
            buckets[-1].add(id(parameter))
            nbytes += size
        return buckets

    def _is_ours(self, parameter: torch.Tensor) -> bool:
        return (
            parameter.layout == torch.strided and self._state.arena.block_of(parameter) is not None
        )


def _ordered(hooks: object) -> "OrderedDict[int, Any]":
    assert isinstance(hooks, OrderedDict), "torch keeps hooks in the order of their registration"
    return hooks


def _is_nested(optimizer: Optimizer) -> bool:
    """True within a step that a step of the same optimizer has called: of a base class, or ours."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_WITH_HOOKS and frame.f_locals.get("self") is optimizer:
            depth += 1
        frame = frame.f_back
    return depth > 1


_STEP_WITH_HOOKS = next(
    constant
    for constant in Optimizer.profile_hook_step.__code__.co_consts
    if isinstance(constant, CodeType)
)
"""Code of the function that torch puts around every optimizer's `step`."""


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """All that a step uses of `parameters`; none for those that it leaves out."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        found += [parameter, parameter.grad]
        state = optimizer.state.get(parameter, {})
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided]


def _settings(optimizer: Optimizer) -> list[dict[str, object]]:
    """What `param_groups` hold beside the parameters, tensors copied."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _set_again(optimizer: Optimizer, settings: list[dict[str, object]]) -> None:
    """Put `settings` back, tensors in place."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for name, value in values.items():
            current = group.get(name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                if not torch.equal(current, value):
                    current.copy_(value)
            else:
                group[name] = value


def _equal(first: list[dict[str, object]], second: list[dict[str, object]]) -> bool:
    for a, b in zip(first, second, strict=True):
        if a.keys() != b.keys():
            return False
        for name, value in a.items():
            other = b[name]
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
                if not torch.equal(value, other):
                    return False
            elif value != other:
                return False
    return True


def _called_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The step's arguments (the optimizer first) with the closure called, and its result kept."""
    kwargs = dict(kwargs)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def again() -> object:
        return loss

    if "closure" in kwargs:
        kwargs["closure"] = again
        return args, kwargs
    return (*args[:1], again, *args[2:]), kwargs


def _calling(owner: "weakref.ref[OptimizerSteps]", method: str) -> Callable[..., Any]:
    """A hook that keeps its owner alive no longer than others do."""

    def hook(*args: Any) -> Any:  # noqa: ANN401
        alive = owner()
        return getattr(alive, method)(*args) if alive is not None else None

    return hook
