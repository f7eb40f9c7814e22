"""What the measured step took of memory, and of which calls that tells something."""

from collections.abc import Mapping
from dataclasses import dataclass

from teraplan.runtime.engine.recorder import Signature
from teraplan.units import MIB
from teraplan.values.graph_table import GraphTable

_BEARABLE_PART = 32
"""Of what the step saves: so much more is measured alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What the step in which memory was measured has found."""

    signature: Signature
    state_bytes: int
    overhead_bytes: int
    """What the process held beside tensors."""
    workspaces_bytes: tuple[int, ...]
    tables: Mapping[str, GraphTable]
    """Of the graphs of such steps, by their names, at the largest sizes until then."""
    saved_bytes: int
    """In that step. Where sizes follow from values, others save more."""
    most_bytes: int
    """The most that tensors took in it."""

    def is_outgrown(self, saved_bytes: int) -> bool:
        """True if a step saves so much more that its kernels take more, too."""
        return saved_bytes > self.saved_bytes + max(MIB, self.saved_bytes // _BEARABLE_PART)


def has_as_large(tables: Mapping[str, GraphTable], table: GraphTable) -> bool:
    """True if a call of this table takes no more than one that was met."""
    known = tables.get(table.graph)
    return known is not None and (known is table or not table.exceeds(known))
