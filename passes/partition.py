"""The partitioner that Inductor and AOTAutograd call: the stock one, then the migration ops."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from teraplan import __version__
from teraplan.passes.checkpoint_boundaries import keep_boundaries
from teraplan.passes.finish import finish
from teraplan.passes.insert_sites import insert_sites
from teraplan.passes.insert_state_sites import insert_state_sites
from teraplan.passes.lowering import INDUCTOR_CONFIG, register_lowerings
from teraplan.passes.verify_graph import verify_pair
from teraplan.passes.workspace import with_memory

log = logging.getLogger(__name__)


class TeraplanPartitioner(CustomPartitionerFn):
    """Splits a joint graph with the min-cut partitioner and instruments both halves.

    Picklable, and with a `uuid` that does not depend on any plan: both are in Inductor's cache
    keys, so that compiled code is reused across runs and plans.

    What moves under one budget and stays under another has the same ops under both. Inductor fuses
    other kernels around an op than without it, and those round elsewhere.
    """

    def __init__(self, *, updates: bool = False, fused: bool = True) -> None:
        self.updates = updates
        """Parameters may be updated at their gradients, in the backward."""
        self.fused = fused
        """Inductor compiles the halves."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition `gm` as AOTAutograd asks for: the forward and the backward module."""
        kwargs.pop("compiler", None)
        keep_boundaries(gm.graph)
        forward, backward = min_cut_rematerialization_partition(
            gm, joint_inputs, compiler="inductor", **kwargs
        )
        graphs = (forward.graph, backward.graph)
        num_outputs = kwargs["num_fwd_outputs"]
        static = kwargs.get("static_lifetime_input_indices") or ()
        table = insert_sites(
            *graphs,
            num_outputs=num_outputs,
            static_inputs=static,
            fused=self.fused,
        )
        insert_state_sites(
            *graphs, num_outputs=num_outputs, static_inputs=static, updates=self.updates
        )
        table = with_memory(table, *graphs, static_inputs=static)
        for module in (forward, backward):
            finish(module)
        verify_pair(forward.graph, backward.graph, table)
        log.info(
            "graph %s: %d saved activations with migration ops, %d B; %d left alone, %d B",
            table.graph,
            len(table.slots),
            sum(slot.nbytes for slot in table.slots),
            len(table.uncovered),
            sum(nbytes for _, nbytes, _ in table.uncovered),
        )
        return forward, backward

    def uuid(self) -> str:
        """Identity of what this partitioner does, for compile caches."""
        updated = "gradients" if self.updates else "step"
        return f"teraplan-{__version__}-partitioner-41-{updated}"


def config_patches(*, updates: bool = False) -> dict[str, object]:
    """What to pass to `compile_fx` so that the graphs get their ops."""
    register_lowerings()
    partitioner = TeraplanPartitioner(updates=updates)
    return {"custom_partitioner_fn": partitioner, **INDUCTOR_CONFIG}


def partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    updates: bool = False,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """`TeraplanPartitioner` as the plain function that `aot_autograd` takes."""
    with torch.no_grad():
        return TeraplanPartitioner(updates=updates, fused=False)(gm, joint_inputs, **kwargs)
