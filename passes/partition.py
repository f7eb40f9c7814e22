"""The partitioner that Inductor and AOTAutograd call: the stock one, then the migration ops."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from teraplan import __version__
from teraplan.passes.insert_sites import insert_sites
from teraplan.passes.insert_state_sites import insert_state_sites, settled_gradients
from teraplan.passes.lowering import INDUCTOR_CONFIG, register_lowerings
from teraplan.passes.verify_graph import verify_pair

log = logging.getLogger(__name__)


class TeraplanPartitioner(CustomPartitionerFn):
    """Splits a joint graph with the min-cut partitioner and instruments both halves.

    Picklable, and with a `uuid` that does not depend on any plan: both are in Inductor's cache
    keys, so that compiled code is reused across runs and plans.
    """

    def __init__(self, *, moves_state: bool = False) -> None:
        self.moves_state = moves_state
        """Put ops around the uses of parameters and behind gradients as well."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition `gm` as AOTAutograd asks for: the forward and the backward module."""
        kwargs.pop("compiler", None)
        forward, backward = min_cut_rematerialization_partition(
            gm, joint_inputs, compiler="inductor", **kwargs
        )
        graphs = (forward.graph, backward.graph)
        num_outputs = kwargs["num_fwd_outputs"]
        static = kwargs.get("static_lifetime_input_indices") or ()
        settled = settled_gradients(*graphs, static) if self.moves_state else frozenset[fx.Node]()
        table = insert_sites(
            *graphs,
            num_outputs=num_outputs,
            static_inputs=static,
            settled=settled,
            with_recipes=not self.moves_state,
        )
        if self.moves_state:
            insert_state_sites(*graphs, num_outputs=num_outputs, static_inputs=static)
        for module in (forward, backward):
            _forget_mutation_regions(module)
            module.graph.lint()
            module.recompile()
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
        return f"teraplan-{__version__}-partitioner-5-{'state' if self.moves_state else 'saved'}"


def _forget_mutation_regions(module: fx.GraphModule) -> None:
    """Drop the joint passes' memory of where mutations are: it predates our ops.

    With it Inductor's pattern matcher fused a matrix product with an addition across an op.
    """
    for node in module.graph.nodes:
        node.meta.pop("mutation_region_id", None)


def config_patches(*, moves_state: bool = False) -> dict[str, object]:
    """What to pass to `compile_fx` so that the graphs get their ops."""
    register_lowerings()
    partitioner = TeraplanPartitioner(moves_state=moves_state)
    return {"custom_partitioner_fn": partitioner, **INDUCTOR_CONFIG}


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], *, moves_state: bool = False, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """`TeraplanPartitioner` as the plain function that `aot_autograd` takes."""
    with torch.no_grad():
        return TeraplanPartitioner(moves_state=moves_state)(gm, joint_inputs, **kwargs)
