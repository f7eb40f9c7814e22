"""Machines and models of the library: what is published of them, and errors."""

import json
from pathlib import Path

import pytest

from teraplan.errors import ConfigError, FileFormatError
from teraplan.library.costs import Roofline
from teraplan.library.machine_file import find_machine, read_machine, write_machine
from teraplan.library.machines import DEVICES, GB, machine_named, machine_of_teraio
from teraplan.library.models import MODELS, Workload, trace_of
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.values.step_trace import StepTrace, TensorKind

H100 = machine_named("h100-nvl:ssd=4:host=512GiB")


def bytes_of(trace: StepTrace, kind: TensorKind) -> int:
    return sum(tensor.nbytes for tensor in trace.tensors if tensor.kind is kind)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("granite-8b", 8.05),
        ("mixtral-8x7b", 46.7),
        ("t5-11b", 11.3),
        ("vit-g", 1.01),
        ("unet", 0.031),
    ],
)
def test_models_have_as_many_parameters_as_published(model: str, billions: float) -> None:
    trace = trace_of(Workload(model=model, dtype="bfloat16", length=64), H100)
    parameters = bytes_of(trace, TensorKind.PARAMETER) / 2
    # Granite ties its head to its embedding, which the library does not: 0.2 of 8.05
    assert parameters / 1e9 == pytest.approx(billions, rel=0.03)
    # two moments and a master copy in 32 bits, a gradient as wide as the parameter
    assert bytes_of(trace, TensorKind.OPTIMIZER_STATE) == 12 * parameters
    assert bytes_of(trace, TensorKind.GRADIENT) == 2 * parameters


@pytest.mark.parametrize(
    ("model", "batch", "length", "percent"),
    [("llama3-8b", 4, 2048, 187.6), ("granite-8b", 4, 4096, 379.3), ("llama3-70b", 2, 2048, 940.2)],
)
def test_steps_of_teraio_need_about_the_memory_of_the_paper(
    model: str, batch: int, length: int, percent: float
) -> None:
    """TERAIO, figure 7: the peak as a part of a GPU's 94 GB."""
    workload = Workload(
        model=model, dtype="float32", batch=batch, length=length, micro_batches=3, stages=2
    )
    trace = trace_of(workload, machine_of_teraio(128 * GB))
    assert 100 * peak(device_curve(trace)) / (94 * GB) == pytest.approx(percent, rel=0.15)


def test_a_step_is_as_long_as_its_flops_say() -> None:
    """Six per parameter and token, and attention, at 70 % of the peak."""
    workload = Workload(model="llama3-8b", dtype="float32", batch=1, length=2048)
    trace = trace_of(workload, H100)
    flops = 6 * 7.5e9 * 2048
    assert trace.duration_ns == pytest.approx(flops / (60e12 * 0.7) * 1e9, rel=0.15)


def test_parameters_change_in_the_update_alone_and_gradients_in_each_micro_batch() -> None:
    workload = Workload(model="llama3-8b", dtype="float32", length=64, micro_batches=3)
    trace = trace_of(workload, H100)
    weight = next(t for t in trace.tensors if t.name == "layers.3.ffn.w1.weight")
    assert len(weight.windows) == 7
    assert weight.changes == (6,)
    gradient = next(t for t in trace.tensors if t.name == "layers.3.ffn.w1.weight.grad")
    assert gradient.changes == (0, 1, 2)
    assert not gradient.persistent


def test_kernels_cut_operations_into_sites() -> None:
    whole = trace_of(Workload(model="vit-g", length=64), H100)
    cut = trace_of(Workload(model="vit-g", length=64, kernels=3), H100)
    assert len(cut.sites) == 3 * len(whole.sites)
    assert peak(device_curve(cut)) == peak(device_curve(whole))


@pytest.mark.parametrize("name", DEVICES)
def test_machines_have_sources_and_come_back_from_files(name: str, tmp_path: Path) -> None:
    machine = machine_named(f"{name}:ssd=3")
    assert set(machine.sources) == {"device", "host_link", "device_port", "storage_link"}
    assert all(machine.sources.values())
    path = tmp_path / "machine.json"
    write_machine(machine, path)
    assert find_machine(str(path)) == machine
    links = (machine.hardware.storage_link, machine_named(f"{name}:ssd=1").hardware.storage_link)
    assert links[0] is not None
    assert links[1] is not None
    assert links[0].out_bytes_per_s == 3 * links[1].out_bytes_per_s
    assert machine_named(f"{name}:ssd=0:host=0").hardware.storage_link is None
    assert machine_named(f"{name}:ssd=0:host=0").hardware.host_link is None


