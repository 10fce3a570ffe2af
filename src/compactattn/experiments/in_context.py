"""RegBench: learning a regular language from a few of its strings, in context (paper §4.2, Table 1).

A preset is a function from a model's name and a number of training examples to a complete config; a variant changes fields of
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from compactattn.data.automata import RegularLanguages
from compactattn.data.draws import Array
from compactattn.data.regbench import Epochs, Examples, RegBench, Split, load_regbench
from compactattn.evaluation.predictors import PREDICTORS
from compactattn.evaluation.regbench import Score, evaluate, evaluate_predictor
from compactattn.experiments.runs import open_run, read_data, read_evaluation, write_evaluation
from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build
from compactattn.models.zoo import ZOO
from compactattn.training.config import RunConfig, RunError, TrainingConfig, vary
from compactattn.training.loop import Summary, train
from compactattn.training.records import read_metrics
from compactattn.training.selection import Selection

NAME = "regbench"


@dataclass(frozen=True)
class Data:
    """What a run is trained on: how many examples, and what differs from the published languages."""

    examples: int
    changes: Mapping[str, Any]

    @staticmethod
    def of(config: RunConfig) -> Data:
        """The data of a config; a ValueError names what is wrong."""
        return cast(Data, read_data(Data, config, NAME))

    def make_languages(self) -> RegularLanguages:
        changes: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in self.changes.items()}
        try:
            return RegularLanguages(**changes)
        except TypeError as error:
            raise ValueError(f"data.changes: {error}") from None

    def open(self) -> RegBench:
        return load_regbench(self.examples, self.make_languages())


# -- configs -------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """What a recipe sets: fields of ModelConfig and of TrainingConfig."""

    model: Mapping[str, Any]
    training: Mapping[str, Any]


class Rates(NamedTuple):
    """The highest learning rate, of which a tenth is left at the end, and the weight decay."""

    rate: float
    decay: float


# the benchmark's, which the paper's table has too; and those that the paper's repository names for its Memory Mosaics
RATES: Mapping[str, Rates] = {"benchmark": Rates(5e-4, 0.1), "repository": Rates(1e-4, 0.01)}
DROPPED = {"dropout": 0.05, "attention_dropout": 0.05, "persistent_dropout": 0.05}
BASELINE = {"width": 128, "embedding_dropout": 0.1}
PLAIN = {"clip": 0.0, "decay_all": True}
STATE_SPACE = {**PLAIN, "ssm_rate": 1e-3}
RECIPES: Mapping[str, Recipe] = {  # of the benchmark's models, but for the mosaic's, which is the paper's
    "mosaic": Recipe({"layers": 2, "heads": 8, "width": 128, **DROPPED}, {"clip": 1.0, "decay_all": True}),
    "transformer": Recipe({"layers": 8, "heads": 2, "attention_dropout": 0.1, **BASELINE}, PLAIN),
    "retnet": Recipe({"layers": 2, "heads": 8, "form": "benchmark", **BASELINE}, PLAIN),
    "gla": Recipe({"layers": 4, "heads": 1, "form": "benchmark", **BASELINE}, PLAIN),
    "h3": Recipe({"layers": 2, "heads": 1, "form": "benchmark", **BASELINE}, STATE_SPACE),
    "s4d": Recipe({"layers": 2, "heads": 1, "form": "benchmark", **BASELINE}, STATE_SPACE),
    "mamba": Recipe({"layers": 1, "heads": 1, "form": "benchmark", "start": "unit", "width": 128}, PLAIN),
}
OWN: Mapping[str, Recipe] = {  # our variants of the recurrent models: residual blocks, clipping, and decay of matrices alone
    name: Recipe({"layers": layers, "heads": heads, "form": "own", **BASELINE}, {"clip": 1.0, "decay_all": False})
    for name, layers, heads in (("retnet", 2, 4), ("gla", 4, 1), ("h3", 2, 1), ("s4d", 2, 1), ("mamba", 4, 1))
}
WITH_KERNEL = ("mosaic", "transformer")
WITH_HEADS = (*WITH_KERNEL, "retnet", "gla")
GRID: Mapping[str, tuple[Any, ...]] = {  # Table "Hyperparameter space for the in-context learning experiment"
    "decay": (1e-1, 1e-2),
    "layers": (2, 4, 8),
    "width": (32, 128, 256),
    "heads": (1, 2, 4, 8),
}


def paper(model: str, examples: int, form: str = "") -> RunConfig:
    """The published recipe, 200 epochs at most: minutes to an hour on a GPU. That it ends when 40 bring nothing is ours."""
    return _configure(model, Data(examples, {}), form, epochs=200, batch=32, patience=40)


def gpu_short(model: str, examples: int, form: str = "") -> RunConfig:
    """The same for at most 100 epochs, and less patience."""
    return _configure(model, Data(examples, {}), form, epochs=100, batch=32, patience=15)


def cpu_quick(model: str, examples: int, form: str = "") -> RunConfig:
    """Small languages, short examples and a narrow model: a minute or two on two CPU cores."""
    changes = {"states": [4, 6], "letters": [4, 8], "strings": [6, 10], "string_length": [1, 12]}
    config = _configure(model, Data(examples, changes), form, epochs=20, batch=32, patience=0)
    layers = {"transformer": 2, "gla": 2}.get(model, config.model.layers)
    small = {"width": 64, "heads": min(4, config.model.heads), "layers": layers}
    training = {"rate": 3e-3, "final_rate": 3e-4, "precision": "fp32", "compile": "none", "graph": False}
    return vary(config, model=small, training=training)


PRESETS: dict[str, Callable[..., RunConfig]] = {"cpu-quick": cpu_quick, "gpu-short": gpu_short, "paper": paper}


def _configure(model: str, data: Data, form: str, *, epochs: int, batch: int, patience: int) -> RunConfig:
    """AdamW, warm-up over a tenth of training, a cosine to a tenth of the rate; validated after every epoch."""
    if model not in RECIPES:
        raise ValueError(f"model {model!r} is unknown; choose one of {', '.join(RECIPES)}")
    if data.examples < batch:
        raise ValueError(f"examples = {data.examples} do not fill a batch of {batch}; train on at least that many")
    recipe, languages, (rate, decay) = choose_recipe(model, form), data.make_languages(), RATES["benchmark"]
    steps, epoch = epochs * data.examples // batch, data.examples // batch
    training = TrainingConfig(
        steps=steps, batch=batch, rate=rate, final_rate=rate / 10, warmup=steps // 10, decay=decay,
        betas=(0.9, 0.999), precision="bf16", compile="parts", graph=True, log_every=max(1, epoch // 4),
        checkpoint_every=5 * epoch, validate_every=epoch, patience=patience, **recipe.training,
    )  # fmt: skip
    learned = {"positions": "learned", "longest": languages.longest} if model == "transformer" else {}
    settings: dict[str, Any] = {**recipe.model, **learned}
    return RunConfig(NAME, 0, ModelConfig(languages.vocab, architecture=cast(Any, model), **settings), training, asdict(data))


def choose_recipe(model: str, form: str = "") -> Recipe:
    """The benchmark's recipe of a model, or ours of a recurrent one."""
    if form and model not in OWN:
        raise ValueError(f"form {form!r} is for {', '.join(OWN)}; a {model} has one form only")
    return OWN[model] if form == "own" else RECIPES[model]


