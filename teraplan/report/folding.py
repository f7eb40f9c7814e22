"""Names of repeated layers and tensors folded into one: twelve "blocks.N.mlp" to "blocks.*.mlp"."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from teraplan.report.table import TIMES

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.c)\d+(?=/)")
_NODE_NUMBER = re.compile(r"(_\d+)+$")
_TIMES = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_QUANTITY = re.compile(rf"(\d+(?:\.\d+)?)(?: ({'|'.join([*_TIMES, *_SIZES])})\b)?")


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


def by_template(names: Iterable[str]) -> dict[str, set[str]]:
    """The names of each template."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(name_template(name), set()).add(name)
    return found


def layer_fold(
    names: Iterable[str], among: Mapping[str, Set[str]] = MappingProxyType({})
) -> tuple[Fold, ...]:
    """Distinct `names` folded by template, in order of first appearance.

    `among` has the names that could have been there, `by_template`: a fold that lacks some of them
    shows which numbers it has.
    """
    groups: dict[str, dict[str, None]] = {}
    for name in names:
        groups.setdefault(name_template(name), {})[name] = None
    folds: list[Fold] = []
    for template, group in groups.items():
        complete = among.get(template, set()) <= set(group)
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
    """`text` with its quantities as stars, so that reasons which differ only in numbers are equal.

    "914 ms" and "1.2 s" are the same star, "914 ms" and "914 KiB" are not.
    """
    return _QUANTITY.sub(lambda match: f"*{_dimension(match[2])}", text)


def merge_numbers(texts: Sequence[str]) -> str:
    """Texts of one template as one, with the range of each quantity that differs: "idle 3-9 ms"."""
    columns = zip(*(list(_QUANTITY.finditer(text)) for text in texts), strict=True)
    spans = iter([_range_of(column) for column in columns])
    return _QUANTITY.sub(lambda _: next(spans), texts[0])


def _dimension(unit: str | None) -> str:
    if unit is None:
        return ""
    return "time" if unit in _TIMES else "size"


def _value(match: re.Match[str]) -> float:
    return float(match[1]) * (_TIMES | _SIZES).get(match[2], 1)


def _range_of(matches: Sequence[re.Match[str]]) -> str:
    low, high = min(matches, key=_value), max(matches, key=_value)
    if low[0] == high[0]:
        return low[0]
    return f"{low[1] if low[2] == high[2] else low[0]}-{high[0]}"
