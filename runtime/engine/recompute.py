"""Saved activations that are computed again instead of being kept or moved.

Where a graph has a recipe for one (`passes/recipes.py`), a plan may drop it at its `save`; at its
`need` it is computed from other saved activations, which the plan has there by then. While steps
are measured every recipe is rehearsed: right after the forward it is followed once, beside the
tensor itself. That gives its time, and a recipe whose result differs in a bit is refused, for
all tensors that are made in the same way.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from teraplan.runtime.device import Device
from teraplan.runtime.engine.mover import Mover
from teraplan.runtime.engine.saved import Saved, View
from teraplan.values.graph_table import GraphTable
from teraplan.values.step_trace import Recompute

log = logging.getLogger(__name__)

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size of an element."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class CompiledRecipe(Protocol):
    """A recipe that can be followed."""

    @property
    def run(self) -> Callable[[Sequence[torch.Tensor], torch.Tensor], None]:
        """Computes from the inputs into the result."""
        ...

    @property
    def input_layouts(self) -> Sequence[Layout]:
        """Of the inputs, those from slots first."""
        ...

    @property
    def result_layout(self) -> Layout:
        """Of the result."""
        ...

    @property
    def temporary_bytes(self) -> int:
        """Memory that it takes beside inputs and result."""
        ...


@dataclass(frozen=True, slots=True)
class Remake:
    """How the bytes of one saved activation can be computed again."""

    program: str
    recipe: CompiledRecipe
    sources: tuple[int, ...]
    """Slots."""
    views: dict[int, View]
    """By slot, of the call that saved it."""
    beside: tuple[torch.Tensor, ...]
    """Further inputs, small ones, as they were: programs may change them until the backward, also
    unseen by autograd, as in `parameter.data`."""

    @property
    def from_views(self) -> list[View]:
        """What it starts from."""
        return [self.views[slot] for slot in self.sources]


class Recomputer:
    """The recipes of one session's graphs. Its methods run inside the migration ops."""

    def __init__(self, device: Device, mover: Mover) -> None:
        self._device = device
        self._mover = mover
        self._recipes: dict[str, CompiledRecipe | None] = {}
        """By program; None if it gave other bits once, or cannot be compiled."""
        self._tried: dict[str, list[int]] = {}
        """Numbers of the tensors rehearsed in this step, by program."""
        self._views: dict[int, dict[int, View]] = {}
        self._waiting: list[Saved] = []
        """With recipes, saved by the call that runs, and not yet rehearsed."""
        self.rehearsing = False
        self.rehearsed: dict[int, Recompute | None] = {}
        """By number of the tensor: what its rehearsal in this step gave; None if refused."""
        self.last_step = (0, 0)
        """Bytes computed again in the last whole step, and the time that took in ns."""
        self._recomputed_bytes = 0
        self._marks: list[tuple[object, object]] = []
        """Around each computation of the step."""

    def prepare(
        self, tables: Iterable[GraphTable], compile_recipe: Callable[[str], CompiledRecipe]
    ) -> None:
        """Compile the recipes of `tables` that have not been compiled; equal ones once."""
        recipes = (slot.recipe for table in tables for slot in table.slots)
        wanted = dict.fromkeys(recipe.program for recipe in recipes if recipe is not None)
        start_ns, before = time.perf_counter_ns(), len(self._recipes)
        for program in wanted:
            if program not in self._recipes:
                try:
                    self._recipes[program] = compile_recipe(program)
                except Exception as error:  # noqa: BLE001  a compiler's own; training needs no recipe
                    self._recipes[program] = None
                    log.warning("what could be computed again moves instead: %s", error)
        if len(self._recipes) > before:
            elapsed_s = (time.perf_counter_ns() - start_ns) / 1e9
            log.info("compiled %d recipes in %.1f s", len(self._recipes) - before, elapsed_s)

    def begin_step(self, *, rehearsing: bool) -> None:
        """From here on, numbers of calls and of tensors are another step's."""
        self._views, self._waiting, self._tried = {}, [], {}
        self.rehearsing = rehearsing
        self.rehearsed = {}
        took_ns = sum(self._device.elapsed_ns(start, end) for start, end in self._marks)
        self.last_step = (self._recomputed_bytes, took_ns)
        self._recomputed_bytes, self._marks = 0, []

    def saved(
        self,
        view: View,
        x: torch.Tensor,
        table: GraphTable,
        slot: int,
        beside: Sequence[torch.Tensor],
    ) -> None:
        """Slot `slot` of a call holds `x`, which `view` stands for."""
        views = self._views.setdefault(view.call, {})
        views[slot] = view
        saved, recipe = view.saved, table.slots[slot].recipe
        if recipe is None or recipe.program not in self._recipes:
            return
        compiled = self._recipes[recipe.program]
        if compiled is None:
            self.rehearsed[saved.order] = None
            return
        if saved.tokens > 1 or not _is_whole(x, saved, compiled.result_layout):
            saved.remake = None
            return
        layouts = compiled.input_layouts[len(recipe.sources) :]
        kept = tuple(_copied(x, layout) for x, layout in zip(beside, layouts, strict=True))
        saved.remake = Remake(recipe.program, compiled, recipe.sources, views, kept)
        if self.rehearsing:
            self._waiting.append(saved)

    def rehearse(self, limit_bytes: int, bring: Callable[[Saved], None]) -> None:
        """Try the recipes of tensors whose sources have been saved, too.

        Args:
            limit_bytes: most managed bytes on the device meanwhile.
            bring: puts a tensor on the device that has left.
        """
        waiting, self._waiting = self._waiting, []
        for saved in waiting:
            remake = saved.remake
            if remake is None:
                continue
            if self._recipes[remake.program] is None:
                self.rehearsed[saved.order] = None
            elif set(remake.sources) <= set(remake.views):
                self._rehearse(saved, remake, limit_bytes, bring)
            else:
                self._waiting.append(saved)

    def remake(self, saved: Saved, bring: Callable[[Saved], None], limit_bytes: int | None) -> None:
        """Compute `saved` again, from sources that `bring` puts on the device.

        Args:
            saved: has been dropped.
            bring: puts another one on the device.
            limit_bytes: most managed bytes on the device; None: a plan sees to that.
        """
        remake = saved.remake
        assert remake is not None, f"{saved.name} has no recipe"
        sources = [view.saved for view in remake.from_views]
        with _in_use(sources):  # what is brought next must not push out what is there
            for source in sources:
                bring(source)
                source.check_version()
            if limit_bytes is not None:
                self._mover.make_room(saved.nbytes, limit_bytes)
            start = self._device.mark()
            result = self._follow(remake)
            self._marks.append((start, self._device.mark()))
        self._recomputed_bytes += saved.nbytes
        saved.tensor, saved.version, saved.offset = result, result._version, 0
        self._mover.add(saved)

    def _rehearse(
        self, saved: Saved, remake: Remake, limit_bytes: int, bring: Callable[[Saved], None]
    ) -> None:
        parties = [saved, *(view.saved for view in remake.from_views)]
        with _in_use(parties):
            absent = sum(party.nbytes for party in parties if not party.resident)
            self._mover.make_room(absent + saved.nbytes, limit_bytes)
            if self._mover.managed_bytes + absent + saved.nbytes > limit_bytes:
                return
            for party in parties:
                bring(party)
            start = self._device.mark()
            same = self._gives_same_bits(saved, remake)
            end = self._device.mark()
        if not same:
            self._refuse(remake.program)
        self._tried.setdefault(remake.program, []).append(saved.order)
        sources = dict.fromkeys(view.saved.order for view in remake.from_views)
        self.rehearsed[saved.order] = (
            Recompute(
                duration_ns=self._device.elapsed_ns(start, end),
                sources=tuple(sources),
                temporary_bytes=remake.recipe.temporary_bytes,
            )
            if same
            else None
        )

    def _gives_same_bits(self, saved: Saved, remake: Remake) -> bool:
        try:
            result = self._follow(remake)
        except Exception as error:  # noqa: BLE001  of generated code; training needs no recipe
            log.warning("%s moves instead of being computed again: %s", saved.name, error)
            return False
        same = _same_bits(result, _tensor_at(saved, 0, remake.recipe.result_layout))
        if not same:
            log.info("%s: its recipe gives other bits", saved.name)
        return same

    def _refuse(self, program: str) -> None:
        """A bit that differs once may differ anywhere: no tensor is made in this way."""
        self._recipes[program] = None
        for number in self._tried.get(program, ()):
            self.rehearsed[number] = None

    def _follow(self, remake: Remake) -> torch.Tensor:
        recipe = remake.recipe
        layouts = recipe.input_layouts
        inputs = [
            _tensor_of(v, layout) for v, layout in zip(remake.from_views, layouts, strict=False)
        ]
        result = self._device.empty(*recipe.result_layout)
        with torch.no_grad():
            recipe.run([*inputs, *remake.beside], result)
        return result


