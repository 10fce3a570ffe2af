"""Made-up runs and looks at attention, to see what a report does with them; no result of any training."""

import json
import math

import numpy as np

from compactattn.kernels import parse
from compactattn.models.config import ModelConfig
from compactattn.report.evaluations import Evaluated
from compactattn.report.inspection import Inspection
from compactattn.report.paper import LENGTHS, MAIN, RECIPES
from compactattn.report.runs import Cost, Run
from compactattn.training.config import RunConfig, TrainingConfig

ENVIRONMENT = {
    "commit": "0123456789abcdef", "python": "3.12.3", "torch": "2.11.0", "device": "A GPU", "processes": 1, "threads": 8,
    "started": "2026-01-01T00:00:00+00:00", "command": "compactattn train length-gen --task mqmtar <&>",
}  # fmt: skip
TIMING = ("step", "seconds", "tokens_per_second", "peak_bytes")


def make_config(
    kernel="sparsemax", seed=0, task="mqmtar", steps=2000, architecture="mosaic", positions="none", data=None, **model
):
    layers = RECIPES[task].layers if task in RECIPES else 4
    model = {"vocab": 263 if task == "mqmtar" else 36, "layers": layers, "width": 512, "heads": 8} | model
    return RunConfig(
        "length-gen",
        seed,
        ModelConfig(architecture=architecture, kernel=kernel, positions=positions, **model),
        TrainingConfig(steps=steps, batch=256, warmup=min(200, steps - 1)),
        {"task": task, "shortest": 32, "longest": 64} | (data or {}),
    )


def make_run(shares=None, mode="teacher-forced", samples=1000, losses=None, source="run", **config):
    """A run that got the given share of the samples right at each length."""
    config = make_config(**config)
    task, steps = config.data["task"], config.training.steps
    shares = {64: 1.0, 128: 0.9, 256: 0.5} if shares is None else shares
    evaluation = [
        Evaluated(
            task, n, mode, samples, round(share * samples), samples * 8, round(samples * 8 * share**0.5), steps, "ab" * 32
        )
        for n, share in shares.items()
    ]
    losses = [(step, 5 * math.exp(-step / 400) + 0.01) for step in range(10, steps + 1, 10)] if losses is None else losses
    return Run(config, ENVIRONMENT, steps, Cost(1800.0, 5e4, 3 << 30), losses, evaluation, source)


def make_all_runs(seeds=3):
    """A run of every row of the paper's main table, task and seed, near the paper's numbers but lower."""
    draws = np.random.default_rng(0)
    runs = []
    for row in MAIN.rows:
        for task in MAIN.tasks:
            for seed in range(seeds):
                shares, luck = {}, draws.normal(0, 0.05)
                for length in LENGTHS[task]:
                    mean = row.cells[task, length].mean
                    shares[length] = float(np.clip(mean ** (1 + 0.25 * math.log2(length / 32)) + luck * (0 < mean < 1), 0, 1))
                speed = 300 + 60 * draws.random()
                losses = [(s, 5 * math.exp(-s / speed) + 0.02 * draws.random() + 0.01) for s in range(10, 2001, 10)]
                kernel = str(row.variant.kernel)
                at = {"architecture": row.variant.architecture, "positions": row.variant.positions, "task": task, "seed": seed}
                runs.append(make_run(shares, kernel=kernel, losses=losses, source=f"{kernel}-{task}-{seed}", **at))
    return runs


def write_folder(run, folder):
    """The run folder that would read back as this run."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(run.config.to_json())
    (folder / "environment.json").write_text(json.dumps(dict(run.environment)))
    write_lines(folder / "metrics.jsonl", [{"step": step, "loss": loss, "rate": 1e-3} for step, loss in run.losses])
    seconds, speed, peak = run.cost
    times = [(seconds / 2, speed / 9, peak // 2), (seconds / 4, speed, peak), (seconds / 4, speed, peak)]  # it compiled first
    write_lines(folder / "timing.jsonl", [dict(zip(TIMING, (i, *line), strict=True)) for i, line in enumerate(times, 1)])
    write_lines(folder / "evaluation.jsonl", [vars(row) | {"seed": run.config.seed} for row in run.evaluation])
    return folder


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_inspection(kernel="sparsemax", layer=0, heads=8, length=90, keep=4):
    """Causal weights with at most `keep` keys for each query, all keys for the Gaussian."""
    draws = np.random.default_rng(layer)
    scores = draws.normal(0, 2, (length, length)) + 4 * np.eye(length, k=-7)
    weights = np.where(np.tri(length, k=-1) > 0, np.exp(scores), 0)
    if parse(kernel).compact:
        weights[weights < np.sort(weights, 1)[:, -keep, None]] = 0
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
    support = np.stack(
        [np.clip((weights > 0).sum(1) + draws.integers(0, 2, length) * (np.arange(length) > 5), 0, None)] * heads
    )
    bandwidth = np.abs(draws.normal(0.5, 0.1, (heads, length)))
    return Inspection(kernel, layer, 0, weights, support, bandwidth)


def tidy(text):
    """A sentence with plain spaces, to be compared."""
    return text.replace("\u00a0", " ")


def speak(compare, find):
    """The comparison of some runs that belong together, and headline and details of what is found in it."""

    def comparison_of(*runs):
        (comparison,) = compare(runs)
        return comparison

    def told(*runs):
        finding = find(comparison_of(*runs))
        return tidy(finding.headline), tidy(" ".join(finding.details))

    return comparison_of, told
