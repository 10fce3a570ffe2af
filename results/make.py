"""Makes the results of this folder: every row of the paper's tables, at the published sizes.

    python results/make.py plan                                           # the runs that are due, with their commands
    python results/make.py length-gen --tasks mqmtar,sort --seeds 0 --steps 2000
    python results/make.py regbench --examples 1000,2500,5000 --epochs 200 --workers 6
    python results/make.py lm --data data/stories --layers 1,8 --steps 2000 --ood simplewiki=data/simplewiki
    OMP_NUM_THREADS=1 python results/make.py cpu --workers 2              # small runs that a CPU can make

One line for each run goes to a file under OUT (results/length-gen, results/regbench, results/lm, results/cpu): config,
environment, loss curve, cost, evaluation and, for a language model, a story; or that it diverged. A run that has its line
already is left out, so the command can be repeated. The state of a run that is stopped or fails is kept, and with
--resume-dir DIR the same command goes on with it. Where that is given from the first, a run also outlives a kill, and
--minutes stops those that are under way.
It needs torch, numpy and safetensors (lm with GPT-2 tokens also tiktoken) and, but for plan and cpu, a GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, log
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.multiprocessing as processes

from compactattn.data.corpus import Corpus
from compactattn.experiments import in_context, language_modelling
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.registry import experiment_of
from compactattn.experiments.storytelling import Wish, tell_story
from compactattn.kernels import parse, split_names
from compactattn.memory.released import departs
from compactattn.models.config import ModelConfig
from compactattn.models.generation import Sampling
from compactattn.models.language_model import build
from compactattn.report import lm_paper, paper, regbench_paper
from compactattn.report.evaluations import Predicted
from compactattn.report.lines import lost_patience
from compactattn.report.runs import Run, export, load_results
from compactattn.training.config import RunConfig, RunError, vary
from compactattn.training.divergence import Diverged
from compactattn.training.files import replace_durably
from compactattn.training.interrupt import Interrupted, stop_when
from compactattn.training.records import describe_environment

TABLES = {"main": paper.MAIN.rows, "neighbours": paper.NEIGHBOURS.rows, "alibi": paper.ALIBI.rows}


class Due(NamedTuple):
    """A GPU run that is due: what it settles, its command, its minutes on one H200, and what it should show."""

    title: str
    command: str  # behind `python results/make.py`
    minutes: int
    prediction: str


LONG = "length-gen --table main --tasks mqmtar,sort --steps 10000 --workers 3"
STORIES = "lm --data data/stories --layers 8 --kernels gaussian,triweight --steps 1000"
PLAN = (  # in the order of what they settle
    Due("RegBench from the published start, the benchmark's rate",
        "regbench --examples 1000 --architectures mosaic --workers 8", 4,
        "Gaussian 93.4 % accuracy and TVD 22 (former start: 92.3 and 24.5)"),
    Due("the same at the rate of the paper's repository",
        "regbench --examples 1000 --architectures mosaic --recipe repository --workers 8", 5,
        "Gaussian near the paper's 93.9 % and TVD 34.1: high accuracy, under-confident"),
    Due("normalised ReLU on the path that RegBench's code imports",
        'regbench --examples 1000 --row "Epanechnikov (normReLU)" --as-released plain', 1,
        "near the paper's 84.3 % and TVD 43.6, which the equation's row is not"),
    Due("normalised ReLU and ReLUmax on that path, at the repository's rate",
        "regbench --examples 1000 --architectures mosaic --as-released plain --recipe repository --workers 2", 2,
        "nearer to 84.3 % and TVD 43.6, and to ReLUmax's 36.8, than the equations (93.2 and 33.0; 33.5)"),
    Due("Mamba as one bare layer",
        "regbench --examples 1000,2500,5000 --architectures mamba --workers 3", 2,
        "69.4, 79.4 and 88.7 % (four residual blocks: 51.8, 63.6 and 82.8 %)"),
    Due("the transformer with attention dropout, without patience",
        "regbench --examples 2500 --architectures transformer --patience 0", 3,
        "92.4 % and TVD 20.5 (without: 22.7), best epoch near 176 of 200"),
    Due("MQMTAR and sort for five times as many steps",
        f"{LONG} --kernels gaussian,sparsemax,biweight,norm_relu", 36,
        "sort is learnt by each; normalised ReLU by its equation is slow, its loss still falling"),
    Due("normalised ReLU by the plain path",
        f"{LONG} --kernels norm_relu --as-released plain", 9,
        "MQMTAR is learnt: its support is cos > 0.126 at the start, the equation's cos > 0.93"),
    Due("normalised ReLU by the efficient path",
        f"{LONG} --kernels norm_relu --as-released efficient", 9,
        "as slow as the equation, as in the small runs on a CPU"),
    Due("language models from the published start",
        STORIES, 5, "still behind GPT-2's output layer after 1,000 steps (former start: 3.137 and 3.085)"),
    Due("the same with the tied embedding at √width times the rate",
        f"{STORIES} --fast-embedding", 5,
        "the gap to the plain output (2.672 and 2.558) closes, if the output layer is only slow"),
)  # fmt: skip


def print_plan() -> None:
    """The runs that are due, in the order of what they settle; those that have their lines are done."""
    left = 0
    for number, due in enumerate(PLAN, start=1):
        asked, found = find_lines(due)
        complete = sum(map(is_complete, found))
        done = asked and complete == len(asked)
        left += 0 if done else due.minutes
        stopped = f", {len(found) - complete} stopped" if complete < len(found) else ""
        state = "done" if done else f"{complete} of {len(asked)} runs done{stopped}" if found else f"{due.minutes} min"
        print(f"{number}. {due.title} ({state})")
        print(f"   python results/make.py {due.command}\n   expected: {due.prediction}\n")
    print(f"At most {left} minutes on one H200 are left. data/stories: compactattn data text FILE --out data/stories")


def find_lines(due: Due, root: Path = Path(__file__).parent) -> tuple[list[RunConfig], list[Run]]:
    """The configs that an item asks for, and the lines under results/ that some of them have; none without their corpus."""
    given = read_arguments(shlex.split(due.command))
    given.out = root / given.experiment
    try:
        asked = [config for configs in given.list(given) for config in configs]
    except (ValueError, OSError):
        return [], []
    lines = {identify(run.config).to_json(): run for run in read_lines(given.out)}
    return asked, [lines[key] for config in asked if (key := identify(config).to_json()) in lines]


PROMPT, WISH = "Once upon a time", Wish(600, Sampling(temperature=0.8, top_p=0.95), seed=0)  # most stories end before that
WINDOWS = 2000  # of a text, at most
BETWEEN_CHECKPOINTS = 500  # steps, where a run is to go on after a kill

Variation = tuple[RunConfig, dict[str, Any]]  # a config, and the fields of its model to change
Configure = Callable[[Mapping[int, Iterable[paper.Variant]]], list[RunConfig]]  # from the rows of each depth

# -- what there is to do -------------------------------------------------------------------------


def list_cpu(given: argparse.Namespace) -> Iterator[list[RunConfig]]:
    """The small runs of each table, a file each, seeds varying slowest."""
    asked = given.tables.split(",")
    for name in asked:
        if name not in (FIRST_LOSS, *CPU_TABLES):
            raise ValueError(f"table {name!r} is unknown; choose among {', '.join((FIRST_LOSS, *CPU_TABLES))}")
    if FIRST_LOSS in asked:
        write_first_losses(given)
    for given.part in (name for name in asked if name != FIRST_LOSS):
        yield [
            vary(base, seed=seed, model=model, training={"device": "cpu", "checkpoint_every": base.training.validate_every})
            for seed in read_numbers(given.seeds)
            for base, model in CPU_TABLES[given.part]()
        ]


def write_first_losses(given: argparse.Namespace) -> None:
    """The loss of untrained Memory Mosaics on tokens of equal chance, by vocabulary, width, start and seed."""
    lines = []
    for (vocab, width), start, seed in product(FIRST_SIZES, ("former", "published"), read_numbers(given.seeds)):
        began = time.time()
        config = ModelConfig(vocab, layers=2, width=width, heads=8, slots=64, start=cast(Any, start))
        tokens = torch.randint(vocab, (4, 129), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            model = build(config, seed).eval()
            total, count = model.loss(tokens[:, :-1], tokens[:, 1:], torch.ones(4, 128, dtype=torch.bool))
        line = {"vocab": vocab, "width": width, "start": start, "seed": seed, "loss": round(float(total / count), 4)}
        line |= {"log_vocab": round(log(vocab), 4), "wall_seconds": round(time.time() - began, 2)}
        lines.append(line | {"environment": strip_command(describe_environment(torch.device("cpu"), 1))})
    given.out.mkdir(parents=True, exist_ok=True)
    replace_durably(given.out / f"{FIRST_LOSS}.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())


FIRST_LOSS, FIRST_SIZES = "first-loss", ((20, 128), (263, 512), (50_257, 768))  # of RegBench, MQMTAR and stories
FULL = "full"  # hours, so that it is made only where it is asked for
CPU_TABLES: Mapping[str, Callable[[], list[Variation]]] = {
    "start": lambda: [
        (in_context.cpu_quick("mosaic", 1000), {"kernel": kernel, "start": start})
        for start in ("former", "published")
        for kernel in ("gaussian", "sparsemax")
    ],
    "mamba": lambda: [(in_context.cpu_quick("mamba", 1000, form), {}) for form in ("own", "benchmark")],
    "norm-relu": lambda: [
        (length_gen.cpu_quick("mqmtar"), {"kernel": "norm_relu", **change})
        for change in ({}, {"beta_squared": 0.5}, {"as_released": "plain"}, {"as_released": "efficient"})
    ],
    "output": lambda: [
        (length_gen.cpu_quick("sort"), {"kernel": "sparsemax", "output": output}) for output in ("scaled", "plain")
    ],
    FULL: lambda: [
        (vary(in_context.paper("mosaic", 1000), training={"precision": "fp32", "compile": "none", "graph": False}), {})
    ],
}


def list_length_gen(given: argparse.Namespace) -> Iterator[list[RunConfig]]:
    """A config for each row of a table, task and seed; seeds vary slowest, so that every row has one before any has two."""
    chosen: dict[paper.Variant, paper.Row] = {}
    for row in (row for name, rows in TABLES.items() if given.table in ("all", name) for row in rows):
        chosen.setdefault(row.variant, row)  # the main table has the most cells
    kernels = [parse(name) for name in split_names(given.kernels)]
    extra = {"compile": "parts", "graph": True, "checkpoint_every": choose_interval(given, given.steps), "validate_every": 0}
    yield [
        vary(
            length_gen.gpu_short(task),
            seed=seed,
            model={
                "architecture": variant.architecture, "kernel": str(variant.kernel),
                "positions": variant.positions, "as_released": given.as_released,
            },
            training={"steps": given.steps, **extra},
        )
        for seed in read_numbers(given.seeds)
        for task in given.tasks.split(",")
        for variant, row in chosen.items()
        if any(where == task for where, _ in row.cells)
        and not (kernels and (variant.kernel not in kernels or variant.architecture != "mosaic"))
        and not (given.as_released and not (variant.architecture == "mosaic" and departs(variant.kernel, given.as_released)))
    ]  # fmt: skip


def list_regbench(given: argparse.Namespace) -> Iterator[list[RunConfig]]:
    """A config for each row of Table 1, number of examples and seed; small numbers first."""
    rows = {row.name: row.variant for row in regbench_paper.ROWS.values()}
    check_rows(given.row, rows)
    configs = []
    for seed in read_numbers(given.seeds):
        for examples in read_numbers(given.examples):
            for variant in (rows[name] for name in given.row or rows):
                if given.as_released and not (variant.kernel and departs(variant.kernel, given.as_released)):
                    continue
                if given.architectures and variant.architecture not in given.architectures.split(","):
                    continue
                if given.form and variant.architecture not in in_context.OWN:
                    continue
                kernel = {} if variant.kernel is None else {"kernel": str(variant.kernel), "as_released": given.as_released}
                base = in_context.choose_rates(in_context.paper(variant.architecture, examples, given.form), given.recipe)
                steps = given.epochs * examples // base.training.batch
                few = {"steps": steps, "warmup": steps // 10, "patience": given.patience}
                few["checkpoint_every"] = choose_interval(given, steps)
                if given.rate is not None:
                    few |= {"rate": given.rate, "final_rate": given.rate / 10}
                configs.append(vary(base, seed=seed, model=kernel, training=few))
    yield configs


def list_lm(given: argparse.Namespace) -> Iterator[list[RunConfig]]:
    """A config for each depth and kernel, and the transformer; shallow models first, and every row before a second seed.

    The paper compares several k at one layer and keeps the best for deeper models. With --k best these rows are a list of their
    own, which is asked for when the runs of the first one have their lines.
    """
    corpus, depths = Corpus.open(given.data), read_numbers(given.layers)
    data = language_modelling.Data.describe(corpus)
    with language_modelling.naming("--ood"):  # before hours are spent on training
        given.texts = language_modelling.read_texts(given.ood, data)
    few = {"steps": given.steps, "checkpoint_every": choose_interval(given, given.steps),
           "validate_every": max(1, given.steps // given.validations), "keep": given.keep}  # fmt: skip
    few |= {name: value for name in ("batch", "rate", "final_rate") if (value := getattr(given, name)) is not None}

    def configure(rows: Mapping[int, Iterable[paper.Variant]]) -> list[RunConfig]:
        changes = {"output": given.output, "as_released": given.as_released}
        found = [
            language_modelling.adjust(
                language_modelling.gpu_short(corpus, row.architecture, str(row.kernel), layers),
                seed=seed, model=changes, training=few,
            )
            for seed in read_numbers(given.seeds)
            for layers in rows
            for row in rows[layers]
            if not given.as_released or (row.architecture == "mosaic" and departs(row.kernel, given.as_released))
        ]  # fmt: skip
        if given.fast_embedding:  # of what divides its logits
            found = [language_modelling.hasten_embedding(config) for config in found if config.model.scales_output]
        return found

    if given.kernels or given.row or given.as_released:
        yield configure(dict.fromkeys(depths, read_rows(given)))
        return
    deep = [layers for layers in depths if layers > 1]
    later = given.k == "best" and deep and 1 in depths
    chosen = [] if later or not deep else choose_neighbours(given, configure)
    kept = [row for row in lm_paper.ROWS if lm_paper.count_neighbours(row) is None or row in chosen]
    yield configure({layers: list(lm_paper.ROWS) if layers == 1 else kept for layers in depths})
    if later:
        yield configure(dict.fromkeys(deep, choose_neighbours(given, configure)))


def choose_neighbours(given: argparse.Namespace, configure: Configure) -> list[paper.Variant]:
    """The row of each kind of top-k that deeper models take: of the k that was given, or of the lowest loss at one layer."""
    if given.k != "best":
        return [row for row in lm_paper.ROWS if str(lm_paper.count_neighbours(row)) == given.k]
    lines = {identify(run.config).to_json(): run for run in read_lines(given.out)}
    chosen = []
    for kind in (lm_paper.TOP_SOFTMAX, lm_paper.TOP_UNIFORM):
        runs = {row: [lines.get(identify(config).to_json()) for config in configure({1: [row]})] for row in kind}
        if missing := [lm_paper.ROWS[row] for row in kind if None in runs[row]]:
            raise ValueError(
                f"--k best takes the best k at 1 layer, and {given.out} has no line of the same training there for"
                f" {', '.join(missing)}; run these first, with 1 among --layers, or give the k, as in --k 32"
            )
        losses = {row: sum(read_loss(run) for run in runs[row] if run) / len(runs[row]) for row in kind}
        chosen.append(min(losses, key=lambda row: losses[row]))
        found = ", ".join(f"{lm_paper.count_neighbours(row)}: {losses[row]:.4f}" for row in kind)
        print(f"{lm_paper.ROWS[chosen[-1]]} for deeper models: the lowest validation loss at 1 layer ({found})", flush=True)
    return chosen


def read_loss(run: Run) -> float:
    """On the validation split; infinite where the run diverged."""
    return min(
        (row.loss for row in run.latest if isinstance(row, Predicted) and row.split == language_modelling.OWN), default=inf
    )


def read_rows(given: argparse.Namespace) -> list[paper.Variant]:
    """The rows that were asked for, by kernel or by name."""
    names = split_names(given.kernels)
    asked = [lm_paper.TRANSFORMER if name == "transformer" else paper.Variant("mosaic", parse(name)) for name in names]
    rows = {variant.label: variant for variant in asked or lm_paper.ROWS}
    check_rows(given.row, rows)
    return [rows[name] for name in given.row or rows]


def check_rows(asked: Sequence[str] | None, rows: Sequence[str] | dict[str, Any]) -> None:
    if unknown := [name for name in asked or [] if name not in rows]:
        raise ValueError(f"row {unknown[0]!r} is unknown; the rows are {', '.join(map(repr, rows))}")


def choose_interval(given: argparse.Namespace, steps: int) -> int:
    """Steps between checkpoints. One that nobody will go on from would only cost time."""
    return steps if given.resume_dir is None else min(steps, BETWEEN_CHECKPOINTS)


def strip_place(config: RunConfig) -> RunConfig:
    """The config without the folder of its corpus, which is another on every machine; name and checksum stay."""
    return replace(config, data={**config.data, "folder": ""}) if "folder" in config.data else config


def identify(config: RunConfig) -> RunConfig:
    """The config without what may change from call to call: where the corpus lies, and how often the state is saved."""
    return vary(strip_place(config), training={"checkpoint_every": 1})


def strip_folders(command: str) -> str:
    """A command line with the last name of each absolute path."""
    return re.sub(r"(?<![\w.])/(?:[^\s,='\"/]+/)+", "", command)


def strip_command(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {**environment, "command": strip_folders(environment["command"])}


def read_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def read_count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def read_lines(out: Path) -> list[Run]:
    files = (path for path in sorted(out.glob("*.jsonl")) if path.stem != FIRST_LOSS)  # which is of no runs
    return [run for path in files for run in load_results(path)]


def name_part(config: RunConfig) -> str:
    """The part of the table that a run belongs to, and the file its line goes to."""
    data = config.data
    return str(data.get("task") or data.get("examples") or f"{data['corpus']}-{config.model.layers}")


def describe(config: RunConfig) -> str:
    model = config.model
    usual = ModelConfig(model.vocab)
    changed = (getattr(model, name) for name in ("start", "form", "as_released", "beta_squared", "output")
               if getattr(model, name) != getattr(usual, name))  # fmt: skip
    parts = [name_part(config), model.architecture, model.kernel, model.positions, *changed, f"rate {config.training.rate:g}"]
    return f"{' '.join(map(str, parts))} seed {config.seed}"


# -- runs ----------------------------------------------------------------------------------------


def make(config: RunConfig, given: argparse.Namespace) -> None:
    """Trains and evaluates one run and appends its line; one that diverges has a line too, and is not tried again.

    Its folder stays until the line is written, so that nothing that was trained is lost.
    """
    started, folder = time.time(), find_folder(config, given)
    try:
        train(config, folder)
        trained = time.time() - started
        experiment_of(config).complete_evaluation(config, folder, 1000)
        if given.finish is not None:
            given.finish(config, folder, given)
    except Diverged:
        trained = time.time() - started
    line = export(folder)
    append(
        line | {"config": line["config"] | {"data": strip_place(config).data}},
        given.out / f"{given.part or name_part(config)}.jsonl",
    )
    shutil.rmtree(folder)
    found = line.get("failed") or " ".join(map(show, line["evaluation"]))
    times = f"{line['steps']} steps in {trained:.0f} s, evaluation {time.time() - started - trained:.0f} s"
    print(f"{describe(config)}: {found}  ({times})", flush=True)


def find_folder(config: RunConfig, given: argparse.Namespace) -> Path:
    return Path(given.state) / hashlib.sha256(identify(config).to_json().encode()).hexdigest()[:16]


def train(config: RunConfig, folder: Path) -> None:
    """Trains a run, from where it was stopped if it was."""
    resume = (folder / "config.json").exists()
    if resume:
        replace_durably(folder / "config.json", config.to_json().encode())  # the corpus may lie elsewhere now
    experiment_of(config).run(config, folder, resume=resume, show_progress=False)


def is_complete(run: Run) -> bool:
    """Whether a run came to its end: a line may also be of one that was stopped."""
    return bool(run.failed) or run.steps >= run.config.training.steps or lost_patience(run)


def drop_stopped(out: Path, todo: Sequence[RunConfig]) -> None:
    """Takes the lines of runs that were stopped out of their files, since they are made anew."""
    asked = [identify(config) for config in todo]
    for path in sorted(out.glob("*.jsonl")):
        if path.stem != FIRST_LOSS:
            lines, runs = [*filter(str.strip, path.read_text(encoding="utf-8").split("\n"))], load_results(path)
            kept = [
                line for line, run in zip(lines, runs, strict=True) if is_complete(run) or identify(run.config) not in asked
            ]
            if len(kept) < len(lines):
                replace_durably(path, "".join(f"{line}\n" for line in kept).encode())


def append(line: dict[str, Any], path: Path) -> None:
    for part in (line["environment"], *line["environment"].get("resumed", [])):
        part |= strip_command(part)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())  # in one piece: several workers write
    os.close(file)


def show(row: dict[str, Any]) -> str:
    """An evaluation in a word: the share that is right, or the loss on a text."""
    if "exact" in row:
        return f"{row['exact'] / row['samples']:.3f}"
    return f"{row['right'] / row['positions']:.3f}" if "right" in row else f"{row['split']} {row['loss']:.4f}"


def finish_lm(config: RunConfig, folder: Path, given: argparse.Namespace) -> None:
    """What a run of language modelling is asked beyond its validation split: other texts, and a story."""
    for name, where in given.texts.items():
        text = language_modelling.open_text(language_modelling.Data.of(config), where, name)
        language_modelling.evaluate_run(folder, text, WINDOWS)
    tell_story(folder, PROMPT, WISH)


# -- workers -------------------------------------------------------------------------------------


def work(queue: Any, deadline: Any, failed: Any, given: argparse.Namespace) -> None:
    """Makes runs until none is left or the time is up; a deadline of 0 says that a signal came.

    One run that fails must not take the others with it: the worker goes on, or ends where its GPU no longer answers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the parent hears it too; what is evaluated now comes to its end
    stop_when(lambda: time.time() > deadline.value and (given.resume_dir is not None or not deadline.value))
    while (config := queue.get()) is not None:
        if time.time() > deadline.value:
            print(f"no time left for {describe(config)}", flush=True)
            continue
        try:
            make(config, given)
        except Interrupted as error:
            print(f"{describe(config)}: {str(error).partition(' and')[0]}; its state is kept", flush=True)
        except Exception as error:
            folder = find_folder(config, given)
            kept = f"; its state is in {folder}" if folder.exists() else ""
            print(f"FAILED {describe(config)}: {error!r}{kept}", flush=True)
            if isinstance(error, RuntimeError) and "CUDA" in str(error):
                raise SystemExit(1) from None  # every later call to the GPU would fail in this process
            with failed.get_lock():
                failed.value += 1
        gc.collect()  # a run and its recorded graph hold each other, and the memory of the next one is measured


