"""The partitioner that Inductor and AOTAutograd call: the stock one, then the migration ops."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from teraplan import __version__
from teraplan.errors import StateHasToMoveError
from teraplan.graph_table import GraphTable
from teraplan.passes.checkpoint_boundaries import keep_boundaries
from teraplan.passes.finish import finish
from teraplan.passes.insert_sites import insert_sites
from teraplan.passes.insert_state_sites import insert_state_sites
from teraplan.passes.lowering import INDUCTOR_CONFIG, register_lowerings
from teraplan.passes.verify_graph import verify_pair
from teraplan.passes.workspace import with_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that a step has beside a training state that stays."""

    nbytes: int
    gradients_bytes: int
    """Of all gradients that the step makes."""

    def require(self, table: GraphTable) -> None:
        """Raise StateHasToMoveError if a graph takes more."""
        if table.beside_bytes(self.gradients_bytes) > self.nbytes:
            raise StateHasToMoveError


class TeraplanPartitioner(CustomPartitionerFn):
    """Splits a joint graph with the min-cut partitioner and instruments both halves.

    Picklable, and with a `uuid` that does not depend on any plan: both are in Inductor's cache
    keys, so that compiled code is reused across runs and plans.
    """

    def __init__(
        self,
        *,
        moves_state: bool = False,
        updates: bool = False,
        fused: bool = True,
        room: Room | None = None,
    ) -> None:
        self.moves_state = moves_state
        """Put ops around the uses of parameters and behind gradients as well."""
        self.updates = updates
        """Where these can be updated in the backward."""
        self.fused = fused
        """Inductor compiles the halves."""
        self.room = room
        """What graphs may take; with more they are not compiled."""

    def __reduce__(self) -> tuple[object, ...]:
        """Without the room: it changes no graph."""
        return functools.partial(
            TeraplanPartitioner,
            moves_state=self.moves_state,
            updates=self.updates,
            fused=self.fused,
        ), ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition `gm` as AOTAutograd asks for: the forward and the backward module.

        Raises:
            StateHasToMoveError: they take more than there is room for.
        """
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
            moves_state=self.moves_state,
            fused=self.fused,
        )
        if self.moves_state:
            insert_state_sites(
                *graphs, num_outputs=num_outputs, static_inputs=static, updates=self.updates
            )
        table = with_memory(table, *graphs, static_inputs=static, fused=self.fused)
        if self.room is not None:
            self.room.require(table)
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
        what = "updates" if self.updates else "state"
        return f"teraplan-{__version__}-partitioner-24-{what if self.moves_state else 'saved'}"


def config_patches(
    *, moves_state: bool = False, updates: bool = False, room: Room | None = None
) -> dict[str, object]:
    """What to pass to `compile_fx` so that the graphs get their ops."""
    register_lowerings()
    partitioner = TeraplanPartitioner(moves_state=moves_state, updates=updates, room=room)
    return {"custom_partitioner_fn": partitioner, **INDUCTOR_CONFIG}


def partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    moves_state: bool = False,
    updates: bool = False,
    room: Room | None = None,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """`TeraplanPartitioner` as the plain function that `aot_autograd` takes."""
    with torch.no_grad():
        split = TeraplanPartitioner(
            moves_state=moves_state, updates=updates, fused=False, room=room
        )
        return split(gm, joint_inputs, **kwargs)
