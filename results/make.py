"""Makes the results of this folder: every row of the paper's tables, at the published sizes.

    python results/make.py length-gen --tasks mqmtar,sort --seeds 0 --steps 2000
    python results/make.py regbench --examples 1000,2500,5000 --epochs 200 --workers 6
    python results/make.py lm --data data/stories --layers 1,8 --steps 2000 --ood simplewiki=data/simplewiki

One line for each run goes to a file under OUT (results/length-gen, results/regbench, results/lm): config, environment, loss
curve, cost, evaluation and, for a language model, a story; or that it diverged. A run that has its line already is left out, so
the command can be repeated. With --resume-dir DIR a run that is stopped, by a signal or after --minutes, saves its state there,
and the same command goes on with it. It needs torch, numpy and safetensors (lm with GPT-2 tokens also tiktoken), and a GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from compactattn.data.corpus import Corpus
from compactattn.experiments import in_context, language_modelling
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.registry import experiment_of
from compactattn.experiments.storytelling import Wish, tell_story
from compactattn.kernels import parse
from compactattn.memory.released import departs
from compactattn.models.generation import Sampling
from compactattn.report import lm_paper, paper, regbench_paper
from compactattn.report.runs import export, load_results
from compactattn.training.config import RunConfig, vary
from compactattn.training.divergence import Diverged
from compactattn.training.files import replace_durably
from compactattn.training.interrupt import Interrupted, stop_when

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
PROMPT, WISH = "Once upon a time", Wish(600, Sampling(temperature=0.8, top_p=0.95), seed=0)  # most stories end before that
WINDOWS = 2000  # of a text, at most


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
    check_rows(given.row, rows)
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


def list_lm(given: argparse.Namespace) -> list[RunConfig]:
    """A config for each depth and kernel, and the transformer; shallow models first, and every row before a second seed."""
    corpus = Corpus.open(given.data)
    pairs = (pair.partition("=") for pair in given.ood.split(",") if pair)
    given.texts = {name: where or name for name, _, where in pairs}
    for name, where in given.texts.items():  # before hours are spent on training
        language_modelling.open_text(language_modelling.Data.describe(corpus), where, name)
    few = {"steps": given.steps, "warmup": language_modelling.choose_warmup(given.steps), "checkpoint_every": given.steps,
           "validate_every": max(1, given.steps // given.validations), "keep": given.keep}  # fmt: skip
    few |= {name: value for name in ("batch", "rate", "final_rate") if (value := getattr(given, name)) is not None}
    return [
        vary(language_modelling.gpu_short(corpus, row.architecture, str(row.kernel), layers), seed=seed, training=few)
        for seed in read_numbers(given.seeds)
        for layers in read_numbers(given.layers)
        for row in choose_rows(given, layers)
    ]


def choose_rows(given: argparse.Namespace, layers: int) -> Sequence[Any]:
    """The rows that were asked for, or else the paper's: it compares several k at one layer and keeps one for deeper models."""
    if given.kernels:
        names = [name.strip() for name in re.split(r",(?![^()]*\))", given.kernels)]
        variants = [lm_paper.TRANSFORMER if name == "transformer" else paper.Variant("mosaic", parse(name)) for name in names]
    elif given.row:
        variants = list(lm_paper.ROWS)
    else:
        variants = [row for row in lm_paper.ROWS if layers == 1 or lm_paper.count_neighbours(row) in (None, given.k)]
    rows = {variant.label: variant for variant in variants}
    check_rows(given.row, rows)
    return [rows[name] for name in given.row or rows]


def check_rows(asked: Sequence[str] | None, rows: Sequence[str] | dict[str, Any]) -> None:
    if unknown := [name for name in asked or [] if name not in rows]:
        raise SystemExit(f"row {unknown[0]!r} is unknown; the rows are {', '.join(map(repr, rows))}")


def finish_lm(folder: Path, given: argparse.Namespace) -> None:
    """What a run of language modelling is asked beyond its validation split: other texts, and a story."""
    for name, where in given.texts.items():
        language_modelling.evaluate_run(folder, where, WINDOWS, name=name)
    tell_story(folder, PROMPT, WISH)


def strip_place(config: RunConfig) -> RunConfig:
    """The config without the folder of its corpus, which is another on every machine; name and checksum stay."""
    return replace(config, data={**config.data, "folder": ""}) if "folder" in config.data else config


def strip_folders(command: str) -> str:
    """A command line with the last name of each absolute path."""
    return re.sub(r"(?<![\w.])/(?:[^\s,='\"/]+/)+", "", command)


def read_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def name_part(config: RunConfig) -> str:
    """The part of the table that a run belongs to, and the file its line goes to."""
    data = config.data
    return str(data.get("task") or data.get("examples") or f"{data['corpus']}-{config.model.layers}")


def describe(config: RunConfig) -> str:
    model = config.model
    return f"{name_part(config)} {model.architecture} {model.kernel} {model.positions} seed {config.seed}"


def make(config: RunConfig, out: Path, given: argparse.Namespace) -> None:
    """Trains and evaluates one run and appends its line; one that diverges has a line too, and is not tried again."""
    started = time.time()
    with open_folder(config, given.resume_dir) as folder:
        try:
            train(config, folder)
            trained = time.time() - started
            experiment_of(config).complete_evaluation(config, folder, 1000)
            if given.finish is not None:
                given.finish(folder, given)
        except Diverged:
            trained = time.time() - started
        line = export(folder)
        append(line | {"config": line["config"] | {"data": strip_place(config).data}}, out / f"{name_part(config)}.jsonl")
    found = line.get("failed") or " ".join(map(show, line["evaluation"]))
    times = f"{line['steps']} steps in {trained:.0f} s, evaluation {time.time() - started - trained:.0f} s"
    print(f"{describe(config)}: {found}  ({times})", flush=True)


