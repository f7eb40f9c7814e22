"""How Inductor compiles the migration ops: as calls that nothing is moved across.

Inductor's stock fallback registers an op before it realizes the pending readers of the arguments
that the op mutates, so such a reader could run after the op (seen as wrong numbers in 24 of 28
random graphs). Here every mutated argument is realized and marked first.

`save` and `done` have to come after every reader of their tensor just as well, but they say so by
dependencies on what the readers compute. Of a buffer that is mutated, Inductor fuses no reader into
the kernel that makes it (T5's forward took 3 % longer), and it gives memory of its own to each that
is pending, also to what only other readers use (the backward of a softmax with dropout read and
wrote three times as much). So long as the op is to come, such a buffer is in use, and nothing is
written in its place.

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
from torch._inductor import ir, utils
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from teraplan import ops
from teraplan.passes.layouts import KEPT_STRIDE, SAVED_AS

_MUTATED = {
    ops.save: (1,),
    ops.need: (0,),
    ops.done: (2,),
    ops.acquire: (0, 1),
    ops.release: (0, 1),
    ops.settle: (1,),
}
"""Positions of mutated arguments, as in the schemas."""
_ALIGNED = (ops.enter_backward, ops.need)
"""What is given a token, and returns something that kernels read, or that ops do."""

INDUCTOR_CONFIG = {
    "allow_buffer_reuse": False,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "benchmark_harness": True,
}
"""What the ops need of Inductor's configuration: they run at each call, and may raise errors. And
the code has to say with which inputs it is called."""


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


def _note_aligned(result: Any) -> None:
    """What the op returns is where memory begins, or as far behind it as what was saved was.

    One of its inputs is on the CPU, and so counts as not aligned; then what it returns does, too,
    and kernels on a GPU load it element by element.
    """
    meta = V.graph.current_node.meta
    if utils.should_assume_input_aligned(meta.get(SAVED_AS, meta["val"])):
        V.graph.unaligned_buffers.discard(result.get_name())


class _DirectCall(ir.FallbackKernel):
    """A call of what the op does, past PyTorch's dispatcher."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        op: Any = self.op_overload
        self.python_kernel_name = f"teraplan_ops.{op._opname}"

    def codegen(self, wrapper: Any) -> None:
        """Generate the call, and the import that it takes."""
        wrapper.add_import_once("from teraplan.ops import direct as teraplan_ops")
        super().codegen(wrapper)


class _Readers:
    """The operations that read each buffer of one graph, as far as it has been lowered."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._of: defaultdict[str, list[ir.Operation]] = defaultdict(list)

    def results(self, buffer: str) -> list[str]:
        """What is computed behind all reads of `buffer` so far.

        Not by the readers themselves where others have read on: these may do so for the last time,
        and write in its place, if nothing else waits for it.
        """
        last = [self._follower(reader) or reader for reader in self._readers(buffer)]
        return [result.get_name() for operation in last for result in operation.get_outputs()]

    def _readers(self, buffer: str) -> list[ir.Operation]:
        """All operations that read `buffer` so far; of pending ones those that have to be some."""
        read_later = _read_later()
        for pending in V.graph.name_to_users.get(buffer, ()):
            if id(pending) in read_later:
                pending.realize()
        operations = V.graph.operations
        for operation in operations[self._num_seen :]:
            for name in _read_by(operation):
                self._of[name].append(operation)
        self._num_seen = len(operations)
        return self._of[buffer]

    def _follower(self, reader: ir.Operation) -> ir.Operation | None:
        results = [result.get_name() for result in reader.get_outputs()]
        found = [f for name in results for f in self._of.get(name, ())]
        return next((f for f in reversed(found) if isinstance(f, ir.ComputedBuffer)), None)


_readers: "weakref.WeakKeyDictionary[object, _Readers]" = weakref.WeakKeyDictionary()


def _read_later() -> set[int]:
    """`id`s of what nodes still to be lowered are given: all else has been used, or inlined.

    The interpreter forgets the result of a node behind its last use.
    """
    values: Iterable[Any] = V.graph.env.values()
    return {id(part) for v in values for part in (v if isinstance(v, list | tuple) else (v,))}


def _read_by(operation: Any) -> Iterable[str]:
    if isinstance(operation, ir.ComputedBuffer):
        return operation.get_read_names()
    return (x.get_name() for x in pytree.tree_leaves(getattr(operation, "inputs", ())))


def _behind_readers(call: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Call the op once all that reads `x` so far has been computed."""
    x.realize()
    results = _readers.setdefault(V.graph, _Readers()).results(x.get_name())
    num_before = len(V.graph.operations)
    result = call(x, *args)
    for operation in V.graph.operations[num_before:]:
        V.graph.additional_buffer_deps[operation.get_operation_name()].update(results)
    return result


def _register(op: torch._ops.OpOverload, mutated: tuple[int, ...]) -> None:
    def call(*args: Any) -> Any:
        result: Any = _DirectCall.create(op, *args)
        if op in _ALIGNED:
            _note_aligned(result)
        return ir.TensorBox.create(result) if isinstance(result, ir.IRNode) else result

    def lower(*args: Any) -> Any:
        for position in mutated:
            args[position].realize()
            V.graph.mark_buffer_mutated(args[position].get_name())
        if op is ops.save:
            return _behind_readers(call, _kept(args[0]), *args[1:])
        return _behind_readers(call, *args) if op is ops.done else call(*args)

    register_lowering(op, type_promotion_kind=None)(lower)
