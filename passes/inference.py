"""Compilers of graphs without a backward, whose parameters may be away when they are called.

AOTAutograd partitions only what is trained, so here the ops come in when the graph itself is
compiled. Saved activations there are none.

As in what is trained, they are there under every budget (see `TeraplanPartitioner`).
"""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._guards import TracingContext

from teraplan.passes.finish import finish
from teraplan.passes.insert_state_sites import insert_inference_sites
from teraplan.passes.masked_tails import compile_kernels


def compile_inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's own compiler of one graph; where that has no backward, the ops come in before."""
    if kwargs.get("is_inference"):
        _insert(gm, kwargs.get("static_input_idxs") or ())
    return compile_kernels(gm, inputs, **kwargs)


def compile_eagerly(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Runs a graph without a backward as it is, with its ops."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        _insert(gm, context.fw_metadata.static_input_indices)
    return boxed_nop(gm, list(inputs))


def _insert(gm: fx.GraphModule, static_inputs: Sequence[int]) -> None:
    if insert_inference_sites(gm.graph, static_inputs=static_inputs):
        finish(gm)