def list_grid(config: RunConfig) -> Iterator[RunConfig]:
    """The config at every point of the paper's search space; a model without heads, or of one layer, keeps its own number."""
    grid = {**GRID, "heads": GRID["heads"] if config.model.architecture in WITH_HEADS else (config.model.heads,)}
    if config.model.bare:
        grid["layers"] = (config.model.layers,)
    for values in product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        sizes = {name: value for name, value in point.items() if name != "decay"}
        yield vary(config, model=sizes, training={"decay": point["decay"]})


def match(config: RunConfig) -> RunConfig:
    """The config with the size that `compactattn models regular` lists: the parameters of a Memory Mosaic for any model.

    A recurrent model takes our form of it. Rate and weight decay stay.
    """
    architecture = config.model.architecture
    given = {"architecture": architecture, "vocab": config.model.vocab}
    longest = {"longest": config.model.longest} if config.model.longest else {}
    size = ZOO["regular"].configure(**given, **longest)
    own = OWN.get(architecture, RECIPES[architecture])
    sizes = {name: getattr(size, name) for name in ("layers", "width", "heads", "inner")}
    return vary(config, model={**own.model, "start": "published", **sizes}, training={"ssm_rate": 0.0, **own.training})


def choose_rates(config: RunConfig, name: str) -> RunConfig:
    """The config with the rate and the weight decay of a named recipe."""
    rate, decay = RATES[name]
    return vary(config, training={"rate": rate, "final_rate": rate / 10, "decay": decay})


def write_recipe(config: RunConfig) -> dict[str, Any]:
    """What a search has chosen, to be written down and applied to other kernels."""
    model, training = asdict(config.model), asdict(config.training)
    return {name: (training if name == "decay" else model)[name] for name in GRID}


def apply_recipe(config: RunConfig, path: Path) -> RunConfig:
    """The config with the size and the weight decay of a file that a search wrote."""
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
        decay, *sizes = (recipe[name] for name in GRID)
        if type(decay) not in (int, float) or any(type(size) is not int for size in sizes):  # True is no number here
            raise TypeError
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; name a file, or one of {', '.join(RATES)}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no recipe; a recipe has {', '.join(GRID)}, as a search writes them") from None
    return vary(config, model=dict(zip(list(GRID)[1:], sizes, strict=True)), training={"decay": decay})


