"""The sections of docs/experiments.md that hold results, written from the files under results/ in the words of the report."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from compactattn.bench.results import format_markdown as table
from compactattn.data.corpus import Corpus
from compactattn.data.preparation import prepare
from compactattn.data.regbench import load_regbench
from compactattn.data.stories import Stories
from compactattn.data.tokenizers import load_tokenizer
from compactattn.experiments import in_context, language_modelling, length_generalisation
from compactattn.models.config import ModelConfig
from compactattn.report.evaluations import Evaluated, Scored
from compactattn.report.gallery import STYLE
from compactattn.report.page import mark_down
from compactattn.report.paper import name_kernel
from compactattn.report.runs import Run, load
from compactattn.report.sections import STORIES, Grid, Heading, Part, Section, make_sections
from compactattn.training.config import RunConfig

ROOT = Path(__file__).parent.parent
NONE = "No results yet."
IMAGES, COLOURS = "images", 64  # where pictures lie, beside the documents, and how many colours they have


def load_all(folder: str) -> list[Run]:
    """The runs of a folder of results; none where it holds no file."""
    path = ROOT / "results" / folder
    return load([path]) if any(path.glob("*.jsonl")) else []


def results_section(folder: str, level: int, titled: bool = True, pictures: Collection[str] = ()) -> str:
    """Every comparison that the files of a folder allow, in the words of the report but without what it folds away.

    Of the pictures those named are linked. Stories take much room: those of the deepest models stand for the others.
    """
    parts, sections = [], make_sections(load_all(folder), pictures)
    deepest = max((_count_layers(section) for section in sections), default=0)
    for section in sections:
        parts += [f"{'#' * level} {section.title}, {section.note}"] if titled else []
        parts += [f"**{section.finding.headline}** {' '.join(section.finding.details)}"]
        shown = section.parts if _count_layers(section) == deepest else _leave_out(STORIES, section.parts)
        parts += [mark_down(part, level + 1, IMAGES) for part in shown if not (isinstance(part, Grid) and part.folded)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) or NONE


def draw_pictures(folder: str, pictures: Collection[str]) -> dict[Path, bytes]:
    """The same pictures as files, the same bytes every time."""
    drawn = [picture for section in make_sections(load_all(folder), pictures) for picture in section.pictures]
    return {ROOT / "docs" / IMAGES / f"{one.name}.png": _paint(one.figure, identify(folder)) for one in drawn}


def identify(folder: str) -> str:
    """The name and the checksum of the files of a folder of results, which a picture carries to tell what it is drawn from."""
    files = sorted((ROOT / "results" / folder).glob("*.jsonl"))
    return f"results/{folder} sha256 {hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()}"


def _paint(figure: Figure, source: str) -> bytes:
    """A PNG that notes its source; with few colours it is a quarter of the size."""
    drawn, small, note = io.BytesIO(), io.BytesIO(), PngInfo()
    note.add_text("Source", source)
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format="png", dpi=160)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True, pnginfo=note)
    return small.getvalue()


def _count_layers(section: Section) -> int:
    return max(run.config.model.layers for line in section.lines for run in line.runs)


def _leave_out(heading: str, parts: Iterable[Part]) -> list[Part]:
    """The parts without a heading and what stands below it."""
    kept: list[Part] = []
    below = False
    for part in parts:
        below = part.text == heading if isinstance(part, Heading) else below
        kept += [] if below else [part]
    return kept


def references_section() -> str:
    """What needs no training, on the published test set."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_context.score_references(load_regbench(folder=Path(folder)).test)
    rows = [[name, f"{100 * score['accuracy']:.1f}", f"{100 * score['tvd']:.1f}"] for name, score in found.items()]
    return table(["without training", "accuracy, %", "TVD, %"], rows)


# -- small runs on a CPU -------------------------------------------------------------------------


def cpu_section() -> str:
    """What the small runs of `results/make.py cpu` came to, a table for each question."""
    lines = {path.stem: path for path in (ROOT / "results" / "cpu").glob("*.jsonl")}
    runs = {name: load([path]) for name, path in lines.items() if name != "first-loss"}
    first = [json.loads(line) for line in lines["first-loss"].read_text().splitlines()]
    tables = [
        ("First losses", "Of untrained Memory Mosaics, in nats; tokens of equal chance.", first_losses(first)),
        *((title, note, tabulate(runs[name], label, columns)) for name, (title, note, label, columns) in SMALL.items()),
    ]
    shown = "\n\n".join(f"**{title}.** {note}\n\n{text}" for title, note, text in tables)
    full = "".join(f"\n\nAt full size, on one thread: {_sum_up(run)}." for run in runs.pop("full", []))
    every = [run for found in runs.values() for run in found]
    minutes = sum(run.cost.wall_seconds for run in every) / 60
    return (
        f"{shown}\n\nMeans over seeds 0, 1 and 2, with the least and the greatest in brackets. {len(every)} runs of one thread,"
        f" {minutes:.0f} minutes of training in sum. Command: `OMP_NUM_THREADS=1 python results/make.py cpu --workers 2`;"
        f" files: [results/cpu](../results/cpu).{full}"
    )


