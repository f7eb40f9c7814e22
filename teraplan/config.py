"""What a user may set, read from options, the environment and a TOML file. Imports no torch.

    options={"device_budget": "2GiB"}          beats
    TERAPLAN_DEVICE_BUDGET=2GiB                beats
    device_budget = "2GiB"                     in the file that TERAPLAN_CONFIG names

Every value is checked where it is read, so that an error names the place it came from. A name that
is no option is an error everywhere: a misspelt budget must not be a run without a budget.
"""

import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex, TypeGuard, cast

from teraplan.errors import ConfigError
from teraplan.option_sources import check_name, expanded, shown, sources
from teraplan.units import format_nbytes, parse_nbytes

_PERCENT = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*%\s*")
_BUDGET_FORMS = (
    '"2GiB", "500 MB" (units up to TiB and TB), a whole number of bytes, or a percentage such as '
    '"60%"'
)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_LEAST_DEADLINE_S = 0.1
"""A disk may well take so long for one chunk."""
_WORDS = {word: True for word in _TRUE} | {word: False for word in _FALSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """An upper bound on memory: bytes, or a percentage of the peak with nothing moved.

    Exactly one of the two is set, and it is not negative. A percentage may exceed 100.
    """

    nbytes: int | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        if (self.nbytes is None) == (self.percent is None):
            raise ConfigError("a budget is either a number of bytes or a percentage")
        value = self.nbytes if self.nbytes is not None else self.percent
        if value is None or not _is_finite(value) or value < 0:
            raise ConfigError(f"a budget cannot be {shown(value)}; write {_BUDGET_FORMS}")

    @classmethod
    def parse(cls, value: object) -> Self:
        """The budget that a user wrote.

        Raises:
            ConfigError: if `value` is no budget.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            percent = _PERCENT.fullmatch(value)
            if percent:
                return cls(percent=float(percent[1]))
            try:
                return cls(nbytes=parse_nbytes(value))
            except ValueError as error:
                raise ConfigError(f"expected {_BUDGET_FORMS}") from error
        if not isinstance(value, SupportsIndex) or isinstance(value, bool):
            raise ConfigError(f"expected {_BUDGET_FORMS}")
        try:
            return cls(nbytes=operator.index(value))
        except TypeError as error:  # a tensor or an array that is not one whole number
            raise ConfigError(f"expected {_BUDGET_FORMS}") from error

    def resolve(self, unlimited_peak_bytes: int) -> int:
        """Bytes of this budget, where the step with nothing moved has this peak."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.percent is not None, "checked in __post_init__"
        return math.floor(unlimited_peak_bytes * self.percent / 100)

    def is_zero(self) -> bool:
        """Whether this budget allows nothing."""
        return not (self.nbytes or self.percent)

    def __str__(self) -> str:
        return format_nbytes(self.nbytes) if self.nbytes is not None else f"{self.percent:g}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options of one compiled model.

    A value is checked and normalized when a Config is made (sizes parsed, paths absolute), so
    equal configurations compare and hash equal however they were written.

    Raises:
        ConfigError: (all constructors) an unknown name, a bad value, or a contradiction.
    """

    device_budget: Budget | None = None
    """Most device memory that the step may use. None: what is free on the device at the start."""
    host_budget: Budget | None = None
    """Most host memory that tensors may be moved to, staging included. None: a safe part of
    what is free; on a CPU, whose memory is the device itself, nothing: what is given is taken
    outside of the process's resident set. Zero keeps tensors out of host memory."""
    storage: tuple[str, ...] = ()
    """Directories for tensors on NVMe; several are striped. Empty: a private temporary
    directory on a real disk."""
    plan: str = "auto"
    """ "auto": measure and plan. A path: replay that plan file."""
    profile_steps: int = 2
    """Steps measured before planning, at least 1."""
    policy: str = "teraplan"
    """Name of the planner."""
    kernels: Literal["inductor", "aot_eager"] = "inductor"
    """What compiles the rewritten graphs: fused kernels, or PyTorch's own ones (quick compiles)."""
    training_state: Literal["auto", "moves", "stays"] = "auto"
    """Whether parameters, gradients and optimizer state may leave the device. "auto": where a
    device budget given in bytes does not hold them and what the graphs need beside them."""
    host_updates: Literal["never", "auto"] | float = "never"
    """Whether parameters are updated on the host's cores, their optimizer state in host memory
    within `host_budget`. "auto": where the state does not fit on the device otherwise, and where
    the update is faster so. A number above 0, at most 1: this part of the parameters' bytes."""
    update: Literal["step", "gradient"] = "step"
    """When parameters of a training state that moves are updated: in the optimizer's step, or in
    the backward as soon as a gradient is complete, where nothing else wants to see it."""
    recompute: Literal["auto", "never"] = "auto"
    """Whether saved activations may be computed again in the backward: "auto": where a plan is
    predicted to be faster so, and every bit is equal."""
    strict: bool = False
    """Raise where something would otherwise take a slower path or stay unplanned."""
    report: str | None = None
    """Directory for trace, plan and run files. None: none is written."""
    deadline_s: float = 60.0
    """Longest that one wait for a transfer may take before it is an error."""
    checksum: bool = True
    """Compare what comes back from storage with what left."""
    encrypt: bool = False
    """Encrypt what goes to storage, under a key that is never stored."""
    daily_writes: Budget | None = None
    """Most bytes that may be written to storage per day of training: plans keep to it. None: as
    many as are of use."""
    endurance: Budget | None = None
    """Bytes that the storage devices together are rated to take in their life, of which the status
    then shows the share that was used. None: not known."""

    def __post_init__(self) -> None:
        for name, value in _values_of(self):
            object.__setattr__(self, name, _parse(name, value, f"option {name}"))
        if self.plan != "auto" and self.policy != "teraplan":
            raise ConfigError(
                f'plan "{self.plan}" is replayed as it is, so policy "{self.policy}" would not be '
                'used; set plan to "auto" or leave policy out'
            )
        if self.update == "gradient" and self.host_updates != "never":
            raise ConfigError(
                'update "gradient" is on the device, in the backward, and host_updates '
                f"{self.host_updates} is in the step; set one of them to its default"
            )
        in_percent = self.host_budget is not None and self.host_budget.nbytes is None
        if self.host_updates != "never" and in_percent:
            raise ConfigError(
                f"host_budget {self.host_budget} is of a step that is measured after host_updates "
                'have begun; set host_budget to a size, or host_updates to "never"'
            )

    @classmethod
    def resolve(cls, options: object, environ: Mapping[str, str]) -> Self:
        """The configuration from options, environment and the file that it names, in that order.

        An empty environment variable counts as one that is not set.
        """
        values: dict[str, Any] = {}
        for name, value, source in sources(environ, _PARSERS):
            values[name] = _parse(name, value, source)
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"options is {shown(options)}; expected a dict")
        for name, value in cast("Mapping[str, object]", options or {}).items():
            check_name(name, "option", _PARSERS)
            values[name] = _parse(name, value, f"option {name}")
        return cls(**values)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The configuration from the environment (default: this process's) alone."""
        return cls.resolve(None, os.environ if environ is None else environ)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def option_names() -> tuple[str, ...]:
    """The names of all options, in the order in which they are documented."""
    return tuple(field.name for field in dataclasses.fields(Config))


def _values_of(config: Config) -> Iterator[tuple[str, object]]:
    for name in option_names():
        yield name, getattr(config, name)


def _is_word(value: object, *words: str) -> TypeGuard[str]:
    """Whether it is one of `words`; arrays are not compared, which would give arrays."""
    return isinstance(value, str) and value in words


def _optional_budget(value: object) -> Budget | None:
    return None if value is None or _is_word(value, "auto") else Budget.parse(value)


def _device_budget(value: object) -> Budget | None:
    budget = _optional_budget(value)
    if budget is not None and budget.is_zero():
        raise ConfigError(f"nothing runs in no memory; expected {_BUDGET_FORMS}")
    return budget


def _size(value: object) -> Budget | None:
    try:
        budget = _optional_budget(value)
    except ConfigError as error:
        message = 'expected a size such as "500GB", or a whole number of bytes'
        raise ConfigError(message) from error
    if budget is not None and budget.nbytes is None:
        raise ConfigError('expected a size such as "500GB", not a percentage')
    return budget


def _path(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError("expected a path")
    text = os.fsdecode(cast("str | os.PathLike[str]", value))
    if not text.strip() or "\0" in text:
        raise ConfigError("expected a path")
    try:
        return str(expanded(Path(text)).absolute())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{text}: the working directory is gone; give an absolute path"
        ) from error


def _storage(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (_path(cast("str | os.PathLike[str]", value)),)
    if not isinstance(value, (list, tuple)):
        raise ConfigError("expected a directory or a list of directories")
    paths = tuple(_path(item) for item in cast("Iterable[object]", value))
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; name each directory once")
    return paths


def _plan(value: object) -> str:
    return "auto" if _is_word(value, "auto") else _path(value)


def _profile_steps(value: object) -> int:
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and re.fullmatch(r"\d{1,9}", text):
        text = int(text)
    if not isinstance(text, int) or isinstance(text, bool) or not 1 <= text < 10**9:
        raise ConfigError("expected a whole number of at least 1, of at most nine digits")
    return text


def _policy(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", value):
        raise ConfigError('expected the name of a policy, such as "teraplan"')
    return value


def _one_of(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not _is_word(value, *words):
            raise ConfigError(f"expected one of {', '.join(words)}")
        return value

    return parse


def _host_updates(value: object) -> object:
    if _is_word(value, "never", "auto"):
        return value
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str):
        percent = _PERCENT.fullmatch(text)
        try:
            text = float(percent[1]) / 100 if percent else float(text)
        except ValueError:
            text = None
    if isinstance(text, bool) or not isinstance(text, (int, float)) or not 0 < text <= 1:
        raise ConfigError('expected never, auto, or a share such as 0.5 or "50%"')
    return float(text)


def _flag(value: object) -> bool:
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower())
    if not isinstance(value, bool):
        raise ConfigError("expected true or false")
    return value


def _report(value: object) -> str | None:
    return None if value is None else _path(value)


def _deadline_s(value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    wrong = ConfigError(f"expected a number of seconds from {_LEAST_DEADLINE_S} to 10^9")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong
    if not _LEAST_DEADLINE_S <= value <= 10**9:
        raise wrong
    return float(value)


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "device_budget": _device_budget,
    "host_budget": _optional_budget,
    "storage": _storage,
    "plan": _plan,
    "profile_steps": _profile_steps,
    "policy": _policy,
    "kernels": _one_of("inductor", "aot_eager"),
    "training_state": _one_of("auto", "moves", "stays"),
    "host_updates": _host_updates,
    "update": _one_of("step", "gradient"),
    "recompute": _one_of("auto", "never"),
    "strict": _flag,
    "report": _report,
    "deadline_s": _deadline_s,
    "checksum": _flag,
    "encrypt": _flag,
    "daily_writes": _size,
    "endurance": _size,
}


def _parse(name: str, value: object, source: str) -> object:
    """`value` as the field `name` has it; `source` says in an error where it came from."""
    try:
        return _PARSERS[name](value)
    except ConfigError as error:
        raise ConfigError(f"{source}: {shown(value)} is not accepted: {error}") from error
