"""A graph of Dynamo's with the code that it was compiled to, which can be compiled again.

    compile: state stays --(too much for the budget)--> state moves
    run:     state stays --(so it turns out)----------> compile anew, run

A graph is compiled for a training state that stays, or for one that moves. Which of these it is to
be depends on what the graphs of a step need, and that is known when they have been compiled, or
when a step has been measured.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.compile_fx import compile_fx

from teraplan.config import Config
from teraplan.errors import StateHasToMoveError
from teraplan.held_session import HeldSession, Lifeline
from teraplan.passes import inference
from teraplan.passes.partition import Room, config_patches, partition
from teraplan.runtime.dispatch import running
from teraplan.runtime.session import Session

Compiled = Callable[..., Any]


class RunnableGraph:
    """One graph of Dynamo's under one configuration."""

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], held: HeldSession
    ) -> None:
        self._lifeline = Lifeline(held, example_inputs)
        session = self._lifeline.session(example_inputs)
        self._known = weakref.ref(session)
        """The session that knows of this graph."""
        self._moves_state = session.compiling(example_inputs)
        room = session.room()
        may_start = session.keeper.may_start
        self._source = _copy_of(gm) if may_start else None
        """What to compile again: compiling changes what it is given."""
        self._is_static = _is_static(gm)
        try:
            limit = None if room is None else Room(nbytes=room[0], gradients_bytes=room[1])
            self._compiled = self._build(session.config, gm, example_inputs, limit)
        except StateHasToMoveError:
            pass
        else:
            return
        session.start_moving_state()
        assert self._source is not None
        self._moves_state = True
        self._compiled = self._build(session.config, self._source, example_inputs, None)

    def run(self, args: tuple[Any, ...], shapes: tuple[object, ...]) -> Any:  # noqa: ANN401
        """The graph's results; `shapes` tells its input sizes apart."""
        session = self._lifeline.session(args)
        results = self._run(session, args, shapes)
        session.end_call()
        session.keeper.check()
        return results

    def _run(self, session: Session, args: tuple[Any, ...], shapes: tuple[object, ...]) -> Any:  # noqa: ANN401
        self._keep_up(session, args)
        try:
            with running(session, shapes):
                return self._compiled(*args)
        except StateHasToMoveError:  # raised by the graph's first op: nothing has been computed
            pass
        session.start_moving_state()
        self._keep_up(session, args)
        with running(session, shapes):
            return self._compiled(*args)

    def results_like(self, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Results without values, which DistributedDataParallel asks for while it compiles."""
        return self._compiled(*args)

    def _keep_up(self, session: Session, args: tuple[Any, ...]) -> None:
        """Tell another session of the graph, and compile it anew if its state is to move by now."""
        is_known = self._known() is session
        if is_known and (self._moves_state or not session.keeper.moves):
            return
        self._known = weakref.ref(session)
        if not session.compiling(args) or self._moves_state:
            return
        self._moves_state = True
        source, self._source = self._source, None
        if source is not None and self._is_static:
            self._compiled = self._build(session.config, source, args, None)
        else:
            session.keeper.graphs_without_ops += 1

    def _build(
        self, config: Config, gm: fx.GraphModule, inputs: Sequence[Any], room: Room | None
    ) -> Compiled:
        moves_state, updates = self._moves_state, config.update == "gradient"
        if config.kernels == "inductor":
            patches = config_patches(moves_state=moves_state, updates=updates, room=room)
            inner = inference.compile_inner
            return cast("Compiled", compile_fx(gm, list(inputs), inner, config_patches=patches))
        split = functools.partial(partition, moves_state=moves_state, updates=updates, room=room)
        compile_graph: Compiled = aot_autograd(
            fw_compiler=boxed_nop,
            inference_compiler=inference.compile_eagerly if moves_state else boxed_nop,
            partition_fn=split,
        )
        compiled: Compiled = compile_graph(gm, inputs)
        return compiled


def _is_static(gm: fx.GraphModule) -> bool:
    """True if it can be compiled for tensors alone: no input has a size that varies."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    return all(
        isinstance(value, torch.Tensor)
        and not any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
        for value in values
    )


def _copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph over the same tensors, with all that Dynamo has noted beside it."""
    twin = fx.GraphModule(gm, copy.deepcopy(gm.graph), type(gm).__name__)
    for name, value in vars(gm).items():
        vars(twin).setdefault(name, value)
    twin.meta = dict(gm.meta)
    for node, original in zip(twin.graph.nodes, gm.graph.nodes, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(twin, name, _copy_of(child))
    return twin