def carry_out(configs: Sequence[RunConfig], deadline: Any, given: argparse.Namespace) -> int:
    """Makes the runs that have no line yet, and returns how many failed. A worker that dies has cost one run; another takes
    its place."""
    done = [identify(run.config) for run in read_lines(given.out) if is_complete(run)]
    todo = [config for config in configs if identify(config) not in done]
    drop_stopped(given.out, todo)
    given.out.mkdir(parents=True, exist_ok=True)  # not before it is known what goes there
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"{len(todo)} of {len(configs)} runs to do on {where}", flush=True)
    context = processes.get_context("spawn")
    queue, failed = context.Queue(), context.Value("i", 0)
    for config in [*todo, *[None] * given.workers]:
        queue.put(config)

    def start() -> Any:
        worker = context.Process(target=work, args=(queue, deadline, failed, given))
        worker.start()
        return worker

    workers, died = [start() for _ in range(min(given.workers, len(todo)))], 0
    while workers:
        wait([worker.sentinel for worker in workers])
        ended = [worker for worker in workers if worker.exitcode is not None]
        workers = [worker for worker in workers if worker not in ended]
        for _ in (worker for worker in ended if worker.exitcode):
            died += 1
            if died < len(todo):  # no more than there are runs, or workers that cannot start would go on for ever
                workers.append(start())
    queue.cancel_join_thread()
    return int(failed.value) + died


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="experiment", required=True)
    as_released = "the rows that this path of the published code computes otherwise than the paper, as it does"
    length = which.add_parser(length_gen.NAME)
    length.add_argument("--tasks", default="mqmtar,sort,reverse")
    length.add_argument("--table", default="all", choices=[*TABLES, "all"])
    length.add_argument("--steps", type=read_count, default=2000)
    length.add_argument("--kernels", default="", help="only rows of these")
    length.add_argument("--as-released", default="", choices=["efficient", "plain"], help=as_released)
    length.set_defaults(list=list_length_gen, finish=None)
    regbench = which.add_parser(in_context.NAME)
    regbench.add_argument("--examples", default="1000,2500,5000")
    regbench.add_argument("--row", action="append", help="a row of the table by its name there; all if not given")
    regbench.add_argument("--epochs", type=read_count, default=200)
    regbench.add_argument("--patience", type=int, default=40, help="epochs without a lower validation loss")
    regbench.add_argument("--rate", type=float, help="highest learning rate, of which a tenth is left in the end")
    regbench.add_argument("--as-released", default="", choices=["efficient", "plain"], help=as_released)
    regbench.add_argument("--recipe", default="benchmark", choices=[*in_context.RATES], help="learning rate and weight decay")
    regbench.add_argument("--form", default="", choices=["own", "benchmark"], help="of recurrent models; others are left out")
    regbench.add_argument("--architectures", default="", help="only rows of these, as in mosaic,mamba")
    regbench.set_defaults(list=list_regbench, finish=None)
    lm = which.add_parser(language_modelling.NAME)
    lm.add_argument("--data", type=Path, required=True, help="a corpus that `compactattn data` has prepared")
    lm.add_argument("--ood", default="", help="other texts to evaluate on, as in simplewiki=DIR,tinystories=DIR")
    lm.add_argument("--layers", default="1,8")
    lm.add_argument("--kernels", default="", help="kernels, and transformer; all rows of the paper if not given")
    lm.add_argument("--row", action="append", help="one of them by its name in the report, as in 4/3-entmax")
    lm.add_argument(
        "--k", default="best", choices=["best", *map(str, lm_paper.NEIGHBOURS)],
        help="of the top-k rows of deeper models; best: of each kind that of the lowest validation loss at 1 layer",
    )  # fmt: skip
    lm.add_argument("--steps", type=read_count, default=2000)
    lm.add_argument("--validations", type=read_count, default=20, help="during training")
    lm.add_argument("--keep", default="last", choices=["last", "best"], help="weights to evaluate; the paper's are the last")
    lm.add_argument("--output", default="", choices=["scaled", "plain"], help="of Memory Mosaics or of GPT-2, for all rows")
    lm.add_argument("--fast-embedding", action="store_true", help="√width times the rate for the tied embedding")
    lm.add_argument("--as-released", default="", choices=["efficient", "plain"], help=as_released)
    lm.add_argument("--batch", type=read_count)
    lm.add_argument("--rate", type=float)
    lm.add_argument("--final-rate", type=float)
    lm.set_defaults(list=list_lm, finish=finish_lm)
    which.add_parser("plan", help="print the runs that are due")
    cpu = which.add_parser("cpu")
    small = [FIRST_LOSS, *(name for name in CPU_TABLES if name != FULL)]
    tables = f"of {', '.join(small)}; {FULL} is one RegBench row of full size, hours on a thread, with --seeds 0"
    cpu.add_argument("--tables", default=",".join(small), help=tables)
    cpu.set_defaults(list=list_cpu, finish=None)
    for part in (length, regbench, lm, cpu):
        part.set_defaults(part="")  # the file of all lines, where it is not that of each config
        part.add_argument("--seeds", default="0,1,2" if part is cpu else "0")
        part.add_argument("--workers", type=read_count, default=1, help="runs at a time on the one GPU")
        part.add_argument("--minutes", type=float, default=1e6, help="start no run after these; with --resume-dir, stop all")
        part.add_argument("--resume-dir", type=Path, help="folder for the state of runs, to go on with later")
        part.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def refuse(sentence: str) -> int:
    """Tells in one sentence what the user can put right, and returns the status that says so."""
    print(f"make.py: {sentence}", file=sys.stderr)
    return 2


def main() -> int:
    given = read_arguments()
    if given.experiment == "plan":
        print_plan()
        return 0
    given.out = given.out or Path("results") / given.experiment
    if given.experiment != "cpu" and not torch.cuda.is_available():
        return refuse(f"this needs a GPU, and torch {torch.__version__} sees none; `compactattn train` has presets for a CPU")
    given.state = given.resume_dir or Path(tempfile.mkdtemp(prefix="make-"))
    deadline = processes.get_context("spawn").Value("d", time.time() + 60 * given.minutes, lock=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(deadline, "value", 0))
    failed = 0
    try:
        for configs in given.list(given):
            failed += carry_out(configs, deadline, given)
            if time.time() > deadline.value:
                break
    except (ValueError, OSError, RunError) as error:  # of the arguments, and of files: what a run suffers stays with its worker
        return refuse(str(error))
    finally:
        if given.state.is_dir() and any(given.state.iterdir()):
            print(f"runs that have no line yet are in {given.state}; --resume-dir {given.state} goes on with them", flush=True)
        elif given.resume_dir is None:
            given.state.rmdir()
    return failed


if __name__ == "__main__":
    sys.exit(main())
