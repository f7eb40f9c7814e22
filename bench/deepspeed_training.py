"""DeepSpeed ZeRO-Infinity as a contender, in an interpreter of its own that has DeepSpeed.

    PYTHON -m bench.deepspeed_training '{"model": ..., "options": {"param_slots": 5, ...}}'

Answers as `bench.contender` does, and imports nothing of teraplan, since the interpreter need not
have it. Everything that DeepSpeed can put on a disk is there: optimizer state, master weights,
gradients and parameters. Blocks, depth and threads of its aio are what its own tuner prefers on
one disk.
"""

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
with socket.create_server(("127.0.0.1", 0)) as server:  # several may run at once
    os.environ["MASTER_PORT"] = str(server.getsockname()[1])
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja is there

import deepspeed  # type: ignore[import-not-found]
import torch

from bench.models import gpt

_MIB = 1 << 20


def main() -> None:
    """Warm up, then step on demand."""
    contender = json.loads(sys.argv[1])
    options = contender["options"]
    torch.set_num_threads(contender["threads"])
    before = _status_bytes("VmRSS")
    config = gpt.GPTConfig(**contender["model"])
    with tempfile.TemporaryDirectory(dir=options["storage"]) as folder:
        settings = zero_settings(contender, Path(folder))
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = gpt.GPT(config)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
        data = [
            gpt.batch(config, contender["batch_size"], n) for n in range(contender["accumulate"])
        ]

        def step() -> dict[str, object]:
            start_ns, value = time.perf_counter_ns(), 0.0
            for micro_batch in data:
                loss = engine(*micro_batch)
                engine.backward(loss)
                engine.step()
                value += loss.item()
            return {"step_ns": time.perf_counter_ns() - start_ns, "loss": value.hex()}

        for _ in range(contender["warmup_steps"]):
            step()
        Path("/proc/self/clear_refs").write_text("5")
        _answer({"ready": True})
        for line in sys.stdin:
            if line.strip() == "end":
                break
            answer, peak = step(), _status_bytes("VmHWM")
            _answer(answer | {"peak_bytes": peak - before, "process_peak_bytes": peak})
        _answer({"status": {"read_bytes": _io("read_bytes"), "written_bytes": _io("write_bytes")}})


def zero_settings(contender: dict[str, Any], folder: Path) -> dict[str, Any]:
    """ZeRO stage 3 with optimizer and parameters on NVMe."""
    options = contender["options"]
    on_disk = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    pipelined = {name: options["pipeline"] for name in ("pipeline_read", "pipeline_write")}
    return {
        "train_micro_batch_size_per_gpu": contender["batch_size"],
        "gradient_accumulation_steps": contender["accumulate"],
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "sub_group_size": options["sub_group_elements"],
            "stage3_max_live_parameters": options["live_parameters"],
            "stage3_max_reuse_distance": options["live_parameters"],
            "offload_optimizer": on_disk | pipelined | {"buffer_count": options["optimizer_slots"]},
            "offload_param": on_disk
            | {
                "buffer_count": options["param_slots"],
                "buffer_size": options["slot_elements"],
                "max_in_cpu": 0,
            },
        },
        "aio": {
            "block_size": _MIB,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _status_bytes(field: str) -> int:
    return 1024 * int(_field(Path("/proc/self/status"), field).split()[0])


def _io(field: str) -> int:
    return int(_field(Path("/proc/self/io"), field))


def _field(path: Path, name: str) -> str:
    lines = path.read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(f"{name}:"))


def _answer(what: dict[str, object]) -> None:
    sys.stdout.write("@" + json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
