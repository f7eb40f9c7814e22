"""The GPT whose training state moves in several benchmarks, and its options."""

import argparse
import sys

import torch

from bench.models.gpt import GPT, GPTConfig

_STATES_PER_PARAMETER = 4
"""Parameter, gradient and two moments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes the model, its step, and how it is compiled."""
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a micro-batch")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block")
    parser.add_argument("--device", default="cpu", help="type of the device to train on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernels", default="inductor")
    parser.add_argument("--storage", default="", help="directory of the spill file")


def model_config(options: argparse.Namespace) -> GPTConfig:
    """The GPT that was asked for, 64 channels to a head."""
    return GPTConfig(
        vocab_size=options.vocabulary,
        width=options.width,
        num_layers=options.layers,
        num_heads=options.width // 64,
        context=options.tokens,
        checkpoint=options.checkpoint,
    )


def run_settings(options: argparse.Namespace, budget_bytes: int) -> dict[str, object]:
    """What `model.compile` is given; the state moves even where it would just fit."""
    settings: dict[str, object] = {"device_budget": budget_bytes, "training_state": "moves"}
    settings["kernels"] = options.kernels
    if options.storage:
        settings["storage"] = [options.storage]
    return settings


def training_state_bytes(config: GPTConfig) -> int:
    """Parameters, gradients and the two moments of AdamW."""
    with torch.device("meta"):
        return _STATES_PER_PARAMETER * sum(p.nbytes for p in GPT(config).parameters())


def command(module: str) -> str:
    """What was called."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])
