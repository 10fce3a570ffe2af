"""Length generalisation: trained on short sequences, tested on long ones (paper §4.3).

A preset is a function from a task to a complete config; a variant changes fields of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from compactattn.data.recall import Recall, check_layout
from compactattn.data.sequences import TASKS, Sequences, TestSet, choose_task
from compactattn.data.tasks import Task
from compactattn.evaluation.exact_match import MODES, Match, Mode, evaluate
from compactattn.experiments.runs import open_run, read_data, read_evaluation, write_evaluation
from compactattn.models.language_model import build
from compactattn.models.zoo import ZOO
from compactattn.training.config import RunConfig, RunError, TrainingConfig
from compactattn.training.loop import Summary, train

NAME = "length-gen"
VALIDATION_SEED = 1  # of sequences like the test sets', and none of theirs
VALIDATION_SAMPLES = 200
HORIZON = 156_250  # steps of warm-up and cosine, of every task: reverse ends before it, mqmtar goes on after it


@dataclass(frozen=True)
class Data:
    """What a run is trained on: a task, what differs from the published one, and the lengths of its sources.

    `layout` says whether each file of mqmtar has words of its own, "published", or all share them; see `Recall`.
    A config.json without it is of an older run, and means "shared". Other tasks have no words and ignore it.
    """

    task: str
    changes: Mapping[str, Any]
    shortest: int = 32
    longest: int = 64
    layout: str = "shared"

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if "layout" in self.changes:
            raise ValueError("data.changes cannot hold a layout; write it as data.layout")

    @staticmethod
    def of(config: RunConfig) -> Data:
        """The data of a config; a ValueError names what is wrong."""
        return cast(Data, read_data(Data, config, NAME))

    def make_task(self) -> Task:
        task = choose_task(self.task, **self.changes)
        return replace(task, layout=self.layout) if isinstance(task, Recall) else task

    def to_config(self) -> dict[str, Any]:
        """The data as a config holds it. Only mqmtar states a layout, so other tasks' configs equal those of older runs."""
        return {name: value for name, value in asdict(self).items() if name != "layout" or self.task == Recall.name}


# -- configs -------------------------------------------------------------------------------------


def paper(task: str) -> RunConfig:
    """The published recipe: days on a GPU for all rows and seeds."""
    sizes, examples = {"sort": "sort", "reverse": "reverse", "copy": "reverse", "mqmtar": "recall"}, {"mqmtar": 50, "sort": 40}
    steps = examples.get(task, 30) * 1_000_000 // 256
    training = TrainingConfig(
        steps=steps, batch=256, rate=1e-3, final_rate=5e-5, warmup=40_000, decay=0.1, betas=(0.9, 0.95), precision="bf16",
        horizon=HORIZON, compile="parts", graph=True, log_every=100, checkpoint_every=5000, validate_every=5000,
    )  # fmt: skip
    model = ZOO[sizes[_known(task)]].configure(vocab=choose_task(task).vocab, slots=2688, dropout=0.05, persistent_dropout=0.05)
    return RunConfig(NAME, 0, model, training, Data(task, {}, layout="published").to_config())


def gpu_short(task: str) -> RunConfig:
    """The published model and data for 2,000 steps: minutes on a GPU, a hundredth of the published training."""
    config = paper(task)
    training = replace(
        config.training, steps=2000, warmup=200, horizon=0, log_every=20, checkpoint_every=1000, validate_every=500
    )
    return replace(config, training=training)


def cpu_quick(task: str) -> RunConfig:
    """A small model on a small task: a minute or two on two CPU cores."""
    changes = {"mqmtar": {"symbols": 128, "words": 4096, "queries": 2}}.get(_known(task), {"symbols": 16})
    data = Data(task, changes, shortest=16, longest=32, layout="published")
    training = TrainingConfig(
        steps=1500, batch=32, rate=2e-3, final_rate=1e-4, warmup=100, betas=(0.9, 0.99),
        log_every=10, checkpoint_every=300, validate_every=300,
    )  # fmt: skip
    model = ZOO["laptop"].configure(vocab=data.make_task().vocab, slots=64)
    return RunConfig(NAME, 0, model, training, data.to_config())


PRESETS: dict[str, Callable[[str], RunConfig]] = {"cpu-quick": cpu_quick, "gpu-short": gpu_short, "paper": paper}


def _known(task: str) -> str:
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; choose one of {', '.join(TASKS)}")
    return task