def first_losses(lines: Sequence[Mapping[str, Any]]) -> str:
    found: dict[tuple[int, int, float], dict[str, list[float]]] = {}
    for line in lines:
        at = found.setdefault((line["vocab"], line["width"], line["log_vocab"]), {"published": [], "former": []})
        at[line["start"]].append(line["loss"])
    rows = [
        [f"{vocab:,}", str(width), f"{log:.2f}", *(spread(losses, 2) for losses in starts.values())]
        for (vocab, width, log), starts in found.items()
    ]
    return table(["words", "width", "ln(words)", "published start", "former start"], rows)


def tabulate(runs: Sequence[Run], label: Callable[[ModelConfig], str], columns: Mapping[str, Callable[[Run], float]]) -> str:
    """A row for each label in the order of the runs, and the spread over its seeds in each column."""
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(label(run.config.model), []).append(run)
    return table(
        ["", *columns, "minutes"],
        [
            [name, *(spread([read(run) for run in found], 3 if "loss" in column else 1) for column, read in columns.items()),
             spread([run.cost.wall_seconds / 60 for run in found], 1)]
            for name, found in rows.items()
        ],
    )  # fmt: skip


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, and in brackets the least and the greatest where they differ."""
    mean, least, greatest = (f"{x:.{digits}f}" for x in (sum(values) / len(values), min(values), max(values)))
    return mean if least == greatest else f"{mean} ({least}–{greatest})"


def read_loss(run: Run) -> float:
    """The mean training loss of the last tenth of the run."""
    late = [loss for step, loss in run.losses if step > 0.9 * run.steps]
    return sum(late) / len(late)


def read_score(name: str) -> Callable[[Run], float]:
    """A share of RegBench's test set, in per cent."""
    return lambda run: 100 * getattr(next(row for row in run.latest if isinstance(row, Scored)), name)


def read_match(name: str, factor: int) -> Callable[[Run], float]:
    """A share of the test set at a multiple of the training length, in per cent."""

    def read(run: Run) -> float:
        row = next(row for row in run.latest if isinstance(row, Evaluated) and row.length == factor * (run.longest or 0))
        return 100 * {"tokens": (row.tokens_right or 0) / (row.tokens or 1), "exact": row.exact / row.samples}[name]

    return read


def label_path(model: ModelConfig) -> str:
    """A path of normalised ReLU, or the bandwidth that it starts from."""
    paths = {"": "equation", "plain": "plain path", "efficient": "efficient path"}
    return paths[model.as_released] + (f", β² from {model.beta_squared:g}" if model.beta_squared else "")


LANGUAGES = {"accuracy, %": read_score("accuracy"), "TVD, %": read_score("tvd"), "training loss": read_loss}
RECALL = {
    "training loss": read_loss, "tokens right at 1×, %": read_match("tokens", 1), "exact at 1×, %": read_match("exact", 1),
    "exact at 4×, %": read_match("exact", 4),
}  # fmt: skip
SORTING = {
    "training loss": read_loss, "tokens right at 1×, %": read_match("tokens", 1), "exact at 1×, %": read_match("exact", 1),
}  # fmt: skip
SMALL: Mapping[str, tuple[str, str, Callable[[ModelConfig], str], Mapping[str, Callable[[Run], float]]]] = {
    "start": (
        "RegBench, the start", "A Memory Mosaic on 1,000 examples of small languages (cpu-quick).",
        lambda model: f"{name_kernel(model.kernel)}, {model.start} start", LANGUAGES,
    ),
    "mamba": (
        "RegBench, Mamba", "The same languages.",
        lambda model: "one bare layer" if model.bare else f"{model.layers} residual blocks", LANGUAGES,
    ),
    "norm-relu": (
        "MQMTAR, normalised ReLU by its three paths", "Small words and sources (cpu-quick), 1,500 steps.", label_path, RECALL,
    ),
    "output": (
        "Sort, the output layer", "sparsemax, 16 symbols (cpu-quick), 1,500 steps.",
        lambda model: f"{'scaled' if model.scales_output else 'plain'} output", SORTING,
    ),
}  # fmt: skip


# -- recipes -------------------------------------------------------------------------------------

PAPER, CODE, OURS = "the paper", "public code", "ours"
MIXED = f"{PAPER} for language models, {CODE} for the others"
Told = tuple[str, Callable[[RunConfig], str], str]  # a setting, how it reads, and where it is known from


