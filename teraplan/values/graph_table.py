"""What one pair of compiled graphs says about itself: travels inside the graph as a string.

A compiled graph may come from a cache that another process filled; then no pass of ours has run in
this process, and all that is known of the graph is what its ops carry. So this does.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

MIN_SLOT_BYTES = 64 << 10
"""Smaller tensors stay: a transfer of less costs more in calls than it frees in bytes."""


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
    """Size as traced; another at run time where shapes are dynamic."""
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
    """Bytes are those of the sizes that were met first."""

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
        backward = self._backward(state_moves)
        others = max(0, gradients_bytes - backward.gradients_bytes)
        return max(self.forward.least_bytes, others + backward.least_bytes)

    def resident_bytes(self, gradients_bytes: int, *, state_moves: bool) -> int:
        """The same but for the saved activations that the graph brings back."""
        backward = self._backward(state_moves)
        others = max(0, gradients_bytes - backward.gradients_bytes)
        return max(self.forward.workspace_bytes, others + backward.workspace_bytes)

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
        return cls(**data)


def _slot(data: dict[str, Any]) -> Slot:
    recipe = data.pop("recipe")
    if recipe is not None:
        recipe = Recipe(sources=tuple(recipe["sources"]), program=recipe["program"])
    return Slot(**data, recipe=recipe)
