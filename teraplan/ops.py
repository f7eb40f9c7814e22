"""The migration ops: schemas and fake kernels. `runtime/session/dispatch.py` binds what they do.

Every compiled forward and its backward carry them at each saved activation:

    forward                                     backward
    chain = enter(anchor, table, sizes)         chain = enter_backward(anchor, token_0, key)
    x     = gelu(...)                           x     = need(chain, token, 3, size, stride, dtype)
    ...                                         dx    = gelu_backward(dy, x)
    token = save(x, chain, 3, [])               done(x, token, chain, 3)

The forward returns `token` (8 bytes) in the place of `x`; autograd saves it, the backward turns it
back into the tensor. `slot` numbers the saved activations of one graph. `table` describes the graph
(see `graph_table`), so that a graph which comes from a compile cache explains itself, and `key` is
that of the table; `sizes` are those of the call, of what varies from call to call. All ops of a
graph mutate `chain`, an empty tensor: this keeps them in the order in which they were inserted,
through every pass of Inductor. It is where the graph computes: what lies elsewhere gets no ops.
That `save` and `done` come after every use of `x`, and that no kernel writes its result in the
place of `x` before, is seen to when they are compiled (`passes/lowering.py`).
Where `x` can be computed again (see `passes/recipes.py`), the last argument of `save` is what that
takes beside other saved activations: parameters and small tensors.

Before Inductor's kernels `save` is given `realize(x)`, which is `x` and lets it have memory from
where it is computed on, as what a graph returns has it. Else each kernel that reads `x` would
compute it anew, and `save` once more.

For parameters and gradients, which may move, too, both graphs have these besides:

    acquire(p, chain)                           dw    = mm(...)
    y     = x @ p                               dw_1  = settle(dw, chain)
    release(p, chain)                           return dw_1

`acquire` and `release` say that they mutate `p`, so that no use of it is outside of them; where the
graph itself does, `acquire` has `changes`. `settle` returns the gradient in memory that can move,
or the gradient itself where it stays; where parameters may be updated at their gradients, it is
given the parameter, too, of which the graph has had the last use. Where nothing is saved that could
move, `enter_state` makes the chain.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("teraplan", "DEF")  # type: ignore[no-untyped-call]

# The strides in the graph are binding for every op here. Inductor heeds that only for ops that
# Dynamo has met; for `save`, `passes/layouts.py` says what does it. A graph of CUDA calls that is
# captured once and replayed would leave them out.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)

LIBRARY.define("enter(Tensor anchor, str table, SymInt[] sizes) -> Tensor", tags=_TAGS)
LIBRARY.define("enter_backward(Tensor anchor, Tensor token, str key) -> Tensor", tags=_TAGS)
LIBRARY.define("save(Tensor x, Tensor(a!) chain, int slot, Tensor[] beside) -> Tensor", tags=_TAGS)
LIBRARY.define(
    "need(Tensor(a!) chain, Tensor token, int slot, SymInt[] size, SymInt[] stride, "
    "ScalarType dtype) -> Tensor",
    tags=_TAGS,
)
LIBRARY.define("realize(Tensor(a) x) -> Tensor(a)", tags=_TAGS)
LIBRARY.define("done(Tensor x, Tensor token, Tensor(a!) chain, int slot) -> ()", tags=_TAGS)
LIBRARY.define("enter_state(Tensor anchor) -> Tensor", tags=_TAGS)
LIBRARY.define(
    "acquire(Tensor(a!) parameter, Tensor(b!) chain, bool changes=False) -> ()", tags=_TAGS
)
LIBRARY.define("release(Tensor(a!) parameter, Tensor(b!) chain) -> ()", tags=_TAGS)
LIBRARY.define(
    "settle(Tensor gradient, Tensor(a!) chain, Tensor? parameter=None) -> Tensor", tags=_TAGS
)

enter = torch.ops.teraplan.enter.default
enter_backward = torch.ops.teraplan.enter_backward.default
save = torch.ops.teraplan.save.default
realize = torch.ops.teraplan.realize.default
need = torch.ops.teraplan.need.default
done = torch.ops.teraplan.done.default
enter_state = torch.ops.teraplan.enter_state.default
acquire = torch.ops.teraplan.acquire.default
release = torch.ops.teraplan.release.default
settle = torch.ops.teraplan.settle.default

ALL = (enter, enter_backward, realize, save, need, done, enter_state, acquire, release, settle)

direct = SimpleNamespace()
"""What each op does, by its name, for compiled code: it calls this and no dispatcher.

Where a matrix product has left nothing of it in the caches, PyTorch's dispatcher takes 30 to 35 us
for an op that is written in Python, hundreds of times in a step.
"""


def bind(name: str, kernel: Callable[..., Any]) -> None:
    """Let `kernel` be what the op `name` does."""
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    setattr(direct, name, kernel)


def _fake_enter(anchor: torch.Tensor, table: str, sizes: Sequence[int]) -> torch.Tensor:
    return anchor.new_empty(0, dtype=torch.uint8)


def _fake_enter_backward(anchor: torch.Tensor, token: torch.Tensor, key: str) -> torch.Tensor:
    return anchor.new_empty(0, dtype=torch.uint8)


def _realize(x: torch.Tensor) -> torch.Tensor:
    same: torch.Tensor = torch.ops.aten.alias.default(x)
    return same


def _fake_save(
    x: torch.Tensor, chain: torch.Tensor, slot: int, beside: Sequence[torch.Tensor]
) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_need(
    chain: torch.Tensor,
    token: torch.Tensor,
    slot: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return chain.new_empty(0, dtype=dtype).new_empty_strided(size, stride)


def _fake_done(x: torch.Tensor, token: torch.Tensor, chain: torch.Tensor, slot: int) -> None:
    return None


def _fake_enter_state(anchor: torch.Tensor) -> torch.Tensor:
    return anchor.new_empty(0, dtype=torch.uint8)


def _fake_acquire(parameter: torch.Tensor, chain: torch.Tensor, changes: bool = False) -> None:
    return None


def _fake_release(parameter: torch.Tensor, chain: torch.Tensor) -> None:
    return None


def _fake_settle(
    gradient: torch.Tensor, chain: torch.Tensor, parameter: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.empty_strided(
        gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device
    )


for _name, _fake in (
    ("enter", _fake_enter),
    ("enter_backward", _fake_enter_backward),
    ("realize", _realize),
    ("save", _fake_save),
    ("need", _fake_need),
    ("done", _fake_done),
    ("enter_state", _fake_enter_state),
    ("acquire", _fake_acquire),
    ("release", _fake_release),
    ("settle", _fake_settle),
):
    torch.library.register_fake(f"teraplan::{_name}", _fake, lib=LIBRARY)
bind("realize", _realize)
