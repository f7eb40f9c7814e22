"""The trace of a training step of any module, from one run on fake tensors, without the device.

Fake tensors have shapes and no memory, so a model of any size runs on any computer. Every operation
that PyTorch calls in forward, backward and AdamW becomes a site; it touches the storages that it
reads and writes, for as long as the cost model says. Storages are told apart as they are in
PyTorch: a view shares its base's, and a storage dies with its last tensor. What the optimizer does
to one parameter is a few operations on that parameter's tensors (`foreach=False`).
"""

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from teraplan.errors import ConfigError, TeraplanError, UnsupportedError
from teraplan.files.json_files import printable
from teraplan.library.builder import StepBuilder, Work
from teraplan.library.costs import Roofline
from teraplan.library.machines import Machine
from teraplan.values.step_trace import UPDATE_GRAPH, StepTrace, TensorKind

_REMEDY = (
    "; what needs values, such as .item() or rows that a router picks, or has a kernel for one "
    "device alone, has no trace without them: train for some steps with the option report, which "
    "writes the trace that was measured"
)
Factory = Callable[[], tuple[torch.nn.Module, Sequence[Any] | dict[str, Any]]]


def load_factory(name: str) -> Factory:
    """The function that "module:function" names.

    Raises:
        ConfigError: if there is none, or the module fails.
    """
    module_name, _, function = name.partition(":")
    try:
        found: Factory = getattr(importlib.import_module(module_name), function)
    except (Exception, SystemExit) as error:
        told = printable(f"{type(error).__name__}: {error}")
        raise ConfigError(f'--model "{name}": {told}; write MODULE:FUNCTION') from error
    if not callable(found):
        raise ConfigError(f'--model "{name}": {found!r} is no function; write MODULE:FUNCTION')
    return found


@contextmanager
def modules_of_working_directory() -> Iterator[None]:
    """Within this, modules in the working directory can be imported, as with `python -m`."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def trace_of_module(factory: Factory, machine: Machine) -> StepTrace:
    """The step of the module that `factory` returns with its inputs; its output is summed.

    Raises:
        ConfigError: if the factory returns something else, or the speed of the device in a dtype
            that the model computes in is not known.
        UnsupportedError: if an operation needs values, which fake tensors do not have, or the
            factory or the model fails otherwise.
    """
    without_memory: AbstractContextManager[object] = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with without_memory:
            made = factory()
    except TeraplanError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001  such as values that the factory reads, or `module.to(dtype)`
        without_memory = torch.device("meta")
        with _telling("the factory fails"), without_memory:
            made = factory()
    module, inputs = _checked(made)
    with without_memory:
        recorder = _Recorder(module, machine)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False, fused=False)
        with _telling("the model cannot run without memory for tensors", _REMEDY), recorder:
            recorder.graph = "forward"
            made = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            outputs = [leaf for leaf in tree_leaves(made) if _trains(leaf)]
            if not outputs:
                raise ConfigError(
                    "no output of the module depends on a parameter that requires a gradient"
                )
            loss = torch.stack([_sum(output) for output in outputs]).sum()
            recorder.graph, recorder.backward = "backward", True
            loss.backward()  # type: ignore[no-untyped-call]
            recorder.graph = UPDATE_GRAPH
            recorder.name_gradients()
            optimizer.step()
    return recorder.trace(optimizer)


def _checked(made: object) -> tuple[torch.nn.Module, Sequence[Any] | dict[str, Any]]:
    """A factory's result, if it is a module that can be trained and its inputs."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise ConfigError("the factory must return a module and a tuple or dict of its inputs")
    module, inputs = cast("tuple[torch.nn.Module, object]", made)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("the module has no parameters to be trained")
    if isinstance(inputs, torch.Tensor):
        return module, (inputs,)
    if not isinstance(inputs, tuple | list | dict):
        raise ConfigError(
            f"the factory returns a {type(inputs).__name__} as the module's inputs; return a tuple "
            "of them, or a dict by their names"
        )
    return module, inputs


