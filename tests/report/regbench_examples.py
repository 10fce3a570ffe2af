"""Made-up runs of RegBench, to see what a report does with them; no result of any training."""

import math

import numpy as np
from report_examples import ENVIRONMENT

from compactattn.experiments.in_context import RECIPES
from compactattn.models.config import ModelConfig
from compactattn.report.evaluations import Bins, Part, Scored
from compactattn.report.regbench_paper import ROWS
from compactattn.report.runs import Cost, Run
from compactattn.training.config import RunConfig, TrainingConfig

EDGES = tuple(range(0, 513, 32))


def make_config(
    kernel="sparsemax", seed=0, examples=1000, architecture="mosaic", changes=None, epochs=200, model=None, **training
):
    model = {**RECIPES[architecture].model, **(model or {})}
    per_epoch, steps = examples // 32, epochs * examples // 32  # as the presets count
    longest = {"positions": "learned", "longest": 950} if architecture == "transformer" else {}
    steps = {"steps": steps, "warmup": steps // 10, "validate_every": per_epoch}
    return RunConfig(
        "regbench",
        seed,
        ModelConfig(20, architecture=architecture, kernel=kernel, **model, **longest),
        TrainingConfig(**steps | {"batch": 32, "rate": 5e-4, "final_rate": 5e-5, "betas": (0.9, 0.999)} | training),
        {"examples": examples, "changes": changes or {}},
    )


def make_score(accuracy, tvd, examples=1000, split="test", samples=500, **changes):
    """The line of an evaluation with these shares, better where more of the language was seen."""
    full = np.array([32 * samples] * (len(EDGES) - 4) + [samples, 5, 0])
    right = np.minimum(full, full * accuracy * (1 - 0.4 * np.exp(-np.arange(len(full)) / 2))).astype(int)
    bins = Bins(EDGES, tuple(map(int, full)), tuple(map(int, right)), (tvd,) * len(full))
    positions = 300 * samples
    whole = {"positions": positions, "right": round(accuracy * positions), "tvd": tvd, "by_position": bins}
    parts = {
        "inside": Part(280 * samples, round(280 * samples * max(accuracy - 0.01, 0)), tvd),
        "last": Part(samples, round(samples * min(accuracy + 0.02, 1)), tvd),
    }
    rest = {"loss": 1.0, "step": 3000, "epoch": 97, "checksum": f"{examples:064d}", "precision": "fp32"}
    return Scored("regbench", split, examples, samples, **whole | parts | rest | changes)


def make_run(accuracy=0.94, tvd=0.33, source="run", score=None, evaluated=True, **config):
    """A run that reaches an accuracy and a TVD."""
    config = make_config(**config)
    steps, per_epoch = config.training.steps, config.training.validate_every
    losses = [(step, 1 + 2 * math.exp(-step / 400)) for step in (*range(10, steps, 10), steps)]
    low = 1 + tvd
    validations = [(per_epoch * n, low + 1.5 * math.exp(-n / 15) + 0.001 * n) for n in range(1, steps // per_epoch + 1)]
    rows = [make_score(accuracy, tvd, config.data["examples"], **score or {})] if evaluated else []
    return Run(config, ENVIRONMENT, steps, Cost(600.0), losses, rows, source, validations)


def make_all_runs(seeds=1, sizes=(1000, 2500, 5000)):
    """A run of every row of the paper's table, size and seed, near the paper's numbers; Mamba and normReLU are far off."""
    draws = np.random.default_rng(0)
    runs = []
    for variant, row in ROWS.items():
        worse = 0.12 if variant.label in ("Mamba", "normReLU") else 0.0
        for size in sizes:
            for seed in range(seeds):
                accuracy, tvd = (value + draws.normal(0, 0.004) for value in row.cells[size])
                at = {"kernel": str(variant.kernel)} if variant.kernel else {}
                source = f"{variant.label}-{size}-{seed}"
                at |= {"architecture": variant.architecture, "seed": seed, "examples": size, "source": source}
                runs.append(make_run(accuracy - worse, tvd + worse, **at))
    return runs
