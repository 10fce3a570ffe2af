"""What comparisons of runs have in common: lines of runs that differ in their seed alone, with names and an order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from compactattn.evaluation.statistics import t_interval
from compactattn.kernels import gaussian
from compactattn.report.evaluations import Evaluated, Predicted, Scored
from compactattn.report.paper import Variant
from compactattn.report.runs import Run

IDLE = (
    "device",
    "log_every",
    "checkpoint_every",
    "validate_every",
    "accumulation",
    "compile",
    "graph",
)  # training fields that move no number
BASE = Variant("mosaic", gaussian())  # what every compact kernel is held against
FALLING = 3  # validations in a row, each with a lower loss than the one before
FORMER_START = (
    "Memory Mosaics with a scaled output were trained here from the former start of the tied embedding, N(0, 1). It is not the "
    "published one, so they do not reproduce the paper's."
)
ONE_SEED = "Every number is of a single seed: how much another would change it is not known, so differences may be chance"
Place = TypeVar("Place", int, str)
Cell = TypeVar("Cell")
Row = TypeVar("Row", Evaluated, Scored, Predicted)
Recipe = dict[str, dict[str, Any]]


def span(values: Iterable[float]) -> str:
    """The least and the greatest of some numbers, or the one that they all are: "1 to 3"."""
    values = list(values)
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


class Spread(NamedTuple):
    """A number over seeds: its mean, the best, and the 95 % interval of the mean.

    One seed has no interval: the positions of a text, or of a sample from one automaton, are no independent draws, and to
    count them as such would make it far too narrow.
    """

    mean: float
    best: float
    interval: tuple[float, float] | None
    seeds: int


def spread_over_seeds(
    values: Sequence[float],
    best: Callable[[Sequence[float]], float],
    interval: Callable[[Sequence[float]], tuple[float, float]] = t_interval,
) -> Spread:
    return Spread(sum(values) / len(values), best(values), interval(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Line(Generic[Place, Cell, Row]):
    """A variant: its runs, which differ in their seed alone, and what they reach in each column."""

    variant: Variant
    label: str
    runs: tuple[Run, ...]
    cells: dict[Place, Cell]  # by length, by number of examples, or by split
    rows: dict[Place, tuple[Row, ...]]  # what each cell sums up, one for every run that was evaluated there

    @property
    def name(self) -> str:
        """Its label in a figure, which says why a line without a number ends."""
        return self.label if self.cells or not self.failure else f"{self.label}: {self.failure}"

    @property
    def seeds(self) -> list[int]:
        return sorted({run.config.seed for run in self.runs})

    @property
    def finished(self) -> tuple[Run, ...]:
        """Its runs without those that failed; all of them where none did not."""
        return tuple(run for run in self.runs if not run.failed) or self.runs

    @property
    def failure(self) -> str:
        """What the seeds came to that failed, as in "diverged at step 412, loss nan"; nothing where none did."""
        failed = [run for run in self.runs if run.failed]
        one = len(self.runs) == 1
        return "; ".join(run.failed if one else f"seed {run.config.seed} {run.failed}" for run in failed)

    @property
    def steps(self) -> tuple[int, ...]:
        """The fewest and the most steps of training behind its numbers; nothing where it has none."""
        done = [row.step for rows in self.rows.values() for row in rows]
        return (min(done), max(done)) if done else ()

    @property
    def samples(self) -> list[int]:
        """The number of samples of every evaluation."""
        return [row.samples for rows in self.rows.values() for row in rows]

    @property
    def precisions(self) -> set[str]:
        """The precisions that its numbers were computed in, as far as they were noted."""
        return {row.precision for rows in self.rows.values() for row in rows if row.precision}


def is_former(run: Run) -> bool:
    """Whether it began from the former start, so that it shares no comparison with runs of the published one."""
    return run.config.model.start == "former"


def split_starts(runs: Iterable[Run], setting: Callable[[Run], Any]) -> Iterator[tuple[Run, bool]]:
    """Each run with whether it belongs beside those of the former start.

    A model with a plain output starts the same either way. It stands beside every run of its setting, so perhaps twice.
    """
    starts: dict[Any, set[bool]] = {}
    for run in (runs := list(runs)):
        if run.config.model.scales_output:
            starts.setdefault(setting(run), set()).add(is_former(run))
    for run in runs:
        own = {is_former(run)}
        for former in sorted(own if run.config.model.scales_output else starts.get(setting(run), own)):
            yield run, former


def name_start(text: str, former: bool) -> str:
    return f"{text}, former start" if former else text


def read_recipe(run: Run) -> Recipe:
    """All of a config that may move a number, but the seed and the data."""
    config = asdict(run.config)
    training = {name: value for name, value in config["training"].items() if name not in IDLE}
    model = config["model"] | {"kernel": str(run.variant.kernel)}  # by what it is, not by which of its names was typed
    return {"model": model, "training": training}


def group(runs: Iterable[Run], recipe: Callable[[Run], Recipe] = read_recipe) -> list[list[Run]]:
    """The runs of each recipe, by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(recipe(run), sort_keys=True), []).append(run)
    return [sorted(group, key=lambda run: run.config.seed) for group in found.values()]


def name(run: Run, groups: Sequence[Sequence[Run]], recipe: Callable[[Run], Recipe] = read_recipe) -> str:
    """The variant's label, and where another group has the same variant, the fields that tell them apart."""
    twins = [recipe(group[0]) for group in groups if group[0].variant == run.variant]
    own = recipe(run)
    apart = [
        WORDS.get((field, own[part][field])) or f"{field.replace('_', ' ')} {_show(own[part][field])}"
        for part in own
        for field in own[part]
        if any(twin[part][field] != own[part][field] for twin in twins)
    ]
    return ", ".join([run.variant.label, *apart])