@contextmanager
def _telling(what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever fails within this into one UnsupportedError."""
    try:
        yield
    except TeraplanError:
        raise
    except (Exception, SystemExit) as error:
        told = printable(f"{type(error).__name__}: {error}")
        raise UnsupportedError(f"{what}: {told}{remedy}") from error


def _sum(output: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(output) if output.is_complex() else output).float().sum()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _trains(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@final
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes each operation down as a site."""

    def __init__(self, module: torch.nn.Module, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = ""
        self.backward = False
        self._machine = machine
        self._speeds = machine.processor.flops_per_s
        self._builder = StepBuilder(Roofline(processor=machine.processor), "float32")
        self._no_speed = ""
        """A dtype in which the model computes, and the device has no speed."""
        self._module = module
        self._ids: dict[int, int] = {}
        """Tensor of the trace by the address of the storage's object, while it lives."""
        self._watch: list[weakref.finalize[Any, Any]] = []
        for name, parameter in module.named_parameters():
            layer = name.rpartition(".")[0]
            self._know(parameter, name, TensorKind.PARAMETER, layer, persistent=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags or not func.is_view:
            self._record(func, args, kwargs or {}, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        before = {self._id(tensor, "input") for tensor in read}
        after = {self._id(tensor, name) for tensor in made}
        if not before and not after:
            return
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count is not None else 0
        dtype = _name_of(made[0].dtype) if flops and made else ""
        if flops and dtype not in self._speeds:
            # Not raised here, where C++ may have called, which ends the process then.
            self._no_speed, flops = dtype, 0
        changed = after | self._mutated(func, args)
        self._builder.site(
            self.graph,
            0,
            sorted(before | after),
            Work(flops=float(flops), dtype=dtype or None),
            changes=sorted(changed & (before | after)),
            backward=self.backward,
        )

    def _mutated(self, func: Any, args: Any) -> set[int]:
        arguments = func._schema.arguments
        return {
            self._id(value, "input")
            for argument, value in zip(arguments, args, strict=False)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, torch.Tensor)
        }

    def _id(self, tensor: torch.Tensor, name: str) -> int:
        storage = tensor.untyped_storage()
        found = self._ids.get(storage._cdata)
        return self._know(tensor, name, TensorKind.ACTIVATION) if found is None else found

    def _know(
        self,
        tensor: torch.Tensor,
        name: str,
        kind: TensorKind,
        layer: str = "",
        *,
        persistent: bool = False,
    ) -> int:
        storage = tensor.untyped_storage()
        unique = name if persistent else f"{name}#{len(self._watch)}"
        made = self._builder.tensor(
            unique, kind, (storage.nbytes(),), layer=layer, dtype="uint8", persistent=persistent
        )
        address = storage._cdata
        self._ids[address] = made
        self._watch.append(weakref.finalize(storage, self._ids.pop, address, None))
        return made

    def name_gradients(self) -> None:
        """Says of the storages of gradients what they are."""
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                self._builder.rename(
                    self._id(parameter.grad, "gradient"), f"{name}.grad", TensorKind.GRADIENT
                )

    def trace(self, optimizer: torch.optim.Optimizer) -> StepTrace:
        """The step as recorded.

        Raises:
            ConfigError: if the speed of the device in a dtype that it computes in is not known.
        """
        if self._no_speed:
            known = ", ".join(sorted(self._speeds))
            raise ConfigError(
                f"the model multiplies matrices in {self._no_speed}, and the machine has no speed "
                f"for that; it has {known}. Give a machine file with one (--hardware)"
            )
        for name, parameter in self._module.named_parameters():
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    self._builder.rename(
                        self._id(value, "state"),
                        f"{name}.{key}",
                        TensorKind.OPTIMIZER_STATE,
                        persistent=True,
                    )
        return self._builder.build(self._machine.hardware.device)