@contextmanager
def open_folder(config: RunConfig, place: Path | None) -> Iterator[Path]:
    """The folder of a run; one under `place` stays until its line is written, so that a run that was stopped can go on."""
    if place is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name) / "run"
    else:
        folder = place / hashlib.sha256(strip_place(config).to_json().encode()).hexdigest()[:16]
        yield folder
        shutil.rmtree(folder)


def train(config: RunConfig, folder: Path) -> None:
    """Trains a run, from where it was stopped if it was."""
    resume = (folder / "config.json").exists()
    if resume:
        replace_durably(folder / "config.json", config.to_json().encode())  # the corpus may lie elsewhere now
    experiment_of(config).run(config, folder, resume=resume, show_progress=False)


def append(line: dict[str, Any], path: Path) -> None:
    for part in (line["environment"], *line["environment"].get("resumed", [])):
        part["command"] = strip_folders(part["command"])
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())  # in one piece: several workers write
    os.close(file)


def show(row: dict[str, Any]) -> str:
    """An evaluation in a word: the share that is right, or the loss on a text."""
    if "exact" in row:
        return f"{row['exact'] / row['samples']:.3f}"
    return f"{row['right'] / row['positions']:.3f}" if "right" in row else f"{row['split']} {row['loss']:.4f}"


def work(queue: Any, out: Path, deadline: Any, failed: Any, given: argparse.Namespace) -> None:
    """Makes runs until none is left or the time is up; a deadline of 0 says that a signal came."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the parent hears it too; what is evaluated now comes to its end
    stop_when(lambda: time.time() > deadline.value and (given.resume_dir is not None or not deadline.value))
    while (config := queue.get()) is not None:
        if time.time() > deadline.value:
            print(f"no time left for {describe(config)}", flush=True)
            continue
        try:
            make(config, out, given)
        except Interrupted as error:
            kept = "its state is kept" if given.resume_dir else "its state is lost without --resume-dir"
            print(f"{describe(config)}: {str(error).partition(' and')[0]}; {kept}", flush=True)
        except Exception as error:  # one run that fails must not take the others with it
            print(f"FAILED {describe(config)}: {error!r}", flush=True)
            failed.value += 1
        gc.collect()  # a run and its recorded graph hold each other, and the memory of the next one is measured


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="experiment", required=True)
    length = which.add_parser(length_gen.NAME)
    length.add_argument("--tasks", default="mqmtar,sort,reverse")
    length.add_argument("--table", default="all", choices=[*TABLES, "all"])
    length.add_argument("--steps", type=int, default=2000)
    length.set_defaults(list=list_length_gen, finish=None)
    regbench = which.add_parser(in_context.NAME)
    regbench.add_argument("--examples", default="1000,2500,5000")
    regbench.add_argument("--row", action="append", help="a row of the table by its name there; all if not given")
    regbench.add_argument("--epochs", type=int, default=200)
    regbench.add_argument("--patience", type=int, default=40, help="epochs without a lower validation loss")
    regbench.set_defaults(list=list_regbench, finish=None)
    lm = which.add_parser(language_modelling.NAME)
    lm.add_argument("--data", type=Path, required=True, help="a corpus that `compactattn data` has prepared")
    lm.add_argument("--ood", default="", help="other texts to evaluate on, as in simplewiki=DIR,tinystories=DIR")
    lm.add_argument("--layers", default="1,8")
    lm.add_argument("--kernels", default="", help="kernels, and transformer; all rows of the paper if not given")
    lm.add_argument("--row", action="append", help="one of them by its name in the report, as in 4/3-entmax")
    lm.add_argument("--k", type=int, default=32, choices=lm_paper.NEIGHBOURS, help="of deeper models; the paper takes 32")
    lm.add_argument("--steps", type=int, default=2000)
    lm.add_argument("--validations", type=int, default=20, help="during training")
    lm.add_argument("--keep", default="last", choices=["last", "best"], help="weights to evaluate; the paper's are the last")
    lm.add_argument("--batch", type=int)
    lm.add_argument("--rate", type=float)
    lm.add_argument("--final-rate", type=float)
    lm.set_defaults(list=list_lm, finish=finish_lm)
    for part in (length, regbench, lm):
        part.add_argument("--seeds", default="0")
        part.add_argument("--workers", type=int, default=1, help="runs at a time on the one GPU")
        part.add_argument("--minutes", type=float, default=1e6, help="start no run after these; with --resume-dir, stop all")
        part.add_argument("--resume-dir", type=Path, help="folder for the state of runs that are stopped, to go on with later")
        part.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    given = read_arguments()
    out = given.out or Path("results") / given.experiment
    out.mkdir(parents=True, exist_ok=True)
    configs = given.list(given)
    done = [run.config for path in out.glob("*.jsonl") for run in load_results(path)]
    todo = [config for config in configs if strip_place(config) not in done]
    print(f"{len(todo)} of {len(configs)} runs to do on {torch.cuda.get_device_name()}", flush=True)
    context = processes.get_context("spawn")
    queue, failed = context.Queue(), context.Value("i", 0)
    for config in [*todo, *[None] * given.workers]:
        queue.put(config)
    deadline = context.Value("d", time.time() + 60 * given.minutes, lock=False)
    workers = [context.Process(target=work, args=(queue, out, deadline, failed, given)) for _ in range(given.workers)]
    for worker in workers:
        worker.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(deadline, "value", 0))
    for worker in workers:
        worker.join()
    return failed.value


if __name__ == "__main__":
    sys.exit(main())
