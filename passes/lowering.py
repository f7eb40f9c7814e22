"""How Inductor compiles the migration ops: as calls that nothing is moved across.

Inductor's stock fallback registers an op before it realizes the pending readers of the arguments
that the op mutates, so such a reader could run after the op (seen as wrong numbers in 24 of 28
random graphs). Here every mutated argument is realized and marked first.

Inductor also gives the memory of a dead buffer to a later one without the allocator's knowledge.
That must not happen to a tensor which `save` keeps or whose bytes are still on their way out, so
the graphs are compiled with `allow_buffer_reuse` off: a dead buffer is freed, and the allocator
reuses its memory when nobody holds it. (Exempting single buffers with `never_reuse_buffers` does
not do: such buffers are not freed before the graph ends.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from teraplan import ops
from teraplan.passes.layouts import KEPT_STRIDE

_MUTATED = {
    ops.save: (0, 1),
    ops.need: (1,),
    ops.done: (0, 2),
    ops.acquire: (0, 1),
    ops.release: (0, 1),
    ops.settle: (1,),
}
"""Positions of mutated arguments, as in the schemas."""

INDUCTOR_CONFIG = {"allow_buffer_reuse": False}
"""What the ops need of Inductor's configuration."""


def register_lowerings() -> None:
    """Register a lowering for each migration op. Idempotent."""
    for op in ops.ALL:
        _register(op, _MUTATED.get(op, ()))
    register_lowering(ops.realize, type_promotion_kind=None)(_realize)


def _realize(x: Any) -> Any:
    x.realize()
    return x


def _kept(x: Any) -> Any:
    """What is to be saved, in the strides that the backward will ask for.

    The tag of the op does not do: Inductor heeds it only for ops that Dynamo has met.
    """
    node = V.graph.current_node
    x.realize()
    return ir.ExternKernel.require_exact_strides(x, node.meta[KEPT_STRIDE])


def _register(op: torch._ops.OpOverload, mutated: tuple[int, ...]) -> None:
    call: Callable[..., Any] = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    def lower(*args: Any) -> Any:
        if op is ops.save:
            args = (_kept(args[0]), *args[1:])
        for position in mutated:
            args[position].realize()
            V.graph.mark_buffer_mutated(args[position].get_name())
        return call(*args)

    register_lowering(op, type_promotion_kind=None)(lower)