WORDS = {  # of fields whose value does not speak for itself
    ("decay_all", True): "decay of all",
    ("decay_all", False): "decay of matrices",
    ("clip", 0.0): "no clipping",
    ("attention_dropout", 0.0): "no attention dropout",
}


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def refuse_twins(runs: Iterable[Run], what: str) -> None:
    """Complains of two runs of one seed; `what` says what both are."""
    for one, other in pairwise(sorted(runs, key=lambda run: run.config.seed)):
        if one.config.seed == other.config.seed:
            raise ValueError(f"{one.source} and {other.source} are both {what} with seed {one.config.seed}; give one of them")


def sort_lines(lines: Iterable[Line[Place, Cell, Row]], rows: Mapping[Variant, Any]) -> tuple[Line[Place, Cell, Row], ...]:
    """The lines in the order of the paper's rows, whatever their form, then those it does not have."""
    order = {variant: place for place, variant in enumerate(rows)}
    return tuple(sorted(lines, key=lambda line: (order.get(replace(line.variant, form=""), len(order)), line.label)))


def name_line(line: Line[Any, Any, Any]) -> str:
    """Its label in a sentence: "Gaussian attention" rather than "Gaussian"."""
    return line.label.replace("Gaussian", "Gaussian attention", 1) if line.variant == BASE else line.label


# -- what a reader should know about the runs ----------------------------------------------------


def list_precisions(lines: Sequence[Line[Any, Any, Any]]) -> list[str]:
    """The lines that were evaluated in another precision than they were trained in."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        trained = line.runs[0].config.training.precision  # of all its runs, which differ in their seed alone
        for precision in sorted(line.precisions - {trained}):
            found.setdefault((trained, precision), []).append(line.label)
    return [
        f"trained in {trained} but evaluated in {precision}: {'; '.join(labels)}"
        for (trained, precision), labels in found.items()
    ]


def list_test_sets(lines: Sequence[Line[Any, Any, Any]], column: str) -> list[str]:
    """Columns in which the runs were not judged on one and the same test set; `column` is what a column is called."""
    sets: dict[Any, set[str]] = {}
    for line in lines:
        for place, rows in line.rows.items():
            sets.setdefault(place, set()).update(row.checksum for row in rows if row.checksum)
    return [
        f"{column} {place}: the runs were judged on {len(found)} different test sets"
        for place, found in sorted(sets.items())
        if len(found) > 1
    ]


def list_changes(ours: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[str]:
    """The settings that are not all among the paper's, each with both: "batch: 64; in the paper 512"."""
    return [
        f"{name}: {_list_or_span(values)}; in the paper {' or '.join(f'{value:,}' for value in theirs)}"
        for name, (values, theirs) in ours.items()
        if theirs and not set(values) <= set(theirs)
    ]


def read_memories(
    runs: Sequence[Run], betas: Sequence[float], slots: Sequence[float], dropouts: Sequence[float]
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """What `list_changes` takes, of AdamW and of the mosaics; `dropouts` are of outputs, contextual and persistent weights."""
    mosaics = [run.config.model for run in runs if run.config.model.architecture == "mosaic"]
    return {
        "first beta of AdamW": ([run.config.training.betas[0] for run in runs], betas[:1]),
        "second beta of AdamW": ([run.config.training.betas[1] for run in runs], betas[1:]),
        "slots of persistent memory": ([m.slots_per_head for m in mosaics], slots),
        "dropout": ([m.dropout for m in mosaics], dropouts[:1]),
        "dropout on contextual weights": ([m.attention_dropout for m in mosaics], dropouts[1:2]),
        "dropout on persistent weights": ([m.persistent_dropout for m in mosaics], dropouts[2:]),
    }


def _list_or_span(values: Sequence[float]) -> str:
    """Up to two numbers as they are, more by their least and greatest."""
    few = sorted(set(values))
    return " and ".join(f"{value:,}" for value in few) if len(few) <= 2 else span(values)


def list_doubts(lines: Sequence[Line[Any, Any, Any]], column: str) -> list[str]:
    """What else keeps the lines from being compared; `column` is what a column is called."""
    return list_precisions(lines) + list_test_sets(lines, column) + list_interrupted(lines)


def list_failures(runs: Iterable[Run]) -> list[str]:
    """What came of the runs that failed."""
    return [f"{run.variant.label}{_name_size(run)}, seed {run.config.seed}, {run.failed}" for run in runs]


def list_interrupted(lines: Sequence[Line[Any, Any, Any]]) -> list[str]:
    return [
        f"{line.label}{_name_size(run)}, seed {run.config.seed}, stopped after {run.steps:,} of its"
        f" {run.config.training.steps:,} steps"
        for line in lines
        for run in line.runs
        if is_interrupted(run)
    ]


def _name_size(run: Run) -> str:
    examples = run.config.data.get("examples")
    return f", {examples:,} examples" if isinstance(examples, int) else ""


def is_interrupted(run: Run) -> bool:
    """Whether it has not come to its end, though it could have."""
    return 0 < run.steps < run.config.training.steps and not run.failed and not lost_patience(run)


def lost_patience(run: Run) -> bool:
    """Whether it stopped before its last step as it was told to, because its validation loss no longer fell."""
    losses = [loss for _, loss in run.validations]
    early = bool(losses) and run.steps < run.config.training.steps
    return early and 0 < run.config.training.patience < len(losses) - losses.index(min(losses))


def ended_falling(run: Run) -> bool:
    """Whether patience ended it while its validation loss was falling."""
    last = [loss for _, loss in run.validations[-FALLING - 1 :]]
    return lost_patience(run) and len(last) > FALLING and all(after < before for before, after in pairwise(last))
