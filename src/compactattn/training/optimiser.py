"""AdamW with the decay rule of the recipes, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compactattn.training.config import TrainingConfig


def rate_at(step: int, config: TrainingConfig) -> float:
    """Learning rate of update `step`, the first being 1: linear to `rate` at `warmup`, a cosine to `final_rate` at the horizon.

    After the horizon the rate stays; a run that ends before it ends at a higher rate.
    """
    if step <= config.warmup:
        return config.rate * step / config.warmup
    along = min(1.0, (step - config.warmup) / ((config.horizon or config.steps) - config.warmup))
    share = (1 + math.cos(math.pi * along)) / 2
    return config.final_rate + (config.rate - config.final_rate) * share


def build_optimiser(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over groups of parameters that share a weight decay and a rate.

    Only tensors of two or more dimensions decay, or all with `decay_all`. A module may say more of its own parameters: those
    named in its SSM are bounded by `ssm_rate`, those in its EMBEDDING take `embedding_rate`.
    """
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not learned:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    special = {kind: _list_special(model, kind) for kind in ("SSM", "EMBEDDING")}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for decays in (True, False):  # the order of older checkpoints' groups; what is restored goes by name
        for name, parameter in learned.items():
            if decays == (config.decay_all or parameter.ndim >= 2):
                decay, factor = config.decay if decays else 0.0, 1.0
                if config.ssm_rate and name in special["SSM"]:
                    decay, factor = 0.0, min(1.0, config.ssm_rate / config.rate)
                if name in special["EMBEDDING"]:  # AdamW shrinks by rate · decay: that stays
                    decay, factor = decay / config.embedding_rate, config.embedding_rate
                groups.setdefault((decay, factor), []).append(parameter)
    device = next(iter(learned.values())).device
    # fused on the CPU too: measured three times faster there, and it can leave out an update without asking the host
    return torch.optim.AdamW(
        [
            # a recorded update reads the rate from the device
            {"params": members, "weight_decay": decay, "factor": factor,
             "lr": torch.tensor(config.rate * factor, device=device) if config.graph else config.rate * factor}
            for (decay, factor), members in groups.items()
        ],
        lr=config.rate, betas=config.betas, fused=True, capturable=config.graph,
    )  # fmt: skip


def _list_special(model: nn.Module, kind: str) -> set[str]:
    """The full names of the parameters that modules name in their attribute SSM or EMBEDDING."""
    return {
        f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules() for name in getattr(module, kind, ())
    }


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Gives each group the rate, times its own factor."""
    for group in optimiser.param_groups:
        own = rate * group["factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
