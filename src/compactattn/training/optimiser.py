"""AdamW with the decay rule of the recipes, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compactattn.training.config import TrainingConfig


def rate_at(step: int, config: TrainingConfig) -> float:
    """Learning rate of update `step`, the first being 1: linear to `rate` at `warmup`, then a cosine to `final_rate`."""
    if step <= config.warmup:
        return config.rate * step / config.warmup
    along = (step - config.warmup) / (config.steps - config.warmup)
    share = (1 + math.cos(math.pi * along)) / 2
    return config.final_rate + (config.rate - config.final_rate) * share


def build_optimiser(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that shrinks only tensors of two or more dimensions: never gains, biases or the scalars of a head."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learned:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    groups = [
        {"params": [parameter for parameter in learned if parameter.ndim >= 2], "weight_decay": config.decay},
        {"params": [parameter for parameter in learned if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    # a recorded update reads the rate from the device
    rate = torch.tensor(config.rate, device=learned[0].device) if config.graph else config.rate
    # fused on the CPU too: measured three times faster there, and it can leave out an update without asking the host
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=rate, betas=config.betas, fused=True, capturable=config.graph
    )


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