@contextmanager
def _in_use(parties: Sequence[Saved]) -> Iterator[None]:
    """Within this, none of these leaves."""
    for party in parties:
        party.in_use += 1
    try:
        yield
    finally:
        for party in parties:
            party.in_use -= 1


def _is_whole(x: torch.Tensor, saved: Saved, layout: Layout) -> bool:
    """True if `x` is all there is in its storage, and laid out as its recipe's result."""
    shape, stride, dtype = layout
    return (
        (tuple(x.shape), x.stride(), x.dtype) == (shape, stride, dtype)
        and x.storage_offset() == 0
        and x.numel() * x.element_size() == saved.nbytes
        and x.element_size() in _AS_INTEGERS
    )


def _copied(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy in the layout that a recipe was compiled for; Inductor may have chosen another one."""
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device).copy_(
        tensor.detach()
    )


def _tensor_of(view: View, layout: Layout) -> torch.Tensor:
    """The tensor that a source's slot stands for."""
    return _tensor_at(view.saved, view.byte_offset, layout)


def _tensor_at(saved: Saved, byte_offset: int, layout: Layout) -> torch.Tensor:
    """What lies in the memory of `saved`, which may have come back as mere bytes."""
    shape, stride, dtype = layout
    base = saved.tensor
    assert base is not None, f"{saved.name} is not on the device"
    offset = (saved.offset + byte_offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), offset, shape, stride
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = _AS_INTEGERS[a.element_size()]
    return torch.equal(a.view(integers), b.detach().view(integers))
