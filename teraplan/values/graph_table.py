"""What one pair of compiled graphs says about itself: travels inside the graph as a string.

A compiled graph may come from a cache that another process filled; then no pass of ours has run in
this process, and all that is known of the graph is what its ops carry. So this does.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teraplan.values.graph_sizes import GraphSizes, MemoryOfSizes, most_at, value_at

MIN_SLOT_BYTES = 64 << 10
"""Smaller tensors stay: a transfer of less costs more in calls than it frees in bytes."""


def key_of(text: str) -> str:
    """What tells a table, as a graph carries it, from others."""
    return f"table-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one saved activation can be computed again."""

    sources: tuple[int, ...]
    """Slots of the same graph that it starts from."""
    program: str
    """The operations and the layouts of their inputs: `sources`, and what `save` is given beside
    the tensor. JSON; equal programs are equal texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One saved activation of a graph."""

    name: str
    """Name of the FX node that made it, e.g. "gelu_3"."""
    layer: str
    """Path of the module that made it, "" if unknown."""
    nbytes: int
    given: bool = False
    """The graph has not made it: it is, or is part of, one of its inputs."""
    recipe: Recipe | None = None
    """None: it can only be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """What a graph takes beside parameters and inputs, as it predicts itself."""

    workspace_bytes: int = 0
    """Most at once of what no op can send away."""
    least_bytes: int = 0
    """Most at once of that and of saved activations in use, all others elsewhere."""
    kept_bytes: int = 0
    """Most at once of all, with every saved activation where it is; 0: not known."""
    gradients_bytes: int = 0
    """What it holds at its end of the parameters' gradients."""
    parameters_bytes: int = 0
    """Most at once of parameters that are used, all others elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTable:
    """One forward graph and its backward."""

    graph: str
    """Content hash of both graphs before any op was inserted."""
    slots: tuple[Slot, ...]
    uncovered: tuple[tuple[str, int, str], ...]
    """Saved activations that stay where they are: (name, nbytes, why)."""
    forward: GraphMemory = GraphMemory()
    backward: GraphMemory = GraphMemory()
    """Where gradients stay."""
    backward_of_moving: GraphMemory = GraphMemory()
    """Where large ones are copied, once they are complete, to memory that is accounted for
    elsewhere."""
    sizes_vary: bool = False
    """In ways that `sizes` do not tell: of these, bytes are of what was met first."""
    sizes_of_values: bool = False
    """Some follow from values, such as the number of those that are not zero: they count as 1."""
    sizes: tuple[int, ...] = ()
    """Of those that vary from call to call, what they are in the call that bytes are of; as traced
    in what a graph carries."""
    of_sizes: GraphSizes | None = None
    """What bytes are at other sizes, if any vary."""
    is_rehearsed: bool = False
    """What the graphs take at once is that of their compiled code, not of their nodes."""

    @property
    def saved_bytes(self) -> int:
        """All saved activations."""
        return sum(slot.nbytes for slot in self.slots)

    def exceeds(self, other: "GraphTable") -> bool:
        """True if a call of this table takes more, in anything, than one of the other."""
        pairs = (
            (self.saved_bytes, other.saved_bytes),
            (self.forward.least_bytes, other.forward.least_bytes),
            (self.backward.least_bytes, other.backward.least_bytes),
        )
        return any(mine > its for mine, its in pairs)

    @property
    def parameters_bytes(self) -> int:
        """Most at once of parameters that can move."""
        return max(self.forward.parameters_bytes, self.backward.parameters_bytes)

    def beside_bytes(self, gradients_bytes: int, *, state_moves: bool) -> int:
        """What a step over this graph takes at least beside parameters and optimizer state.

        Args:
            gradients_bytes: of all gradients that the step makes, those of other graphs included.
            state_moves: large gradients do, and `gradients_bytes` is of the others.
        """
        backward_bytes = self.beside_backward_bytes(gradients_bytes, state_moves=state_moves)
        return max(self.forward.least_bytes, backward_bytes)

    def beside_backward_bytes(self, gradients_bytes: int, *, state_moves: bool) -> int:
        """The same of the graph's backward alone."""
        backward = self._backward(state_moves)
        others = max(0, gradients_bytes - backward.gradients_bytes)
        return others + backward.least_bytes

    def resident_bytes(self, gradients_bytes: int, *, state_moves: bool) -> int:
        """The same but for the saved activations that the graph brings back."""
        backward = self._backward(state_moves)
        others = max(0, gradients_bytes - backward.gradients_bytes)
        return max(self.forward.workspace_bytes, others + backward.workspace_bytes)

    def kept_bytes(self, gradients_bytes: int, *, state_moves: bool) -> int:
        """The same with every saved activation where it is; 0: not known."""
        backward = self._backward(state_moves)
        others = max(0, gradients_bytes - backward.gradients_bytes)
        kept = self.forward.kept_bytes, backward.kept_bytes
        return max(kept[0], others + kept[1]) if all(kept) else 0

    def at(self, sizes: Sequence[int]) -> "GraphTable":
        """The table of a call with these sizes."""
        found = self.of_sizes
        if found is None or tuple(sizes) == self.sizes:
            return self
        slots = zip(self.slots, found.slots, strict=True)
        return dataclasses.replace(
            self,
            sizes=tuple(sizes),
            slots=tuple(
                dataclasses.replace(slot, nbytes=value_at(nbytes, sizes)) for slot, nbytes in slots
            ),
            forward=_memory_at(self.forward, found.forward, sizes),
            backward=_memory_at(self.backward, found.backward, sizes),
            backward_of_moving=_memory_at(self.backward_of_moving, found.backward_of_moving, sizes),
        )

    def _backward(self, state_moves: bool) -> GraphMemory:
        return self.backward_of_moving if state_moves else self.backward

    def to_json(self) -> str:
        """The table as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "GraphTable":
        """The table that `to_json` wrote."""
        data = json.loads(text)
        data["slots"] = tuple(_slot(slot) for slot in data["slots"])
        data["uncovered"] = tuple((name, nbytes, why) for name, nbytes, why in data["uncovered"])
        for key in ("forward", "backward", "backward_of_moving"):
            data[key] = GraphMemory(**data[key])
        data["sizes"] = tuple(data["sizes"])
        if data["of_sizes"] is not None:
            data["of_sizes"] = GraphSizes.from_data(data["of_sizes"])
        return cls(**data)


def _memory_at(memory: GraphMemory, of_sizes: MemoryOfSizes, sizes: Sequence[int]) -> GraphMemory:
    return dataclasses.replace(
        memory,
        workspace_bytes=most_at(of_sizes.workspace, sizes),
        least_bytes=most_at(of_sizes.least, sizes),
    )


def _slot(data: dict[str, Any]) -> Slot:
    recipe = data.pop("recipe")
    if recipe is not None:
        recipe = Recipe(sources=tuple(recipe["sources"]), program=recipe["program"])
    return Slot(**data, recipe=recipe)
