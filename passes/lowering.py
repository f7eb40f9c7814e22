"""How Inductor compiles the migration ops: as calls that nothing is moved across.

Inductor's stock fallback registers an op before it realizes the pending readers of the arguments
that the op mutates, so such a reader could run after the op (seen as wrong numbers in 24 of 28
random graphs). Here every mutated argument is realized and marked first.

`save` has to come after every reader of its tensor just as well, but it says so by dependencies on
what the readers compute: of a buffer that is mutated later, Inductor fuses no reader into the
kernel that makes it (T5's forward took 3 % longer). So long as `save` is to come, such a buffer is
in use, and nothing is written in its place.

Inductor also gives the memory of a dead buffer to a later one without the allocator's knowledge.
That must not happen to a tensor which `save` keeps or whose bytes are still on their way out, so
the graphs are compiled with `allow_buffer_reuse` off: a dead buffer is freed, and the allocator
reuses its memory when nobody holds it. (Exempting single buffers with `never_reuse_buffers` does
not do: such buffers are not freed before the graph ends.)
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from teraplan import ops
from teraplan.passes.layouts import KEPT_STRIDE

_MUTATED = {
    ops.save: (1,),
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


class _DirectCall(ir.FallbackKernel):
    """A call of what the op does, past PyTorch's dispatcher where the generated code is Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not V.graph.cpp_wrapper:
            op: Any = self.op_overload
            self.python_kernel_name = f"teraplan_ops.{op._opname}"

    def codegen(self, wrapper: Any) -> None:
        """Generate the call, and the import that it takes."""
        if not V.graph.cpp_wrapper:
            wrapper.add_import_once("from teraplan.ops import direct as teraplan_ops")
        super().codegen(wrapper)


class _Readers:
    """The operations that read each buffer of one graph, as far as it has been lowered."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._of: defaultdict[str, list[ir.Operation]] = defaultdict(list)

    def of(self, buffer: str) -> list[ir.Operation]:
        """All so far, and all that was pending: it is computed from here on."""
        for pending in V.graph.name_to_users.get(buffer, ()):
            pending.realize()
        operations = V.graph.operations
        for operation in operations[self._num_seen :]:
            for name in _read_by(operation):
                self._of[name].append(operation)
        self._num_seen = len(operations)
        return self._of[buffer]


_readers: "weakref.WeakKeyDictionary[object, _Readers]" = weakref.WeakKeyDictionary()


def _read_by(operation: Any) -> Iterable[str]:
    if isinstance(operation, ir.ComputedBuffer):
        return operation.get_read_names()
    return (x.get_name() for x in pytree.tree_leaves(getattr(operation, "inputs", ())))


def _save(call: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Call the op once all that reads `x` so far has been computed."""
    x = _kept(x)
    readers = _readers.setdefault(V.graph, _Readers()).of(x.get_name())
    results = [result.get_name() for reader in readers for result in reader.get_outputs()]
    num_before = len(V.graph.operations)
    token = call(x, *args)
    for operation in V.graph.operations[num_before:]:
        V.graph.additional_buffer_deps[operation.get_operation_name()].update(results)
    return token


def _register(op: torch._ops.OpOverload, mutated: tuple[int, ...]) -> None:
    def call(*args: Any) -> Any:
        result: Any = _DirectCall.create(op, *args)
        return ir.TensorBox.create(result) if isinstance(result, ir.IRNode) else result

    def lower(*args: Any) -> Any:
        for position in mutated:
            args[position].realize()
            V.graph.mark_buffer_mutated(args[position].get_name())
        return _save(call, *args) if op is ops.save else call(*args)

    register_lowering(op, type_promotion_kind=None)(lower)
