"""Runs generated code with tensors that have no memory, to see what it would take.

    buf0 = empty_strided_cpu((8, 64), ...)            a tensor that is counted
    cpp_fused_gelu_0(primals_1, buf0)                 a kernel: nothing happens
    buf1 = extern_kernels.mm(buf0, ...)               PyTorch says what comes out of it
    buf2 = teraplan_ops.save(buf0, ...); del buf0     noted; `buf0` counts no more

So all that Inductor has decided is in the count: what it fuses, what it writes in place, when it
makes and drops each tensor. What PyTorch's own kernels take while they run is not, but for what
depthwise convolutions copy.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._inductor.select_algorithm import extern_kernels
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from teraplan import ops
from teraplan.runtime.compiled.generated_code import GeneratedCode, SharedMemory, TensorInput
from teraplan.runtime.compiled.ledger import Account, Ledger

_aten = torch.ops.aten
_MOST_VALUES = 1000
"""So many values of tensors a graph may ask for: a loop might ask for ever."""
_SAVES_RANDOM_STATE = torch.ops.higher_order.run_and_save_rng_state
_RUNS_WITH_RANDOM_STATE = torch.ops.higher_order.run_with_rng_state
_RANDOM_STATE_BYTES = 5056
"""Of a CPU; a GPU's are fewer."""
_DILATION, _GROUPS = 6, 9
"""Among the arguments of a convolution's backward."""
_DIMS_OF_IMAGES = 4
_THERE = ("primals", "arg", "token_")
"""So begin the names of what a forward is given, and of tokens."""
_OF_VALUES = (_aten.nonzero.default, _aten.masked_select.default, _aten.repeat_interleave.Tensor)
"""What comes out of these is as large as values say."""
_HARMLESS = (ModuleType, type, int, float, str, torch.Tensor, type(None), torch._ops._OpNamespace)
"""Kinds of what a module's names stand for; tensors are constants of the graph."""


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """Which memory a saved activation is (a part of)."""

    number: int
    """Those of equal number share it."""
    nbytes: int
    given: bool
    """The graph has not made it: it is there in any case."""


def rehearse(
    code: GeneratedCode,
    sizes: Mapping[str, int],
    *,
    saved: Mapping[int, SavedMemory] | None = None,
    state_moves: bool = False,
    value: int = 1,
) -> "Rehearsal":
    """Run the code where sizes are so.

    Args:
        code: of a forward or a backward.
        sizes: by the names that they have there.
        saved: of a backward, the memory that each slot is (a part of), as its forward's run has it.
        state_moves: large gradients leave the graph's memory once they are complete.
        value: what the graph gets when it asks for one of a tensor, such as which branch to take.

    Raises:
        LookupError: the code is none that is known here.
        Exception: any, where PyTorch cannot tell what comes out of an operation.
    """
    fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with _disable_current_modes(), torch.no_grad(), fake:
        rehearsal = Rehearsal(dict(saved or {}), state_moves=state_moves, value=value)
        with rehearsal:
            function = FunctionType(code.call.__code__, rehearsal.names_of(code.module))
            inputs = [rehearsal.given(name, value) for name, value in code.values(sizes).items()]
            function(*[None] * (function.__code__.co_argcount - 1), inputs)
    return rehearsal


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One run: whatever PyTorch makes within it is counted."""

    supports_higher_order_operators = True

    def __init__(self, saved: dict[int, SavedMemory], *, state_moves: bool, value: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.saved = saved
        """The memory that each slot is (a part of): of a forward, as far as it has run."""
        self.state_moves = state_moves
        self.asks_for_truth = False
        """It has asked for a value that is true or false."""
        self._value = value
        self._account: Account | None = None
        self._shared: dict[SharedMemory, Account] = {}
        self._num_values = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is _aten._local_scalar_dense.default:
            return self._value_of(args[0])
        result: Any
        if isinstance(func, torch._ops.HigherOrderOperator):
            result = _with_random_state(func, args, kwargs or {})
        else:
            result = _of_one(func, args) if func in _OF_VALUES else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.ledger.take(tensor, self._account)
        if func is _aten.convolution_backward.default:
            self.ledger.note(_copied_nbytes(args))
        return result

    def make(self, account: Account | None, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """`torch.empty_strided` of memory with this account."""
        self._account = account
        try:
            return torch.empty_strided(*args, **kwargs)
        finally:
            self._account = None

    def given(self, name: str, value: TensorInput | int | None) -> torch.Tensor | int | None:
        """An input. What the forward is given is there anyway, and tokens take nothing.

        All others count: gradients of results, and saved activations that have no ops.
        """
        if not isinstance(value, TensorInput):
            return value
        account = None
        if name.startswith(_THERE):
            account = Account(0)
        elif value.shared is not None:
            account = self._shared.setdefault(value.shared, Account(value.shared.nbytes))
        layout = {"dtype": value.dtype, "device": value.device}
        return self.make(account, value.size, value.stride, **layout)

    def names_of(self, module: ModuleType) -> dict[str, Any]:
        """What the module's names stand for within the run."""
        names: dict[str, Any] = {}
        for name, value in vars(module).items():
            if name == "__builtins__":
                names[name] = value
            elif isinstance(value, FunctionType) and value.__globals__ is vars(module):
                names[name] = FunctionType(value.__code__, names)
            elif value is ops.direct:
                names[name] = _Ops(self)
            elif name == "reinterpret_tensor":
                names[name] = _reinterpreted
            elif name.startswith("empty_strided_"):
                names[name] = _empty_on(name.removeprefix("empty_strided_"))
            elif isinstance(value, _HARMLESS) or _is_of_torch(value) or value is extern_kernels:
                names[name] = value
            else:
                names[name] = _Kernel()
        return names

    def _value_of(self, tensor: torch.Tensor) -> float:
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            raise LookupError("the graph asks for one value after the other")
        self.asks_for_truth |= tensor.dtype is torch.bool
        return float(self._value) if tensor.dtype.is_floating_point else self._value


