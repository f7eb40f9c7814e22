"""Names of repeated layers and tensors folded into one: twelve "blocks.N.mlp" to "blocks.*.mlp"."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from teraplan.report.table import TIMES

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.c)\d+(?=/)")
_NODE_NUMBER = re.compile(r"(_\d+)+$")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Names that differ only in the numbers of their layers."""

    label: str
    """ "blocks.*.mlp" if all such names are here, "blocks.{0-5}.mlp" if some are elsewhere."""
    count: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.label} {TIMES}{self.count}" if self.count > 1 else self.label


def name_template(name: str) -> str:
    """`name` with each of its numbered parts as a star: "blocks.3.mlp" to "blocks.*.mlp"."""
    return _INDEX.sub("*", name)


def layer_fold(names: Iterable[str], among: Iterable[str] = ()) -> tuple[Fold, ...]:
    """Distinct `names` folded by template, in order of first appearance.

    `among` has the names that could have been there: a fold that lacks some of them shows which
    numbers it has.
    """
    groups: dict[str, dict[str, None]] = {}
    for name in names:
        groups.setdefault(name_template(name), {})[name] = None
    others: dict[str, set[str]] = {}
    for name in among:
        others.setdefault(name_template(name), set()).add(name)
    folds: list[Fold] = []
    for template, group in groups.items():
        complete = others.get(template, set()) <= set(group)
        label = _label(template, tuple(group), complete=complete)
        folds.append(Fold(label=label, count=len(group), names=tuple(group)))
    return tuple(folds)


def _label(template: str, names: tuple[str, ...], *, complete: bool) -> str:
    if len(names) == 1:
        return names[0]
    if complete:
        return template
    columns = zip(
        *([int(number) for number in _INDEX.findall(name)] for name in names), strict=True
    )
    spans = iter([number_ranges(column) for column in columns])
    return re.sub(r"\*", lambda _: next(spans), template)


def number_ranges(numbers: Iterable[int]) -> str:
    """`numbers` as text: "{0-3,7}", or "4" if there is only one."""
    ordered = sorted(set(numbers))
    runs: list[tuple[int, int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    text = ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs)
    return f"{{{text}}}" if len(ordered) > 1 else text


def node_label(name: str, layer: str) -> str:
    """What a tensor is in its layer: "g0.c2/gelu_3" to "gelu", "embed.weight" to "weight"."""
    node = name.rpartition("/")[2]
    if layer and node.startswith(f"{layer}."):
        node = node[len(layer) + 1 :]
    return name_template(_NODE_NUMBER.sub("", node))


def text_template(text: str) -> str:
    """`text` with its numbers as stars, so that reasons which differ only in numbers are equal."""
    return _NUMBER.sub("*", text)


def merge_numbers(texts: Sequence[str]) -> str:
    """Texts of one template as one, with the range of each number that differs: "idle 3-9 ms"."""
    columns = [
        _range_of(column) for column in zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ]
    spans = iter(columns)
    return _NUMBER.sub(lambda _: next(spans), texts[0])


def _range_of(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if low == high else f"{low}-{high}"
