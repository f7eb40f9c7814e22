"""Rules of the user: which tensors stay, and where those that move may go.

    {"layers.*.mlp.*": "storage", "lm_head.weight": "device"}

A rule's left side is a pattern (`*`, `?`, `[...]`) for a tensor's name, or for the path of its
layer. Right: `device`, and it never leaves; `host` or `storage`, and it goes nowhere else when it
leaves. When, and whether, stays the planner's choice. Where several rules match, the last counts.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from teraplan.errors import ConfigError
from teraplan.files.json_files import load, printable
from teraplan.files.plan_file import decode_tier
from teraplan.values.hardware import Tier
from teraplan.values.step_trace import StepTrace, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """A step to which rules were applied."""

    trace: StepTrace
    """The same, but what must stay is never idle."""
    only_tier: Mapping[int, Tier]
    may_be_hosted: tuple[int, ...]
    """Updates of whose tensors no rule says that they stay or go elsewhere than to the host."""


def read_rules(path: Path) -> dict[str, Tier]:
    """The rules in a JSON file, in their order.

    Raises:
        FileFormatError: if the file has no rules in it; names the field.
    """
    rules = load(path)
    return {pattern: decode_tier(rules.get(pattern)) for pattern in rules.field_names()}


def apply_rules(trace: StepTrace, rules: Mapping[str, Tier]) -> Ruled:
    """The step as the rules leave it to the planner.

    Raises:
        ConfigError: if a rule matches no tensor.
    """
    tiers: dict[int, Tier] = {}
    for pattern, tier in rules.items():
        matched = [i for i, tensor in enumerate(trace.tensors) if _matches(pattern, tensor)]
        if not matched:
            raise ConfigError(
                f'rule "{printable(pattern)}" matches no tensor and no layer; '
                "`teraplan show` lists those of a plan, and a trace file names them"
            )
        tiers.update(dict.fromkeys(matched, tier))
    num_sites = len(trace.sites)
    tensors = tuple(
        _staying(tensor, num_sites) if tiers.get(i) is Tier.DEVICE else tensor
        for i, tensor in enumerate(trace.tensors)
    )
    only = {i: tier for i, tier in tiers.items() if tier is not Tier.DEVICE}
    hosted = tuple(
        number
        for number, update in enumerate(trace.updates)
        if all(tiers.get(i, Tier.HOST) is Tier.HOST for i in update.tensor_ids)
    )
    ruled = replace(trace, tensors=tensors)
    return Ruled(trace=ruled, only_tier=only, may_be_hosted=hosted)


def _matches(pattern: str, tensor: Tensor) -> bool:
    return fnmatch.fnmatchcase(tensor.name, pattern) or fnmatch.fnmatchcase(tensor.layer, pattern)


def _staying(tensor: Tensor, num_sites: int) -> Tensor:
    whole = (0, num_sites) if tensor.persistent else (tensor.windows[0][0], tensor.windows[-1][1])
    return replace(tensor, windows=(whole,), changed_in=None)
