"""Makes the results of this folder: every row of the paper's tables of length generalisation, at the published sizes.

    python results/make.py --tasks mqmtar,sort --seeds 0 --steps 2000 --out results/length-gen

One line for each run goes to OUT/TASK.jsonl: config, environment, loss curve, wall time, evaluation. A run that has its
line already is left out, so the command can be repeated. It needs torch, numpy and safetensors, and a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.length_generalisation import evaluate_run
from compactattn.memory.released import departs
from compactattn.report import paper
from compactattn.report.runs import export, load_results
from compactattn.training.config import RunConfig, vary
from compactattn.training.interrupt import Interrupted

RELEASED = tuple(  # the rows that the published code computes otherwise than the paper's equations
    replace(row, variant=replace(row.variant, as_released="efficient"))
    for row in paper.MAIN.rows
    if row.variant.architecture == "mosaic" and departs(row.variant.kernel, "efficient")
)
TABLES = {
    "main": paper.MAIN.rows,
    "neighbours": paper.NEIGHBOURS.rows,
    "alibi": paper.ALIBI.rows,
    "released": RELEASED,
}


def list_configs(tasks: list[str], seeds: list[int], table: str, steps: int, extra: dict[str, Any]) -> list[RunConfig]:
    """A config for each row of a table, task and seed; seeds vary slowest, so that every row has one before any has two."""
    chosen: dict[paper.Variant, paper.Row] = {}
    for row in (row for name, rows in TABLES.items() if table in ("all", name) for row in rows):
        chosen.setdefault(row.variant, row)  # the main table has the most cells
    return [
        vary(
            length_gen.gpu_short(task),
            seed=seed,
            model={
                "architecture": variant.architecture, "kernel": str(variant.kernel),
                "positions": variant.positions, "as_released": variant.as_released,
            },
            training={"steps": steps, **extra},
        )
        for seed in seeds
        for task in tasks
        for variant, row in chosen.items()
        if any(where == task for where, _ in row.cells)
    ]  # fmt: skip


def make(config: RunConfig, out: Path) -> None:
    """Trains and evaluates one run and appends its line."""
    started = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        length_gen.run(config, folder, show_progress=False)
        trained = time.time() - started
        evaluate_run(folder, paper.LENGTHS[config.data["task"]])
        line = export(folder)
    task = config.data["task"]
    file = os.open(out / f"{task}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())  # in one piece: several workers write
    os.close(file)
    shares = " ".join(f"{row['exact'] / row['samples']:.2f}" for row in line["evaluation"])
    print(f"{task} {config.model.architecture} {config.model.kernel} {config.model.positions} seed {config.seed}: {shares}"
          f"  ({trained:.0f} s training, {time.time() - started - trained:.0f} s evaluation)", flush=True)  # fmt: skip


def work(queue: Any, out: Path, deadline: float, failed: Any) -> None:
    while (config := queue.get()) is not None:
        if time.time() > deadline:
            print(f"no time left for {config.data['task']} {config.model.kernel}", flush=True)
            continue
        try:
            make(config, out)
        except Interrupted:
            return
        except Exception as error:  # one run that fails must not take the others with it
            print(f"FAILED {config.data['task']} {config.model.kernel}: {error!r}", flush=True)
            failed.value += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="mqmtar,sort,reverse")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--table", default="all", choices=[*TABLES, "all"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time on the one GPU")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
    parser.add_argument("--out", type=Path, default=Path("results/length-gen"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    configs = list_configs(
        given.tasks.split(","),
        [int(seed) for seed in given.seeds.split(",")],
        given.table,
        given.steps,
        {"compile": "parts", "graph": True, "checkpoint_every": given.steps, "validate_every": 0},
    )
    done = [run.config for path in given.out.glob("*.jsonl") for run in load_results(path)]
    todo = [config for config in configs if config not in done]
    print(f"{len(todo)} of {len(configs)} runs to do on {torch.cuda.get_device_name()}", flush=True)
    context = processes.get_context("spawn")
    queue, failed = context.Queue(), context.Value("i", 0)
    for config in [*todo, *[None] * given.workers]:
        queue.put(config)
    deadline = time.time() + 60 * given.minutes
    workers = [context.Process(target=work, args=(queue, given.out, deadline, failed)) for _ in range(given.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return failed.value


if __name__ == "__main__":
    sys.exit(main())
