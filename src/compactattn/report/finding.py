"""What the numbers say, in sentences made from them: the main finding, and how far we are from the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compactattn.evaluation.statistics import Summary
from compactattn.kernels import gaussian
from compactattn.report import paper
from compactattn.report.comparison import Comparison, Line
from compactattn.report.paper import Variant

LEARNT = 0.9  # exact match at the training length from which a task counts as learnt
CLOSE = 0.05  # a difference to the paper of less is called agreement

_BASELINES = (Variant("mosaic", gaussian()), Variant("transformer", gaussian(), "alibi"))


class Finding(NamedTuple):
    """A headline and the sentences that belong to it."""

    headline: str
    details: list[str]


class Lead(NamedTuple):
    """The length past training at which some compact kernel is furthest ahead of the baseline, or least behind."""

    length: int
    best: Line
    ours: Summary
    base: Summary

    @property
    def gap(self) -> float:
        return self.ours.mean - self.base.mean


def find(comparison: Comparison) -> Finding:
    """The main finding of a comparison."""
    if not _learnt(comparison):
        return Finding(_state_failure(comparison), _state_learning(comparison))
    base = find_baseline(comparison)
    rivals = [line for line in comparison.lines if line.variant.kernel.compact and line is not base]
    lead = None if base is None else find_lead(comparison, base, rivals)
    if base is None or lead is None:
        return Finding(_state_best(comparison), _state_learning(comparison))
    where = f"{comparison.factor(lead.length)} the training length"
    shares = f"{_percent(lead.ours.mean)} of {comparison.title} samples exactly right"
    if lead.gap > 0:
        headline = f"At {where}, {lead.best.label} gets {shares}; {_name(base)} gets {_percent(lead.base.mean)}."
    else:
        headline = (
            f"No compact kernel is ahead of {_name(base)} past the training length: at {where}, the best, "
            f"{lead.best.label}, gets {shares}, {_name(base)} {_percent(lead.base.mean)}."
        )
    details = [_state_field(comparison, lead, base, rivals), *_state_winner(comparison, lead, base), _state_doubt(lead)]
    return Finding(headline, [*details, *_state_learning(comparison)])


def find_baseline(comparison: Comparison) -> Line | None:
    """The Gaussian Memory Mosaic, or else the Transformer."""
    lines = {line.variant: line for line in reversed(comparison.lines)}
    return next((lines[variant] for variant in _BASELINES if variant in lines), None)


def find_lead(comparison: Comparison, base: Line, rivals: list[Line]) -> Lead | None:
    found = [
        Lead(length, line, line.cells[length], base.cells[length])
        for length in comparison.lengths
        if length > comparison.longest and length in base.cells
        for line in rivals
        if length in line.cells
    ]
    return max(found, key=lambda lead: lead.gap, default=None)


def _learnt(comparison: Comparison) -> bool:
    """Whether any line has learnt the task at the training length, or none was tested there."""
    at_home = _at_home(comparison).values()
    return not at_home or max(at_home) >= LEARNT


def _at_home(comparison: Comparison) -> dict[str, float]:
    """The mean of each line at the training length, by its label."""
    return {line.label: line.cells[comparison.longest].mean for line in comparison.lines if comparison.longest in line.cells}


def _state_failure(comparison: Comparison) -> str:
    label, mean = max(_at_home(comparison).items(), key=lambda item: item[1])
    share = f"{_percent(mean)} of {comparison.title} samples exactly right"
    return f"Nothing to extrapolate yet: at the training length itself, the best, {label}, gets {share}."


def _state_best(comparison: Comparison) -> str:
    """The furthest that any line gets, where there is nothing to hold it against."""
    length = max(n for line in comparison.lines for n in line.cells)
    line = max((line for line in comparison.lines if length in line.cells), key=lambda line: line.cells[length].mean)
    share = f"{_percent(line.cells[length].mean)} of {comparison.title} samples exactly right"
    return f"At {comparison.factor(length)} the training length, {line.label} gets {share}."


def _state_learning(comparison: Comparison) -> list[str]:
    """Whether the task was learnt at the training length."""
    at_home = _at_home(comparison)
    if not at_home:
        return []
    behind = {label: mean for label, mean in at_home.items() if mean < LEARNT}
    if not behind:
        who = "Every variant has" if len(at_home) > 1 else f"{next(iter(at_home))} has"
        return [f"{who} learnt the task itself: at the training length the least is {_percent(min(at_home.values()))}."]
    names = ", ".join(f"{label} ({_percent(mean)})" for label, mean in behind.items())
    return [f"Not learnt to {_percent(LEARNT)} even at the training length, so no test of extrapolation: {names}."]


def _state_field(comparison: Comparison, lead: Lead, base: Line, rivals: list[Line]) -> str:
    there = [line for line in rivals if lead.length in line.cells]
    ahead = [line for line in there if line.cells[lead.length].mean > lead.base.mean]
    if len(there) == 1:
        return f"It is the only compact kernel with a number at {comparison.factor(lead.length)}."
    count = f"All {len(there)}" if len(ahead) == len(there) else f"{len(ahead)} of the {len(there)}"
    are = "is" if len(ahead) == 1 else "are"
    return f"{count} compact kernels {are} ahead of {_name(base)} at {comparison.factor(lead.length)}."


def _state_winner(comparison: Comparison, lead: Lead, base: Line) -> list[str]:
    """Who is best of all at that length, where it is neither of the two in the headline."""
    best = max((line for line in comparison.lines if lead.length in line.cells), key=lambda line: line.cells[lead.length].mean)
    mean = best.cells[lead.length].mean
    if best in (lead.best, base) or mean <= max(lead.ours.mean, lead.base.mean):
        return []
    return [f"Best of all there is {best.label} with {_percent(mean)}."]


def _state_doubt(lead: Lead) -> str:
    apart = lead.ours.low > lead.base.high or lead.base.low > lead.ours.high
    seeds = min(lead.ours.seeds, lead.base.seeds)
    ours, base = (f"{_percent(s.low)} to {_percent(s.high)}" for s in (lead.ours, lead.base))
    verdict = "do not overlap" if apart else "overlap, so the difference may be chance"
    of = f"over {seeds} seeds" if seeds > 1 else "over test samples, from a single seed, which says nothing about other seeds"
    return f"The 95\u00a0% intervals of the two in the headline ({ours} and {base}) {verdict}; they are {of}."


def hold_against_paper(comparison: Comparison) -> list[str]:
    """How our means compare with the paper's, in sentences; none if the paper has no such numbers."""
    pairs = [
        (line, length, summary.mean, cell.mean)
        for line in comparison.lines
        for length, summary in line.cells.items()
        if (cell := comparison.papers_cell(line, length)) is not None
    ]
    if not pairs:
        return []
    close = sum(abs(ours - theirs) <= CLOSE + 1e-9 for *_, ours, theirs in pairs)
    line, length, ours, theirs = max(pairs, key=lambda pair: abs(pair[2] - pair[3]))
    below = sum(ours < theirs - CLOSE - 1e-9 for *_, ours, theirs in pairs)
    within = f"Of {len(pairs)} means, {close} are within {CLOSE} of the paper's"
    sentences = [f"{within}, {below} are lower and {len(pairs) - close - below} higher."]
    if abs(ours - theirs) > CLOSE:
        where = f"{line.label} at {comparison.factor(length)}"
        sentences.append(f"The largest difference is {where}: {ours:.2f} here, {theirs:.2f} in the paper.")
    return sentences


