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
class GraphTable:
    """One forward graph and its backward."""

    graph: str
    """Content hash of both graphs before any op was inserted."""
    slots: tuple[Slot, ...]
    uncovered: tuple[tuple[str, int, str], ...]
    """Saved activations that stay where they are: (name, nbytes, why)."""
    forward_workspace_bytes: int
    """Most bytes of other intermediates alive at once, as the graph predicts; fusion needs less."""
    backward_workspace_bytes: int
    largest_operation_bytes: int
    """Bytes that the largest single operation of the forward reads and writes: a lower bound."""

    def to_json(self) -> str:
        """The table as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "GraphTable":
        """The table that `to_json` wrote."""
        data = json.loads(text)
        data["slots"] = tuple(_slot(slot) for slot in data["slots"])
        data["uncovered"] = tuple((name, nbytes, why) for name, nbytes, why in data["uncovered"])
        return cls(**data)


def _slot(data: dict[str, Any]) -> Slot:
    recipe = data.pop("recipe")
    if recipe is not None:
        recipe = Recipe(sources=tuple(recipe["sources"]), program=recipe["program"])
    return Slot(**data, recipe=recipe)
