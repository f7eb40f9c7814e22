"""Keeps Inductor's kernels for CPUs from reading behind the ends of tensors.

    out[i] = x[i - 2] where i >= 2, else 0      18 elements:  i = 0 .. 15 at once, then 16 and 17

What is left of a row is computed at once, too, as if there were 16 elements, of which 2 are
written. A load under a mask, here that of padding, then reads 16 as well (torch 2.13, in
`CppVecKernel._get_vec_load_line`). PyTorch's own memory goes on behind a tensor; ours may end with
it, and so may its last page. Where a graph has operations that load under a mask, what is left of a
row is computed element by element.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner

from teraplan.passes.targets import packet_of

_UNDER_A_MASK = ("cat", "jagged", "masked_index", "pad", "pool", "resize", "roll", "stack")
"""Parts of the names of operations that load so. "cat" is in "scatter", too."""


def compile_kernels(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's compiler of one graph, as `compile_fx_inner`."""
    if not loads_under_a_mask(gm):
        return compile_fx_inner(gm, inputs, **kwargs)
    with _without_vectors_for_tails():
        return compile_fx_inner(gm, inputs, **kwargs)


def loads_under_a_mask(gm: fx.GraphModule) -> bool:
    """True if a kernel may read elements of which it takes but some.

    Also one of a branch of `torch.cond` or the body of a loop, which are graphs of their own.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    names = {str(packet_of(node)) for graph in graphs for node in graph.nodes}
    return any(part in name for name in names for part in _UNDER_A_MASK)


def _without_vectors_for_tails() -> contextlib.AbstractContextManager[object]:
    if not hasattr(inductor_config.cpp, "enable_loop_tail_vec"):  # before there were any
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = inductor_config.patch(
        {"cpp.enable_loop_tail_vec": False}
    )
    return patched