# -- from a config to a model and its results ----------------------------------------------------


def open_stream(config: RunConfig) -> Sequences:
    data = Data.of(config)
    return Sequences(data.make_task(), config.seed, data.shortest, data.longest)


def run(
    config: RunConfig, folder: Path, *, resume: bool = False, show_progress: bool = True, tensorboard: bool = False
) -> Summary:
    """Trains the model of a config."""
    data = Data.of(config)
    held_out = TestSet(data.make_task(), data.longest, VALIDATION_SAMPLES, VALIDATION_SEED)

    def validate(model: nn.Module) -> dict[str, float]:
        found = evaluate(model, held_out)
        return {"exact_match": found.exact_match, "token_accuracy": found.token_accuracy}

    return train(
        config, build(config.model, config.seed), open_stream(config), folder,
        resume=resume, validate=validate, show_progress=show_progress, tensorboard=tensorboard,
    )  # fmt: skip


def default_lengths(config: RunConfig) -> Sequence[int]:
    """The lengths of the paper's table for a task, as multiples of the longest source in training; up to 16× if it is short."""
    data = Data.of(config)
    factors = {"mqmtar": (1, 2, 4, 8, 16, 32, 64), "sort": (1, 2, 4)}.get(data.task, (1, 1.5))
    return [int(data.longest * factor) for factor in factors if data.longest >= 64 or factor <= 16]


def open_test_set(config: RunConfig, length: int, samples: int = 1000) -> TestSet:
    return TestSet(Data.of(config).make_task(), length, samples)


def example(config: RunConfig) -> tuple[list[int], list[str]]:
    """The tokens that a model reads of the first test sequence, and the words to show for them."""
    data = Data.of(config)
    tokens = [int(token) for token in open_test_set(config, data.longest).tokens(0, 1)[0, :-1]]
    return tokens, [data.make_task().render([token]) for token in tokens]


def read(config: RunConfig, text: str) -> tuple[list[int], list[str]]:
    """The tokens of a prompt, and of what follows its <sep>, in the words of the task."""
    task = Data.of(config).make_task()
    prompt, _, answer = text.partition("<sep>")
    tokens = [*task.read_prompt(prompt), *task.read(answer)]
    return tokens, [task.render([token]) for token in tokens]


def window(config: RunConfig) -> int:
    """Tokens of the longest sequence that training shows: its prompt and its answer."""
    data = Data.of(config)
    return data.make_task().prompt_length(data.longest) + data.make_task().answer_length(data.longest)


Progress = Callable[[int, int, int], None]  # length, samples done, samples in all


def evaluate_run(
    folder: Path,
    lengths: Sequence[int] | None = None,
    mode: Mode = "teacher-forced",
    samples: int = 1000,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[Match]:
    """Exact match of a run at each length, also written to its evaluation.jsonl, where it takes the place of older lines.

    On a GPU the model computes in the precision that it was trained in, on a CPU in fp32.
    """
    trained = open_run(folder, device)
    found = []
    try:
        Data.of(trained.config).make_task()
    except ValueError as error:
        raise RunError(f"{folder}/config.json: {error}") from error
    for length in lengths or default_lengths(trained.config):
        try:
            test_set = open_test_set(trained.config, length, samples)
        except ValueError as error:
            raise RunError(str(error)) from error
        watch = None if progress is None else (lambda done, total, length=length: progress(length, done, total))
        with trained.evaluating():
            found.append(evaluate(trained.model, test_set, mode, progress=watch))
        if test_set.published not in (None, found[-1].checksum):
            raise RunError(f"the test set of length {length} is not the published one: its checksum is {found[-1].checksum}")
        facts = {"seed": trained.config.seed, "step": trained.step, "precision": trained.precision}
        write_evaluation(folder, [found[-1].to_row(**facts)])
    return found


def missing(config: RunConfig, folder: Path, samples: int) -> list[int]:
    """Lengths of the paper's table at which a trained run has not been evaluated on that many samples."""
    wanted = MODES[0], config.training.steps, samples
    done = {row["length"] for row in read_evaluation(folder) if (row["mode"], row["step"], row["samples"]) == wanted}
    return [length for length in default_lengths(config) if length not in done]


def complete_evaluation(config: RunConfig, folder: Path, samples: int, device: str = "auto") -> None:
    """Evaluates a trained run where it has not been."""
    if lengths := missing(config, folder, samples):
        evaluate_run(folder, lengths, samples=samples, device=device)