def list_departures(comparison: Comparison) -> list[str]:
    """Where the runs depart from the paper's recipe, each with both numbers."""
    notes = [f"{name} of the data: {ours}; in the paper {theirs}" for name, (theirs, ours) in comparison.changed.items()]
    recipe = paper.RECIPES.get(comparison.task)
    if recipe is None:
        return [f"the paper has no task {comparison.title}"]
    steps = sorted({n for line in comparison.lines for n in line.steps})
    models = [run.config.model for line in comparison.lines for run in line.runs]
    trainings = [run.config.training for line in comparison.lines for run in line.runs]
    examples = max(run.steps * run.config.training.batch for line in comparison.lines for run in line.runs)
    ours: dict[str, tuple[Sequence[float], float]] = {
        "steps": (steps, recipe.steps),
        "batch": ([t.batch for t in trainings], recipe.batch),
        "layers": ([m.layers for m in models], recipe.layers),
        "width": ([m.width for m in models], recipe.width),
        "heads": ([m.heads for m in models], recipe.heads),
        "learning rate": ([t.rate for t in trainings], recipe.rate),
        "weight decay": ([t.decay for t in trainings], recipe.decay),
        "warm-up steps": ([t.warmup for t in trainings], paper.WARMUP),
        "seeds": ([len(line.runs) for line in comparison.lines], paper.SEEDS),
        "samples of a test": ([n for line in comparison.lines for part in line.samples.values() for n in part], paper.SAMPLES),
    }
    for name, (values, theirs) in ours.items():
        if set(values) != {theirs}:
            notes.append(f"{name}: {_span(values)}; in the paper {theirs:,}")
    notes.append(
        f"training examples: at most {examples:,}, {_share(examples / recipe.examples)} of the paper's {recipe.examples:,}"
    )
    return notes + _list_test_sets(comparison) + _list_interrupted(comparison)


def _list_test_sets(comparison: Comparison) -> list[str]:
    """Lengths at which the runs were not judged on one and the same test set."""
    sets: dict[int, set[str]] = {}
    for row in (row for line in comparison.lines for run in line.runs for row in run.evaluation):
        if (row.task, row.mode) == (comparison.task, comparison.mode) and row.checksum:
            sets.setdefault(row.length, set()).add(row.checksum)
    return [
        f"length {length}: the runs were judged on {len(found)} different test sets"
        for length, found in sorted(sets.items())
        if len(found) > 1
    ]


def _list_interrupted(comparison: Comparison) -> list[str]:
    return [
        f"{line.label}, seed {run.config.seed}, stopped after {run.steps:,} of its {run.config.training.steps:,} steps"
        for line in comparison.lines
        for run in line.runs
        if 0 < run.steps < run.config.training.steps
    ]


def _name(line: Line) -> str:
    return "Gaussian attention" if line.label == "Gaussian" else f"the {line.label}"


def _percent(share: float) -> str:
    """A share in whole per cent, never rounded to all or to nothing."""
    if 0 < share < 0.005:
        return "under 1\u00a0%"
    if 0.995 <= share < 1:
        return "over 99\u00a0%"
    return f"{100 * share:.0f}\u00a0%"


def _share(share: float) -> str:
    return f"{100 * share:.2g}\u00a0%"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
