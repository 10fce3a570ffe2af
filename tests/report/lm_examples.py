"""Made-up runs of language modelling, to see what a report does with them; no result of any training."""

import dataclasses
import json
import math

import numpy as np
from report_examples import ENVIRONMENT, write_folder, write_lines

from compactattn.experiments import language_modelling as lm
from compactattn.models.config import ModelConfig
from compactattn.report.evaluations import Predicted, Story, Stretches
from compactattn.report.lm_paper import ROWS
from compactattn.report.runs import Cost, Run
from compactattn.training.config import RunConfig, TrainingConfig

EDGES = tuple(range(0, 513, 4))
USUAL = {"steps": 2000, "batch": 64, "rate": 5e-3, "final_rate": 1e-4, "warmup": 200, "keep": "last"}
SHIFTS = {"validation": 0.0, "simplewiki": 2.4, "tinystories": 0.6}
TEXT = " there was a small fox.\n\nIt met <b>Anna & Tom</b> by the river, and *they* played all day.\nThe end."


def make_config(kernel="sparsemax", seed=0, layers=1, architecture="mosaic", data=None, width=768, **changes):
    longest = {"positions": "learned", "longest": 512} if architecture == "transformer" else {}
    model = {name: changes.pop(name) for name in [*changes] if name in ModelConfig.__annotations__}
    return RunConfig(
        "lm",
        seed,
        ModelConfig(50257, layers, width, 12, architecture, kernel, **lm.drop(0.05) | model, **longest),
        TrainingConfig(**USUAL | changes),
        {"corpus": "stories", "length": 512, "validation_windows": 200, "tokenizer": "gpt2"} | (data or {}),
    )


def make_row(loss=2.5, split="validation", early=0.0, windows=200, **changes):
    """The line of an evaluation with this loss, higher where little of the window was read; `early` is added at its start."""
    ends = np.array(EDGES[1:])
    shape = 3 / np.sqrt(ends) + early * np.exp(-ends / 16)
    by_position = loss + shape - (3 / np.sqrt(ends)).mean() - (early * np.exp(-ends / 16)).mean()
    stretches = Stretches(EDGES, (4 * windows,) * len(ends), tuple(float(f"{y:.6g}") for y in by_position))
    rest = {"perplexity": math.exp(loss), "bits_per_byte": loss / 3.1, "by_position": stretches, "step": 2000}
    rest |= {"checksum": f"{split:>064}", "precision": "fp32", "tokenizer": "gpt2", "text_bytes": 400_000}
    return Predicted("lm", split, windows, 512 * windows, loss, **rest | changes)


def make_run(loss=2.5, source="run", splits=tuple(SHIFTS), rows=None, early=0.0, stories=True, wall=600.0, end=0.0, **config):
    """A run that reaches a loss; its validation loss ends `end` above its lowest."""
    config = make_config(**config)
    steps = config.training.steps
    curve = [(step, loss + 6 * math.exp(-6 * step / steps) - 6 * math.exp(-6)) for step in range(100, steps + 1, 100)]
    validations = [*curve[:-1], (steps, curve[-1][1] + end)]
    losses = [(step, 2.2 + 6 * math.exp(-step / 300)) for step in range(10, steps + 1, 10)]
    rows = [make_row(loss + SHIFTS[split], split, early) for split in splits] if rows is None else rows
    told = [Story("Once upon a time", TEXT, 0.8, 50, 0.95, 0.0, 7, 0, steps)] if stories else []
    cost = Cost(wall, 1.2 * steps * config.training.batch * 512 / wall, 5 << 30) if wall else Cost()
    return Run(config, ENVIRONMENT, steps, cost, losses, rows, source, validations, told)


def make_failed(step=400, **config):
    """A run that diverged."""
    run = make_run(rows=[], stories=False, **config)
    losses, validations = ([point for point in curve if point[0] < step] for curve in (run.losses, run.validations))
    failed = f"diverged at step {step:,}, loss nan"
    return dataclasses.replace(run, steps=losses[-1][0], losses=losses, validations=validations, failed=failed)


def make_all_runs(seeds=1, depths=(1, 8), few=True):
    """A run of every row, depth and seed, close together but for normReLU, which is far behind."""
    draws = np.random.default_rng(0)
    runs = []
    for layers in depths:
        for index, (variant, name) in enumerate(ROWS.items()):
            if few and ("k=16" in name or "k=64" in name):
                continue
            worse = 0.9 if "normReLU" in name else 0.0
            for seed in range(seeds):
                loss = 2.6 - 0.1 * layers / 8 + worse + 0.004 * (index % 5) + draws.normal(0, 0.003)
                at = {"architecture": variant.architecture, "layers": layers, "seed": seed}
                source = f"{name}-{layers}-{seed}"
                early = 0.02 * (index % 3)
                runs.append(make_run(loss, source, kernel=str(variant.kernel), early=early, wall=500 + 20 * index, **at))
    return runs


def plain(row):
    return json.loads(json.dumps(dataclasses.asdict(row)))


def write_lm_folder(run, folder):
    """The run folder that would read back as this run of language modelling."""
    write_folder(dataclasses.replace(run, evaluation=[]), folder)
    write_lines(folder / "evaluation.jsonl", [plain(row) | {"seed": run.config.seed} for row in run.evaluation])
    if run.stories:
        write_lines(folder / "stories.jsonl", [plain(story) for story in run.stories])
    with (folder / "metrics.jsonl").open("a") as file:
        for step, loss in run.validations:
            file.write(json.dumps({"step": step, "validation": {"loss": loss}}) + "\n")
    return folder
