"""The training loop of another library around a compiled model: the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.moving import moving, states
from tests.end_to_end.training import Run, assert_same, run

pytestmark = pytest.mark.slow

STEPS, SAVED_AT = 8, 4
BUDGET = 4 << 20
"""Of 6 MiB of parameters, gradients and optimizer state."""


class _Batches(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 256, (32,), generator=random)
        return {"input_ids": tokens, "labels": tokens}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))


def _train(this: Run, directory: Path, *, last_step: int, resume: bool = False) -> None:
    """With accumulation, clipping, a schedule, evaluation and checkpoints, as `Trainer` does it."""
    from transformers import Trainer, TrainingArguments

    model = this.compile(_llama())
    arguments: dict[str, Any] = {
        "max_steps": last_step,
        "save_steps": SAVED_AT,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(directory), **arguments),
        train_dataset=_Batches(),
        eval_dataset=torch.utils.data.Subset(_Batches(), range(4)),
    )
    result = trainer.train(resume_from_checkpoint=resume or None)
    wrapped: Any = trainer.optimizer
    evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    others = torch.tensor([result.global_step, *evaluated])
    this.record(torch.zeros(()), model, others=[others, *states(wrapped.optimizer)])


@pytest.mark.exhaustive
def test_trainer_of_transformers_with_a_checkpoint_in_between(tmp_path: Path) -> None:
    """Six steps under a tight budget, and the rest from the checkpoint before under another one."""
    plenty: dict[str, object] = {"device_budget": 100 << 30, "training_state": "stays"}
    reference = run(lambda this: _train(this, tmp_path / "whole", last_step=STEPS), **plenty)
    little: dict[str, object] = {"device_budget": BUDGET, "training_state": "moves"}
    halved = tmp_path / "halved"
    run(lambda this: _train(this, halved, last_step=SAVED_AT + 2), **little)
    assert moving().arena.log.traffic.written_bytes > 0
    little["device_budget"] = BUDGET * 3 // 2
    resumed = run(lambda this: _train(this, halved, last_step=STEPS, resume=True), **little)
    assert_same(reference, resumed)