def recipes_section() -> str:
    """What `--preset paper` sets in each experiment, read off the presets, and where it is known from."""
    with tempfile.TemporaryDirectory() as folder:
        prepare([Stories(400)], load_tokenizer("bytes"), Path(folder) / "stories")
        stories = language_modelling.paper(Corpus.open(Path(folder) / "stories"))
    columns = {
        "length generalisation": length_generalisation.paper("mqmtar"), "RegBench, mosaic": in_context.paper("mosaic", 1000),
        "RegBench, transformer": in_context.paper("transformer", 1000), "language modelling": stories,
    }  # fmt: skip
    rows = [[name, *(read(config) for config in columns.values()), source] for name, read, source in TOLD]
    models = [
        [name, str(config.model.layers), str(config.model.heads), BASELINES[name]]
        for name in in_context.RECIPES
        if name != "mosaic"
        for config in [in_context.paper(name, 1000)]
    ]
    rates = "; ".join(f"`{name}`: rate {rate:g}, weight decay {decay:g}" for name, (rate, decay) in in_context.RATES.items())
    return (
        table(["setting", *columns, "known from"], rows)
        + f"\n\nRegBench has two recipes by name (`--recipe`): {rates}. The first is the benchmark's and stands in the paper's"
        " table, the second is that of the paper's repository.\n\n"
        + table(["baseline of RegBench", "layers", "heads", "as in the benchmark's public code"], models)
    )


def _dropouts(config: RunConfig) -> str:
    model = config.model
    rates = {"outputs": model.dropout, "weights": model.attention_dropout, "embedding": model.embedding_dropout}
    rates |= {"slots": model.persistent_dropout} if model.architecture == "mosaic" else {}
    return ", ".join(f"{name} {rate:g}" for name, rate in rates.items() if rate) or "none"


def _schedule(config: RunConfig) -> str:
    training = config.training
    end = f"a cosine to step {training.horizon:,}" if training.horizon else "a cosine to the end"
    return f"{training.warmup:,} steps of warm-up, {end}"


def _slots(config: RunConfig) -> str:
    return f"{config.model.slots_per_head:,}" if config.model.architecture == "mosaic" else "–"


def _judged(config: RunConfig) -> str:
    best = config.training.keep == "best" and config.experiment != length_generalisation.NAME  # which validates without a loss
    return "of the lowest validation loss" if best else "the last"


TOLD: Sequence[Told] = (
    ("rate, first and last", lambda c: f"{c.training.rate:g}, {c.training.final_rate:g}", f"{PAPER}; the last also {CODE}"),
    ("schedule", _schedule, MIXED),
    ("AdamW β", lambda c: ", ".join(f"{beta:g}" for beta in c.training.betas), MIXED),
    ("weight decay", lambda c: f"{c.training.decay:g} of {'all' if c.training.decay_all else 'matrices'}", f"{PAPER}, {CODE}"),
    ("clipping", lambda c: f"{c.training.clip:g}" if c.training.clip else "none", f"{MIXED}; of the first, {OURS}"),
    ("batch, steps", lambda c: f"{c.training.batch}, {c.training.steps:,}", PAPER),
    ("dropout", _dropouts, CODE),
    ("slots of a head", _slots, MIXED),
    ("embedding at the start", lambda c: f"N(0, {c.model.embedding_std:.3g}²)", CODE),
    ("logits", lambda c: "divided by √width" if c.model.scales_output else "plain", CODE),
    ("weights that are judged", _judged, PAPER),
    ("patience", lambda c: f"{c.training.patience} validations" if c.training.patience else "none", OURS),
)
BASELINES = {
    "transformer": "learned positions; dropout of attention 0.1",
    "retnet": "values twice as wide as keys, biases, scores normalised by row; the number of heads is that of its file",
    "gla": "Linear N(0, 0.02²)",
    "h3": "taps of the shift U(−1/8, 1/8), bilinear discretisation; state-space parameters at 1e-3 at most, without decay",
    "s4d": "S4D-Inv, one A for all channels, no GLU; state-space parameters as H3's",
    "mamba": "one bare layer on raw embeddings N(0, 1): no norm, no residual, no dropout",
}


# -- the plan of GPU runs ------------------------------------------------------------------------

SHOWN = 4  # runs of an item, whose numbers stand in the table


def plan_section() -> str:
    """The runs that `results/make.py plan` lists, what was expected of them, and what came of those that have a line."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "results" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    rows = []
    for due in make.PLAN:
        # which runs of language models are asked for depends on a corpus, and not every machine has it
        asked, found = ([], []) if due.command.startswith("lm ") else make.find_lines(due)
        came = "; ".join(map(_sum_up, found[:SHOWN])) + (" …" if len(found) > SHOWN else "")
        rows.append([due.title, due.prediction, came or "not run", f"{len(found)} of {len(asked)}" if asked else "–"])
    return table(["what", "expected", "came", "runs"], rows)


def _sum_up(run: Run) -> str:
    size, model = run.config.data.get("examples"), run.config.model
    name = run.variant.label + (f", {size:,} examples" if size else f", {run.config.data.get('task')}")
    stopped = f" after {run.steps:,} steps" if run.steps < run.config.training.steps and model.kernel and not size else ""
    row = run.latest[0]
    if isinstance(row, Scored):
        return f"{name} {100 * row.accuracy:.1f} %, TVD {100 * row.tvd:.1f}"
    shares = (f"{100 * one.exact / one.samples:.0f}" for one in run.latest if isinstance(one, Evaluated))
    return f"{name}{stopped} {', '.join(list(shares)[:3])} %"
