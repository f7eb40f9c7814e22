"""`torch.compile(model, backend="teraplan")`: where Dynamo hands over a graph.

The graph goes to Inductor (or AOTAutograd alone, kernels="aot_eager") with our partitioner, which
puts the migration ops in. What comes back is wrapped so that its ops find their session. A session
is shared by all graphs that are compiled under one configuration for one device (`held_session`
says how long it lives).
"""

import copy
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from teraplan.config import Config
from teraplan.errors import ConfigError, TeraplanError
from teraplan.held_session import HeldSession
from teraplan.passes.recipes import compile_recipe
from teraplan.passes.streams import require_one_stream
from teraplan.runnable_graph import RunnableGraph
from teraplan.runtime.open_device import open_device, with_index
from teraplan.runtime.process import fallbacks
from teraplan.runtime.process.dump_signal import dump_on_signal
from teraplan.runtime.session.compiled_modules import compiled_modules, configs_of
from teraplan.runtime.session.replay import configured_for, replayed_plan
from teraplan.runtime.session.session import Session
from teraplan.runtime.state.memory.materialize import materialize as give_memory
from teraplan.runtime.state.updates import optimizer_steps
from teraplan.runtime.state.updates.stand_in import parameters_of
from teraplan.values.status import Status

log = logging.getLogger(__name__)

_held: "weakref.WeakValueDictionary[tuple[Config, torch.device], HeldSession]"
_held = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_held.clear)  # sessions are the parent's: a child opens its own

Compiled = Callable[..., Any]


def teraplan(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    **_: object,
) -> Compiled:
    """Compile one graph; the entry point of `torch.compile(backend="teraplan")`.

    A mistake in the options, or storage that fails, is not raised here, where Dynamo would wrap it,
    but by the function that is returned: the user sees a TeraplanError from the call of the model.
    """
    try:
        if mode is not None:
            raise ConfigError(
                f'mode="{mode}" has no meaning for backend="teraplan"; remove it, '
                "and set what you need with options={...}"
            )
        config = Config.resolve(options, os.environ)
        require_one_stream(gm.graph)
        return _compile(gm, example_inputs, _held_session(config, _device(example_inputs)))
    except TeraplanError as error:
        return _raiser(error)


def materialize(
    model: nn.Module,
    *,
    options: Mapping[str, object] | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    device: str = "cpu",
) -> nn.Module:
    """See `teraplan.materialize`."""
    if not (initialize is None or callable(initialize)):
        raise ConfigError(
            f"initialize is a {type(initialize).__name__}; give materialize a function that sets "
            "the parameters of the module it is called with, or call load_state_dict() afterwards"
        )
    held = _held_session(Config.resolve(options, os.environ), torch.device(device))
    keeper = held.session().keeper
    keeper.expect(list(model.parameters()))
    give_memory(model, keeper.state, initialize, device)
    held.own(model.parameters())
    _materialized[model] = held
    return model


def attach(optimizer: object) -> torch.optim.Optimizer:
    """See `teraplan.attach`."""
    return optimizer_steps.attach(optimizer)


def detach(optimizer: object) -> torch.optim.Optimizer:
    """See `teraplan.detach`."""
    return optimizer_steps.detach(optimizer)


_materialized: "weakref.WeakKeyDictionary[nn.Module, HeldSession]" = weakref.WeakKeyDictionary()
"""Until their graphs do, the models keep their sessions alive."""


def sessions() -> list[Session]:
    """All that there are."""
    found = (held.alive for held in list(_held.values()))
    return [session for session in found if session is not None]


def current_status() -> Status:
    """Status of the session that ran last, or of none."""
    latest = max(sessions(), key=lambda s: s.last_used_ns, default=None)
    if latest is None:
        return Status(phase="idle", fallbacks=tuple(_uncompiled))
    return latest.status()


def current_dump() -> str:
    """What all sessions are doing right now."""
    return "\n".join(s.describe() for s in sessions()) or "teraplan: no session"


def _held_session(config: Config, device: torch.device) -> HeldSession:
    device = with_index(device)
    held = _held.get((config, device))
    if held is None:
        models = functools.partial(compiled_modules, config)
        open_session = functools.partial(_open_session, config, device, models)
        _held[config, device] = held = HeldSession(open_session, models)
    return held


def _open_session(
    config: Config, place: torch.device, models: Callable[[], Iterable[nn.Module]]
) -> Session:
    replayed = replayed_plan(config)
    if replayed is not None:
        config = configured_for(replayed, config)
    device = open_device(config, place)
    try:
        fused = config.kernels == "inductor"
        compile_one = functools.partial(compile_recipe, fused=fused)
        session = Session(config, device, compile_one, models, replayed)
    except TeraplanError:
        device.close()
        raise
    dump_on_signal(current_dump)
    return session


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """Where a graph computes."""
    devices = (x.device for x in example_inputs if isinstance(x, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], held: HeldSession) -> Compiled:
    graph = RunnableGraph(gm, example_inputs, held)
    varying = _telling_inputs(gm, example_inputs)

    def call(*args: Any) -> Any:
        if any(isinstance(x, FakeTensor) for x in args):
            return graph.results_like(args)
        shapes = tuple(_shape(args[i]) for i in varying)
        try:
            return graph.run(args, shapes)
        except TeraplanError as error:  # the generated code between here and there helps nobody
            raise error.with_traceback(None) from None

    return call


def _telling_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Positions of the inputs that tell kinds of steps apart: tensors and numbers that are sizes.

    A number that is no size, such as that of the step, would make every step one of its own kind.
    """
    values: list[Any] = [node.meta.get("example_value") for node in gm.graph.nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    lengths: list[Any] = [length for tensor in tensors for length in tensor.shape]
    sizes = [length for length in lengths if isinstance(length, torch.SymInt)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    return [
        i
        for i, x in enumerate(example_inputs)
        if (isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter))
        or (isinstance(x, torch.SymInt) and x.node.expr.free_symbols & symbols)
    ]


def _shape(value: Any) -> object:
    """What tells the sizes of an input apart.

    Of a tensor around others it is theirs: a nested one's own sizes have a number in them that no
    other tensor has.
    """
    if isinstance(value, torch.SymInt) and value.node.is_nested_int():
        return None
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return tuple(_shape(getattr(value, name)) for name in names)
    return value.shape if isinstance(value, torch.Tensor) else value


_uncompiled: dict[str, None] = {}
"""What has been said of models of which nothing is compiled."""


def train_uncompiled(optimizer: torch.optim.Optimizer, what: str) -> None:
    """An optimizer steps, and there is no graph that runs under a budget: the status tells.

    Raises:
        FallbackRefusedError: it trains a module that was to be compiled with `strict`.
    """
    _uncompiled[what] = None
    strict = any(config.strict for config in configs_of(parameters_of(optimizer)))
    fallbacks.allow(what, strict=strict)


def trains_compiled(optimizer: torch.optim.Optimizer) -> bool:
    """True if it trains parameters of a module that is compiled, or to be compiled, by us."""
    return next(iter(configs_of(parameters_of(optimizer))), None) is not None


def has_compiled() -> bool:
    """True if there is a graph that runs under a budget."""
    return any(session.has_compiled for session in sessions())


def _raiser(error: TeraplanError) -> Compiled:
    bare = copy.copy(error)  # without a traceback, whose frames hold the user's model

    def raise_error(*_: Any) -> Any:
        raise copy.copy(bare) from None  # or it would gather tracebacks

    return raise_error
