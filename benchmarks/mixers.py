"""A training step of every architecture on RegBench, on a CPU: two layers of width 128, 32 examples of full length.

python -m benchmarks.mixers
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from benchmarks.common import append, environment, spread, time_in_turns
from compactattn.data.regbench import Epochs
from compactattn.experiments import in_context
from compactattn.models.language_model import build, count_parameters
from compactattn.training.config import RunConfig, vary
from compactattn.training.optimiser import build_optimiser

LAYERS, BATCH, GOAL = 2, 32, 1500  # milliseconds
VARIANTS = (*(name for name in in_context.RECIPES if name != "mosaic"), "mosaic:gaussian", "mosaic:sparsemax")


def configure(variant: str) -> RunConfig:
    """A recipe with so many layers; recurrent models are of our own form, which can have them."""
    name, _, kernel = variant.partition(":")
    recipe = in_context.paper(name, 1000, "own" if name in in_context.OWN else "")
    return vary(recipe, model={"layers": LAYERS, "kernel": kernel or "gaussian"}, training={"graph": False})


def make_step(variant: str) -> tuple[Callable[[], object], dict[str, object]]:
    """Forward, backward, clipping and AdamW in fp32, with the recipe's dropout, always on the same batch; and what it is."""
    config = configure(variant)
    model = build(config.model).train()
    optimiser = build_optimiser(model, config.training)
    batch = Epochs(in_context.Data.of(config).open().train, seed=0).batch(0, BATCH)

    def step() -> None:
        total, count = model.loss(batch.inputs, batch.targets, batch.counted)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip or math.inf)
        optimiser.step()
        optimiser.zero_grad()

    tokens = "x".join(map(str, batch.inputs.shape))
    return step, {"model": variant, "layers": LAYERS, "tokens": tokens, "parameters": count_parameters(model)}


def main() -> None:
    rows = []
    for variant in VARIANTS:
        step, facts = make_step(variant)
        rows.append(facts | spread(time_in_turns({variant: step}, seconds=5)[variant]) | {"goal_ms": GOAL})
        print(rows[-1], flush=True)
    print("rows added to", append("cpu_mixers", [row | environment() for row in rows]))


if __name__ == "__main__":
    main()