def test_cores_of_hosts_are_named_or_given(tmp_path: Path) -> None:
    published = machine_named("h100-nvl:cores=published")
    assert published.hardware.host_cores is not None
    # 1.69 G parameters per second, of Adam: 28 bytes each
    assert published.hardware.host_cores.update_bytes_per_s == 47_320_000_000
    assert "Deep Optimizer States" in published.sources["host_cores"]
    given = machine_named("gh200:cores=40GB").hardware.host_cores
    assert given is not None
    assert given.update_bytes_per_s == 40 * GB
    assert machine_named("h100-nvl").hardware.host_cores is None
    assert machine_named("h100-nvl:host=0:cores=40GB").hardware.host_cores is None
    write_machine(published, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == published


def test_staging_is_given(tmp_path: Path) -> None:
    machine = machine_named("rtx-4090:host=4GB:staging=500MB")
    assert machine.hardware.staging_bytes == 500 * 10**6
    assert machine.hardware.host_room_bytes(3 * GB) == 2500 * 10**6
    assert machine.hardware.host_room_bytes(5 * GB) == 3500 * 10**6
    assert machine_named("rtx-4090").hardware.staging_bytes == 0
    assert machine_named("rtx-4090:ssd=0:staging=500MB").hardware.staging_bytes == 0
    write_machine(machine, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == machine


def test_reads_version_1_of_hardware_files() -> None:
    old = read_machine(Path(__file__).parents[1] / "compat" / "hardware_v1.json")
    assert old == machine_named("rtx-4090:ssd=2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gh200:cores=published", "no rate of updates on its cores is published"),
        ("h200:cores=0", "cores that update nothing"),
        ("h200:cores=many", "is not a size"),
        ("h100", 'machine "h100" is not one of .* did you mean "h'),
        ("banana", 'machine "banana" is not one of .*gh200; Commands that take a file'),
        ("h200:host=" + "9" * 400, "a size of hundreds of digits"),
        ("h200:staging=" + "9" * 400 + "GiB", "a size of hundreds of digits"),
        ("h200:cores=" + "9" * 400, "a size of hundreds of digits"),
        ("h200:host=4611686018427387904", "is more than files hold, 4611686018427387903 bytes"),
        ("h200:ssd=" + "1" * 5000, "is not understood"),
        ("h200:ssd=13", '"ssd=13" is not understood'),
        ("h200:gpu=2", '"gpu=2" is not understood'),
        ("h200:host=1GB:staging=2GB", "staging is 1.86 GiB, more than the host memory that it is"),
        ("h200:host=lots", "is not a size"),
        ("h200:host=0.5", r"'0\.5' is no whole number of bytes; write a unit"),
        ("machine.json", '"machine.json" is a file, and here one of the machines of the library'),
    ],
)
def test_wrong_names_of_machines(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine_named(name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory_bytes_per_s", 0, "memory_bytes_per_s: is 0"),
        ("flops_per_s", {"float32": -1}, "flops_per_s.float32: is -1"),
        ("sources", {"device": 3}, "sources.device: is 3, expected a string"),
        ("surprise", 1, 'unknown field "surprise"'),
        ("hardware", {}, 'hardware: field "device" is missing'),
    ],
)
def test_wrong_hardware_files(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = tmp_path / "machine.json"
    write_machine(H100, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(FileFormatError, match=message):
        read_machine(path)


def test_wrong_workloads() -> None:
    with pytest.raises(ConfigError, match='model "gpt" is not one of'):
        trace_of(Workload(model="gpt"), H100)
    with pytest.raises(ConfigError, match="cannot be cut into stages"):
        trace_of(Workload(model="unet", stages=2), H100)
    with pytest.raises(ConfigError, match='no speed for "int4"'):
        Roofline(processor=H100.processor).nanoseconds(1, 1, "int4")
    assert set(MODELS) >= {"llama3-8b", "mixtral-8x7b", "vit-g", "t5-11b", "unet"}