def epoch_of(config: RunConfig, step: int) -> float:
    """How often the training examples have been seen."""
    return step * config.training.batch / Data.of(config).examples


# what a score is held against: how the strings so far go on, and the automaton itself without knowing where a string starts
REFERENCES = {
    "a 2-gram of the context": PREDICTORS["2-gram"],
    "a 3-gram of the context": PREDICTORS["3-gram"],
    "a filter that knows the automaton and not its state": PREDICTORS["state filter"],
}

# -- from a config to a model and its results ----------------------------------------------------


def run(
    config: RunConfig, folder: Path, *, resume: bool = False, show_progress: bool = True, tensorboard: bool = False
) -> Summary:
    """Trains the model of a config; the epoch of the lowest validation loss is the one that is used."""
    data = Data.of(config).open()

    def validate(model: nn.Module) -> dict[str, float]:
        found = evaluate(model, data.validation)
        return {"loss": found.loss, "accuracy": found.every.accuracy, "tvd": found.every.tvd}

    return train(
        config, build(config.model, config.seed), Epochs(data.train, config.seed), folder,
        resume=resume, validate=validate, show_progress=show_progress, tensorboard=tensorboard,
    )  # fmt: skip


def evaluate_run(
    folder: Path, split: Split = "test", device: str = "auto", progress: Callable[[int, int], None] | None = None
) -> Score:
    """Accuracy and TVD of a run on a split, also written to its evaluation.jsonl."""
    trained = open_run(folder, device)
    try:
        data = Data.of(trained.config)
        examples = getattr(data.open(), split)
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from error
    with trained.evaluating():
        found = evaluate(trained.model, examples, progress=progress)
    facts = {"examples": data.examples, "seed": trained.config.seed, "step": trained.step, "precision": trained.precision}
    epoch = round(epoch_of(trained.config, trained.step))
    references = [{"name": name, **score} for name, score in score_references(examples).items()]
    write_evaluation(folder, [found.to_row(**facts, epoch=epoch, references=references)])
    return found


def score_references(examples: Examples) -> dict[str, dict[str, float]]:
    """Accuracy and TVD of the predictors that have learnt nothing; a second or two."""
    scores = {name: evaluate_predictor(predict, examples).every for name, predict in REFERENCES.items()}
    return {name: {"accuracy": score.accuracy, "tvd": score.tvd} for name, score in scores.items()}


def example(config: RunConfig) -> tuple[list[int], list[str]]:
    """The tokens that a model reads of the first test example, and the letters to show for them."""
    test = Data.of(config).open().test
    tokens = test.tokens[0, : test.lengths[0] - 1].tolist()
    return tokens, [test.languages.render([token]) for token in tokens]


def read(config: RunConfig, text: str) -> tuple[list[int], list[str]]:
    """The tokens of strings such as "cafca|caf|ch", and their letters."""
    tokens = Data.of(config).make_languages().read(text)
    return tokens, list(text)


def window(config: RunConfig) -> int:
    """Tokens of the longest example that training may show."""
    return Data.of(config).make_languages().longest


class Beginning(NamedTuple):
    """Strings to go on from and, where they are of a test language, its edges (S, A) and the state they lead to."""

    tokens: list[int]
    languages: RegularLanguages
    edges: Array | None = None
    state: int = 0

    def judge(self, tokens: Sequence[int]) -> list[bool]:
        """Which of the tokens that follow are legal, up to the first that is not; nothing where the language is not known."""
        found: list[bool] = []
        if self.edges is None:
            return found
        state, separator = self.state, self.languages.separator
        before = self.tokens[-1] if self.tokens else separator
        for token in tokens:
            if token == separator:
                state = -1 if before == separator else 0  # a string has a letter at least
            else:
                state = int(self.edges[state, token]) if token < self.edges.shape[1] else -1
            found.append(state >= 0)
            if state < 0:
                break
            before = token
        return found


def begin(config: RunConfig, prompt: str, number: int) -> Beginning:
    """What a person typed, or the first half of a test example."""
    data = Data.of(config)
    languages = data.make_languages()
    if prompt:
        return Beginning(languages.read(prompt), languages)
    test = data.open().test
    row = number % test.samples
    half = int(test.lengths[row]) // 2
    edges = test.automata[row : row + 1].tables(languages.letters[1])[0]
    return Beginning(test.tokens[row, :half].tolist(), languages, edges, int(test.states[row, half - 1]))


def best_validation(folder: Path) -> Selection:
    """The lowest validation loss of a run."""
    return Selection.of(read_metrics(folder), 0, 2**62)


def complete_evaluation(config: RunConfig, folder: Path, samples: int = 0, device: str = "auto") -> None:
    """Evaluates a trained run on the test set, all of it, where it has not been."""
    done = {row["step"] for row in read_evaluation(folder) if row.get("split") == "test"}
    if best_validation(folder).step not in done:
        evaluate_run(folder, device=device)
