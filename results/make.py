"""Makes the results of this folder: every row of the paper's tables, at the published sizes.

    python results/make.py length-gen --tasks mqmtar,sort --seeds 0 --steps 2000
    python results/make.py regbench --examples 1000,2500,5000 --epochs 200 --workers 6

One line for each run goes to a file under OUT (results/length-gen, results/regbench): config, environment, loss curve, wall
time, evaluation. A run that has its line already is left out, so the command can be repeated. It needs torch, numpy and
safetensors, and a GPU.
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

from compactattn.experiments import in_context
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.registry import experiment_of
from compactattn.memory.released import departs
from compactattn.report import paper, regbench_paper
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


def list_length_gen(given: argparse.Namespace) -> list[RunConfig]:
    """A config for each row of a table, task and seed; seeds vary slowest, so that every row has one before any has two."""
    chosen: dict[paper.Variant, paper.Row] = {}
    for row in (row for name, rows in TABLES.items() if given.table in ("all", name) for row in rows):
        chosen.setdefault(row.variant, row)  # the main table has the most cells
    extra = {"compile": "parts", "graph": True, "checkpoint_every": given.steps, "validate_every": 0}
    return [
        vary(
            length_gen.gpu_short(task),
            seed=seed,
            model={
                "architecture": variant.architecture, "kernel": str(variant.kernel),
                "positions": variant.positions, "as_released": variant.as_released,
            },
            training={"steps": given.steps, **extra},
        )
        for seed in read_numbers(given.seeds)
        for task in given.tasks.split(",")
        for variant, row in chosen.items()
        if any(where == task for where, _ in row.cells)
    ]  # fmt: skip


def list_regbench(given: argparse.Namespace) -> list[RunConfig]:
    """A config for each row of Table 1, number of examples and seed; small numbers first."""
    rows = {row.name: row.variant for row in regbench_paper.ROWS.values()}
    if unknown := [name for name in given.row or [] if name not in rows]:
        raise SystemExit(f"row {unknown[0]!r} is unknown; the rows are {', '.join(map(repr, rows))}")
    configs = []
    for seed in read_numbers(given.seeds):
        for examples in read_numbers(given.examples):
            for variant in (rows[name] for name in given.row or rows):
                kernel = {} if variant.kernel is None else {"kernel": str(variant.kernel)}
                base = in_context.paper(variant.architecture, examples)
                steps = given.epochs * examples // base.training.batch
                few = {"steps": steps, "warmup": steps // 10, "patience": given.patience, "checkpoint_every": steps}
                configs.append(vary(base, seed=seed, model=kernel, training=few))
    return configs


def read_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def describe(config: RunConfig) -> str:
    model = config.model
    what = config.data.get("task") or f"{config.data['examples']} examples"
    return f"{what} {model.architecture} {model.kernel} {model.positions} seed {config.seed}"


def make(config: RunConfig, out: Path) -> None:
    """Trains and evaluates one run and appends its line."""
    experiment, started = experiment_of(config), time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        summary = experiment.run(config, folder, show_progress=False)
        trained = time.time() - started
        experiment.complete_evaluation(config, folder, 1000)
        line = export(folder)
    file = os.open(
        out / f"{config.data.get('task') or config.data['examples']}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
    )
    os.write(file, (json.dumps(line) + "\n").encode())  # in one piece: several workers write
    os.close(file)
    shares = (
        row["exact"] / row["samples"] if "exact" in row else row["right"] / row["positions"] for row in line["evaluation"]
    )
    times = f"{summary.step} steps in {trained:.0f} s, evaluation {time.time() - started - trained:.0f} s"
    print(f"{describe(config)}: {' '.join(f'{share:.3f}' for share in shares)}  ({times})", flush=True)


def work(queue: Any, out: Path, deadline: float, failed: Any) -> None:
    while (config := queue.get()) is not None:
        if time.time() > deadline:
            print(f"no time left for {describe(config)}", flush=True)
            continue
        try:
            make(config, out)
        except Interrupted:
            return
        except Exception as error:  # one run that fails must not take the others with it
            print(f"FAILED {describe(config)}: {error!r}", flush=True)
            failed.value += 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="experiment", required=True)
    length = which.add_parser(length_gen.NAME)
    length.add_argument("--tasks", default="mqmtar,sort,reverse")
    length.add_argument("--table", default="all", choices=[*TABLES, "all"])
    length.add_argument("--steps", type=int, default=2000)
    length.set_defaults(list=list_length_gen)
    regbench = which.add_parser(in_context.NAME)
    regbench.add_argument("--examples", default="1000,2500,5000")
    regbench.add_argument("--row", action="append", help="a row of the table by its name there; all if not given")
    regbench.add_argument("--epochs", type=int, default=200)
    regbench.add_argument("--patience", type=int, default=40, help="epochs without a lower validation loss")
    regbench.set_defaults(list=list_regbench)
    for part in (length, regbench):
        part.add_argument("--seeds", default="0")
        part.add_argument("--workers", type=int, default=1, help="runs at a time on the one GPU")
        part.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
        part.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    given = read_arguments()
    out = given.out or Path("results") / given.experiment
    out.mkdir(parents=True, exist_ok=True)
    configs = given.list(given)
    done = [run.config for path in out.glob("*.jsonl") for run in load_results(path)]
    todo = [config for config in configs if config not in done]
    print(f"{len(todo)} of {len(configs)} runs to do on {torch.cuda.get_device_name()}", flush=True)
    context = processes.get_context("spawn")
    queue, failed = context.Queue(), context.Value("i", 0)
    for config in [*todo, *[None] * given.workers]:
        queue.put(config)
    deadline = time.time() + 60 * given.minutes
    workers = [context.Process(target=work, args=(queue, out, deadline, failed)) for _ in range(given.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return failed.value


if __name__ == "__main__":
    sys.exit(main())
