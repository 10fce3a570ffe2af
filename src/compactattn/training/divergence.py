"""Where a loss that is no number came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from compactattn.attention import ScaleError
from compactattn.training.config import RunError


class Diverged(RunError):
    """The loss or its gradient is not finite. The weights are those before that step."""


def blame(model: nn.Module, losses: Iterable[Callable[[], Tensor]]) -> str:
    """Names the first part of the model that is not finite while one of the losses is computed again.

    Parameters come first, then outputs in the order they are made, then the loss, then gradients from the loss backwards.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _finite(tensor):
            return f"parameter {name}"
    for loss in losses:
        model.zero_grad(set_to_none=True)
        found: list[str] = []
        handles = [module.register_forward_hook(_watch(name, found)) for name, module in model.named_modules() if name]
        try:
            total = loss()
        except ScaleError:
            return "a scale of attention"
        finally:
            for handle in handles:
                handle.remove()
        if found:
            return f"the output of {found[0]}"
        if not _finite(total):
            return "the loss itself, after every layer's output was finite"
        total.backward()
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None and not _finite(parameter.grad):
                return f"the gradient of {name}"
    return "no single layer when the step was done again: the sum over the batch overflows, or the hardware erred"


def _watch(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _finite(output):
            found.append(name)

    return look


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return all(_finite(part) for part in value) if isinstance(value, (tuple, list)) else True
