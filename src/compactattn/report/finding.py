"""What the numbers say, in sentences made from them: the main finding, and how far we are from the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compactattn.evaluation.statistics import Summary
from compactattn.kernels import gaussian
from compactattn.report import paper
from compactattn.report.comparison import Comparison, Line
from compactattn.report.lines import list_changes, list_doubts, list_failures, read_memories, span
from compactattn.report.paper import Variant
from compactattn.report.runs import Run

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
    lengths: int  # lengths, kernels and differences that it was chosen from
    kernels: int
    differences: int


def find(comparison: Comparison) -> Finding:
    """The main finding of a comparison; only lines that have learnt the task are held against each other."""
    learnt = list_learnt(comparison)
    if not learnt:
        return Finding(_state_failure(comparison), _state_learning(comparison))
    base = find_baseline(comparison)
    kernels = [line for line in comparison.lines if line.variant.compact and line is not base]
    if base is not None and base not in learnt:
        return _find_without_baseline(comparison, base, learnt)
    rivals = [line for line in kernels if line in learnt]
    if base is not None and kernels and not rivals:
        return _find_without_rivals(comparison, base, kernels)
    lead = None if base is None else find_lead(comparison, base, rivals)
    if base is None or lead is None:
        return Finding(_state_best(comparison, learnt), _state_learning(comparison))
    which = "compact kernels" if len(rivals) == len(kernels) else "compact kernels that have learnt the task"
    details = [
        _state_field(comparison, lead, base, rivals, which),
        *_state_winner(lead, base, learnt),
        _state_doubt(lead),
        *_state_choice(lead),
        *_state_learning(comparison),
    ]
    return Finding(_state_lead(comparison, lead, base), details)


def list_learnt(comparison: Comparison) -> list[Line]:
    """The lines that have learnt the task at the training length; all of them where none was tested there."""
    at_home = _at_home(comparison)
    if not at_home:
        return list(comparison.lines)
    return [line for line in comparison.lines if at_home.get(line.label, 0) >= LEARNT]


def find_baseline(comparison: Comparison) -> Line | None:
    """The Gaussian Memory Mosaic, or else the Transformer; of several, one that has learnt the task if there is one."""
    learnt = list_learnt(comparison)
    for variant in _BASELINES:
        lines = [line for line in comparison.lines if line.variant == variant]
        if lines:
            return next((line for line in lines if line in learnt), lines[0])
    return None


def find_lead(comparison: Comparison, base: Line, rivals: list[Line]) -> Lead | None:
    """The largest of all differences to the baseline past the training length."""
    found = [
        (length, line)
        for length in comparison.lengths
        if length > comparison.longest and length in base.cells
        for line in rivals
        if length in line.cells
    ]
    if not found:
        return None
    length, best = max(found, key=lambda pair: pair[1].cells[pair[0]].mean - base.cells[pair[0]].mean)
    lengths, kernels = len({n for n, _ in found}), len({line.label for _, line in found})
    return Lead(length, best, best.cells[length], base.cells[length], lengths, kernels, len(found))


def _find_without_baseline(comparison: Comparison, base: Line, learnt: list[Line]) -> Finding:
    """What can be said where the baseline has not yet learnt the task: who has, and how far they carry."""
    home = base.cells.get(comparison.longest)
    if home is None:
        why = f"{_capital(_name(base))} was not tested at the training length"
    else:
        why = f"{_after([base])} {_name(base)} has not yet learnt {comparison.subject} ({_short(home.mean)})"
    headline = f"{why}, so nothing can be said about extrapolation against it"
    return Finding(f"{headline}; {_state_reach(comparison, learnt)}.", _list_reach(comparison, learnt))


def _find_without_rivals(comparison: Comparison, base: Line, kernels: list[Line]) -> Finding:
    """What can be said where the baseline alone has learnt the task."""
    at_home = _at_home(comparison)
    best = max(kernels, key=lambda line: at_home.get(line.label, -1))
    if best.label in at_home:
        share = f"the best at the training length: {best.label}, {_short(at_home[best.label])}"
        why = f"{_after(kernels)} no compact kernel has yet learnt {comparison.subject} ({share})"
    else:
        why = "No compact kernel was tested at the training length"
    headline = f"{why}, so nothing can be said about extrapolation against {_name(base)}"
    learnt = list_learnt(comparison)
    return Finding(f"{headline}; {_state_reach(comparison, learnt)}.", _list_reach(comparison, learnt))


def _at_home(comparison: Comparison) -> dict[str, float]:
    """The mean of each line at the training length, by its label."""
    return {line.label: line.cells[comparison.longest].mean for line in comparison.lines if comparison.longest in line.cells}


def _state_lead(comparison: Comparison, lead: Lead, base: Line) -> str:
    where = f"{comparison.factor(lead.length)} the training length"
    ours, theirs = (f" ({s.seeds} {'seed' if s.seeds == 1 else 'seeds'})" for s in (lead.ours, lead.base))
    ours, theirs = ("", "") if lead.ours.seeds == lead.base.seeds else (ours, theirs)
    shares = f"{_percent(lead.ours.mean)} of {comparison.subject} samples exactly right{ours}"
    if _is_ahead(lead.ours, lead.base):
        return f"At {where}, {lead.best.label} gets {shares}; {_name(base)} gets {_percent(lead.base.mean)}{theirs}."
    return (
        f"No compact kernel is ahead of {_name(base)} past the training length: at {where}, the best, "
        f"{lead.best.label}, gets {shares}, {_name(base)} {_percent(lead.base.mean)}{theirs}."
    )


def _state_failure(comparison: Comparison) -> str:
    label, mean = max(_at_home(comparison).items(), key=lambda item: item[1])
    share = f"{_short(mean)} of {comparison.subject} samples exactly right"
    return f"Nothing to extrapolate yet: at the training length itself, the best, {label}, gets {share}."


def _is_ahead(one: Summary, other: Summary) -> bool:
    """Whether one has more samples right, in a number that shows it."""
    return one.mean > other.mean and _percent(one.mean) != _percent(other.mean)


def _state_best(comparison: Comparison, learnt: list[Line]) -> str:
    """The furthest that any line gets, where there is nothing to hold it against."""
    length = max(n for line in learnt for n in line.cells)
    line = max((line for line in learnt if length in line.cells), key=lambda line: line.cells[length].mean)
    share = f"{_percent(line.cells[length].mean)} of {comparison.subject} samples exactly right"
    return f"At {comparison.factor(length)} the training length, {line.label} gets {share}."


def _rank_reach(comparison: Comparison, learnt: list[Line]) -> tuple[int, list[Line]] | None:
    """A length past training and the lines tested there, the best first; none if no line was tested past training.

    The length is the greatest at which a line still gets half of the samples, or else the first past training.
    """
    past = {n for line in learnt for n in line.cells if n > comparison.longest}
    if not past:
        return None
    held = [n for n in past if any(n in line.cells and line.cells[n].mean >= 0.5 for line in learnt)]
    length = max(held) if held else min(past)
    return length, sorted((line for line in learnt if length in line.cells), key=lambda line: -line.cells[length].mean)


def _state_reach(comparison: Comparison, learnt: list[Line]) -> str:
    """Who of the lines that have learnt the task carries furthest, as the end of a sentence."""
    reach = _rank_reach(comparison, learnt)
    if reach is None:
        return "no variant that has learnt it was tested past the training length"
    length, (best, *_) = reach
    share = f"{_percent(best.cells[length].mean)} at {comparison.factor(length)} the training length"
    if len(learnt) == 1:
        return f"only {_name(best)} has, and gets {share}"
    return f"of the {len(learnt)} variants that have, {best.label} carries furthest, with {share}"


def _list_reach(comparison: Comparison, learnt: list[Line]) -> list[str]:
    """The same of each line that has learnt the task, and then who has not yet."""
    reach = _rank_reach(comparison, learnt)
    sentences = []
    if reach is not None and len(learnt) > 1:
        length, lines = reach
        names = ", ".join(f"{line.label} ({_percent(line.cells[length].mean)})" for line in lines)
        sentences = [f"Of those that have learnt the task, at {comparison.factor(length)}: {names}."]
    return sentences + _state_learning(comparison)


def _state_learning(comparison: Comparison) -> list[str]:
    """Whether the task was learnt at the training length."""
    at_home = _at_home(comparison)
    if not at_home:
        return ["No variant was tested at the training length, so it is not known which have learnt the task."]
    behind = {label: mean for label, mean in at_home.items() if mean < LEARNT}
    unknown = [line.label for line in comparison.lines if line.label not in at_home]
    untested = [f"Not tested at the training length, so left out: {', '.join(unknown)}."] if unknown else []
    if not behind:
        every = "Every variant" if not unknown else "Every variant tested there"
        who = f"{every} has" if len(at_home) > 1 else f"{next(iter(at_home))} has"
        least = _percent(min(at_home.values()))
        return [f"{who} learnt the task itself: at the training length the least is {least}.", *untested]
    names = ", ".join(f"{label} ({_short(mean)})" for label, mean in behind.items())
    lines = [line for line in comparison.lines if line.label in behind]
    falling = [line for line in lines if all(map(_is_falling, line.finished))]
    whose = "" if falling == lines else f": {'; '.join(line.label for line in falling)}"
    return [
        f"Not yet learnt {_after(lines).lower()} (under {_percent(LEARNT)} at the training length), so no test of "
        f"extrapolation: {names}.",
        *([f"Their training losses were still falling{whose}."] if falling else []),
        *untested,
    ]


def _is_falling(run: Run) -> bool:
    """Whether the last tenth of its training losses is lower than the tenth before it, on average."""
    losses = [loss for _, loss in run.losses]
    tenth = len(losses) // 10
    return tenth > 0 and sum(losses[-tenth:]) < sum(losses[-2 * tenth : -tenth])


def _state_field(comparison: Comparison, lead: Lead, base: Line, rivals: list[Line], which: str) -> str:
    there = [line for line in rivals if lead.length in line.cells]
    ahead = [line for line in there if _is_ahead(line.cells[lead.length], lead.base)]
    if len(there) == 1:
        return f"No other of the {which} has a number at {comparison.factor(lead.length)}."
    every = "Both" if len(there) == 2 else f"All {len(there)}"
    count = every if len(ahead) == len(there) else f"{len(ahead)} of the {len(there)}"
    are = "is" if len(ahead) == 1 else "are"
    return f"{count} {which} {are} ahead of {_name(base)} at {comparison.factor(lead.length)}."


def _state_winner(lead: Lead, base: Line, learnt: list[Line]) -> list[str]:
    """Who is best of all at that length, where it is neither of the two in the headline."""
    best = max((line for line in learnt if lead.length in line.cells), key=lambda line: line.cells[lead.length].mean)
    there = best.cells[lead.length]
    if best in (lead.best, base) or not (_is_ahead(there, lead.ours) and _is_ahead(there, lead.base)):
        return []
    return [f"Best of all there is {best.label} with {_percent(there.mean)}."]


def _state_doubt(lead: Lead) -> str:
    apart = lead.ours.low > lead.base.high or lead.base.low > lead.ours.high
    ours, base = (f"{_percent(s.low)} to {_percent(s.high)}" for s in (lead.ours, lead.base))
    verdict = "do not overlap" if apart else "overlap, so the difference may be chance"
    first, second = _name_source(lead.ours), _name_source(lead.base)
    of = f"they are {first}" if first == second else f"the first is {first}; the second is {second}"
    return f"The 95\u00a0% intervals of the two in the headline ({ours} and {base}) {verdict}; {of}."


def _name_source(summary: Summary) -> str:
    """What an interval is over."""
    if summary.seeds > 1:
        return f"over {summary.seeds} seeds"
    return "over test samples, from a single seed, which says nothing about other seeds"


def _state_choice(lead: Lead) -> list[str]:
    """That the headline was chosen, where there was a choice."""
    if lead.differences == 1:
        return []
    lengths = f"{lead.lengths} {'length' if lead.lengths == 1 else 'lengths'}"
    kernels = f"{lead.kernels} {'kernel' if lead.kernels == 1 else 'kernels'}"
    return [
        f"This gap is the largest of {lead.differences} differences, over {lengths} and {kernels}; "
        "the intervals are not adjusted for that choice."
    ]


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
    layout = comparison.lines[0].runs[0].config.data.get("layout", "shared")
    if comparison.task == "mqmtar" and layout == "shared":
        notes.append("words of the tests: those of training, an easier task; in the paper each file has its own")
    about_runs = list_doubts(comparison.lines, "length") + list_failures(comparison.failed)
    recipe = paper.RECIPES.get(comparison.task)
    if recipe is None:
        return [f"the paper has no task {comparison.subject}", *about_runs]
    steps = [n for line in comparison.lines for n in line.steps]
    runs = [run for line in comparison.lines for run in line.runs]
    models, trainings = [run.config.model for run in runs], [run.config.training for run in runs]
    examples = max(line.steps[1] * line.runs[0].config.training.batch for line in comparison.lines)
    ours: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "steps": (steps, [recipe.steps]),
        "batch": ([t.batch for t in trainings], [recipe.batch]),
        "layers": ([m.layers for m in models], [recipe.layers]),
        "width": ([m.width for m in models], [recipe.width]),
        "heads": ([m.heads for m in models], [recipe.heads]),
        "learning rate": ([t.rate for t in trainings], [recipe.rate]),
        "weight decay": ([t.decay for t in trainings], [recipe.decay]),
        "warm-up steps": ([t.warmup for t in trainings], [paper.WARMUP]),
        **read_memories(runs, recipe.betas, [recipe.slots], recipe.dropouts),
        "seeds": ([cell.seeds for line in comparison.lines for cell in line.cells.values()], [paper.SEEDS]),
        "samples of a test": ([n for line in comparison.lines for n in line.samples], [paper.SAMPLES]),
    }
    notes += list_changes(ours)
    notes.append(
        f"training examples: at most {examples:,}, {_share(examples / recipe.examples)} of the paper's {recipe.examples:,}"
    )
    return notes + about_runs


def _name(line: Line) -> str:
    if line.variant == _BASELINES[0]:
        return line.label.replace("Gaussian", "Gaussian attention", 1)
    return line.label if line.variant.architecture == "mosaic" else f"the {line.label}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _after(lines: Sequence[Line]) -> str:
    steps = [n for line in lines for n in line.steps]
    return f"After {span(steps)} steps" if max(steps) else "So far"


def _percent(share: float) -> str:
    """A share in whole per cent, never rounded to all or to nothing."""
    rounded = f"{100 * share:.0f}"
    if share > 0 and rounded == "0":
        return "under 1\u00a0%"
    if share < 1 and rounded == "100":
        return "over 99\u00a0%"
    return f"{rounded}\u00a0%"


def _short(share: float) -> str:
    """The same, but never rounded up to the share from which a task counts as learnt."""
    return f"under {_percent(LEARNT)}" if share < LEARNT and _percent(share) == _percent(LEARNT) else _percent(share)


def _share(share: float) -> str:
    return f"{100 * share:.2g}\u00a0%"
