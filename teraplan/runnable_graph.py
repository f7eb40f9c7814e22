"""A graph of Dynamo's with the code that it was compiled to."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from teraplan.config import Config
from teraplan.errors import StateHasToMoveError
from teraplan.held_session import HeldSession, Lifeline
from teraplan.passes import inference
from teraplan.passes.functional_gradients import takes_gradients
from teraplan.passes.partition import config_patches, partition
from teraplan.runtime.session.compiled_backward import let_it_run_again, refuse_double_backward
from teraplan.runtime.session.dispatch import running
from teraplan.runtime.session.session import Session

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
        session.compiling(example_inputs)
        self._may_hold_all = takes_gradients(gm)
        """It may have its backward within it, where nothing moves, as far as is known yet."""
        self._may_run_again = False
        """Its backward, with `retain_graph`."""
        if session.config.kernels == "inductor" and inductor_config.cpp_wrapper:
            session.fall_back(_IN_PYTHON)
        try:
            self._compiled = _compile(session.config, gm, example_inputs)
        except exceptions_allowed_to_be_fallback as error:
            session.fall_back(_left_to_eager(gm, error))
            raise

    def run(self, args: tuple[Any, ...], shapes: tuple[object, ...]) -> Any:  # noqa: ANN401
        """The graph's results; `shapes` tells its input sizes apart."""
        session = self._lifeline.session(args)
        if self._known() is not session:
            self._known = weakref.ref(session)
            session.compiling(args)
        results = self._run(session, args, shapes)
        refuse_double_backward(results)
        self._may_run_again = self._may_run_again or let_it_run_again(results)
        session.engine.returned(results)
        session.end_call()
        session.keeper.check()
        if self._may_hold_all:
            self._may_hold_all = False
            if not any(isinstance(r, torch.Tensor) and r.requires_grad for r in results):
                session.fall_back(_HOLDS_ALL)
        return results

    def _run(self, session: Session, args: tuple[Any, ...], shapes: tuple[object, ...]) -> Any:  # noqa: ANN401
        try:
            with running(session, shapes):
                return self._compiled(*args)
        except StateHasToMoveError:  # raised by the graph's first op: nothing has been computed
            pass
        session.start_moving_state()
        with running(session, shapes):
            return self._compiled(*args)

    def results_like(self, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Results without values, which DistributedDataParallel asks for while it compiles."""
        return self._compiled(*args)


_IN_PYTHON = (
    "torch._inductor.config.cpp_wrapper is set, and graphs call their kernels from Python all the "
    "same: what moves tensors between kernels is Python"
)
_HOLDS_ALL = (
    "gradients are taken within what is compiled (torch.func.grad): forward and backward are one "
    "graph, nothing that it saves moves, and no budget holds for it; compile the model or its "
    "loss, and take the gradients outside"
)

_REMEDIES: tuple[tuple[type[Exception], str], ...] = (
    (
        DynamicOutputShapeException,
        "write it with sizes that do not depend on values (torch.where in the place of "
        "x[mask] = y), or set torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    (DataDependentOutputException, "set torch._dynamo.config.capture_scalar_outputs = True"),
)


def _left_to_eager(gm: fx.GraphModule, error: Exception) -> str:
    """What is said of a graph that PyTorch cannot compile and runs as if it were none."""
    remedies = (text for kind, text in _REMEDIES if isinstance(error, kind))
    remedy = next(remedies, "keep this operation out of what is compiled")
    frames = (line.strip() for node in gm.graph.nodes for line in _stack(node))
    begin = next((frame for frame in frames if frame.startswith("File ")), "unknown")
    reason, *_ = str(error).splitlines() or [""]
    return (
        f"PyTorch could not compile a graph of {len(gm.graph.nodes)} operations ({reason}), which "
        f"begins at {begin}, and runs it without compiling: nothing that it saves moves, and it is "
        f"not in the plan; {remedy}"
    )


def _stack(node: fx.Node) -> list[str]:
    """Where user code asks for an operation, innermost line first."""
    return (node.stack_trace or "").splitlines()[::-1]


def _both_at_once() -> contextlib.AbstractContextManager[object]:
    """The backward is compiled with its forward, so what both take is known before they run.

    Nothing tells then whether it will run once or, with `retain_graph`, several times: it must not
    write over the small tensors that it is given.
    """
    settings = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
    known = {name: value for name, value in settings.items() if hasattr(functorch_config, name)}
    patched: contextlib.AbstractContextManager[object] = functorch_config.patch(known)
    return patched


def _compile(config: Config, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    updates = config.update == "gradient"
    with _both_at_once():
        if config.kernels == "inductor":
            patches = config_patches(updates=updates)
            inner = inference.compile_inner
            return cast("Compiled", compile_fx(gm, list(inputs), inner, config_patches=patches))
        compile_graph: Compiled = aot_autograd(
            fw_compiler=boxed_nop,
            inference_compiler=inference.compile_eagerly,
            partition_fn=functools.partial(partition, updates=updates),
        )
        compiled: Compiled = compile_graph(gm, inputs)
        return compiled