class _Kernel:
    """In the place of a kernel: it writes into what it is given, which is there already."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None

    def __getattr__(self, name: str) -> "_Kernel":
        return self


class _Ops:
    """In the place of the migration ops."""

    def __init__(self, run: Rehearsal) -> None:
        self._run = run
        self._saved: dict[Account, int] = {}
        self._needed: dict[int, Account] = {}
        """By number of the memory."""
        self._slots_left: Counter[int] = Counter()
        """Of each memory, those that are needed, or will be."""

    def enter(self, anchor: torch.Tensor, *_: object) -> torch.Tensor:
        return anchor.new_empty(0, dtype=torch.uint8)

    enter_state = enter

    def enter_backward(self, anchor: torch.Tensor, *_: object) -> torch.Tensor:
        for saved in self._run.saved.values():
            self._slots_left[saved.number] += 1
            if saved.number not in self._needed:
                account = Account(saved.nbytes, can_leave=True, is_kept=saved.given)
                self._needed[saved.number] = account
                if not saved.given:
                    self._run.ledger.expect(account)
        return self.enter(anchor)

    def save(self, x: torch.Tensor, chain: object, slot: int, *_: object) -> torch.Tensor:
        account = self._run.ledger.account_of(x)
        account.is_kept = True
        number = self._saved.setdefault(account, len(self._saved))
        nbytes = x.untyped_storage().nbytes()
        self._run.saved[slot] = SavedMemory(number, nbytes, given=account.nbytes < nbytes)
        return torch.empty(1, dtype=torch.int64, device="cpu")

    def need(
        self,
        chain: torch.Tensor,
        token: object,
        slot: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        account = self._needed[self._run.saved[slot].number]
        return self._run.make(account, size, stride, dtype=dtype, device=chain.device)

    def settle(self, gradient: torch.Tensor, *_: object) -> torch.Tensor:
        if not self._run.state_moves:
            return gradient
        layout = {"dtype": gradient.dtype, "device": gradient.device}
        return self._run.make(Account(0), gradient.shape, gradient.stride(), **layout)

    def done(self, x: object, token: object, chain: object, slot: int) -> None:
        saved = self._run.saved[slot]
        self._slots_left[saved.number] -= 1
        if not saved.given and not self._slots_left[saved.number]:
            self._needed[saved.number].is_kept = False

    def acquire(self, *_: object) -> None:
        return None

    release = acquire


def _reinterpreted(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return tensor.as_strided(size, stride, int(tensor.storage_offset()) + offset)


def _empty_on(device: str) -> Callable[..., torch.Tensor]:
    """As Inductor's: "cpu", or "cpu_pinned"."""

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device.split("_")[0])

    return empty


def _is_of_torch(value: object) -> bool:
    """A function in Python: kernels are none."""
    return isinstance(value, FunctionType) and value.__module__.split(".")[0] == "torch"


def _with_random_state(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """What a checkpoint makes of an operation that may draw random numbers: here it draws none."""
    if func is _SAVES_RANDOM_STATE:
        op, *rest = args
        state = torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8, device="cpu")
        return state, op(*rest, **kwargs)
    if func is _RUNS_WITH_RANDOM_STATE:
        _, op, *rest = args
        return op(*rest, **kwargs)
    raise LookupError(f"{func} is none that is known here")


def _of_one(func: object, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result of one of `_OF_VALUES`, for one value."""
    given = args[0]
    size = (1, given.dim()) if func is _aten.nonzero.default else (1,)
    dtype = given.dtype if func is _aten.masked_select.default else torch.int64
    return torch.empty(size, dtype=dtype, device=given.device)


def _copied_nbytes(args: Sequence[Any]) -> int:
    """What the backward of a depthwise convolution copies on a CPU.

    What it reads Inductor has copied to another layout before, from which the call copies again,
    what the forward has read twice but for dilated ones; in one dimension and in three that is
    copied once (measured with torch 2.13).
    """
    gradient, read, weight = args[:3]
    if args[_GROUPS] == 1 or weight.device.type != "cpu" or int(weight.shape[1]) != 1:
        return 0
    if read.dim() != _DIMS_OF_IMAGES:
        return int(read.nbytes)
    is_dilated = any(step > 1 for step in args[_DILATION])
    return int(gradient.nbytes + (1 if is_dilated else 3) * read.nbytes)
