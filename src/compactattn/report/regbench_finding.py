"""What the numbers of RegBench say, in sentences made from them, and how far we are from the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from compactattn.data.automata import RegularLanguages
from compactattn.report import regbench_paper as paper
from compactattn.report.facts import format_duration, state_sizes
from compactattn.report.finding import Finding
from compactattn.report.lines import (
    BASE,
    FALLING,
    ONE_SEED,
    Spread,
    ended_falling,
    list_changes,
    list_doubts,
    list_failures,
    name_line,
    read_memories,
    span,
)
from compactattn.report.regbench_comparison import MEASURES, NAMES, Comparison, Line, count_epochs
from compactattn.report.regbench_status import KINDS, Status

SETTINGS = {  # the fields of `RegularLanguages` in words
    "states": "states of an automaton",
    "letters": "letters of an alphabet",
    "edges": "edges of a state",
    "strings": "strings of an example",
    "string_length": "letters of a string",
    "seed": "seed of the languages",
}


def find(comparison: Comparison) -> Finding:
    """The main finding, at the comparison's main size; then every size."""
    details = [
        _state_best(comparison),
        *_state_kernels(comparison),
        *_state_baselines(comparison),
        *_state_chance(comparison),
        *_state_seeds(comparison),
    ]
    return Finding(_state_headline(comparison, comparison.main_size), details)


def _there(comparison: Comparison, size: int) -> list[Line]:
    return [line for line in comparison.lines if size in line.cells]


def _base(comparison: Comparison, size: int) -> Line | None:
    """The Gaussian mosaic; of several, the one that is best there."""
    return _top((line for line in _there(comparison, size) if line.variant == BASE), size)


def _rivals(comparison: Comparison, size: int) -> list[Line]:
    """The compact kernels as the paper has them."""
    mosaics = (line for line in _there(comparison, size) if line.variant.architecture == "mosaic")
    return [line for line in mosaics if line.variant.compact and line.variant.usual]


def _baselines(comparison: Comparison, size: int) -> list[Line]:
    return [line for line in _there(comparison, size) if line.variant.architecture != "mosaic"]


def _top(lines: Iterable[Line], size: int) -> Line | None:
    return max(lines, key=lambda line: line.cells[size].accuracy.mean, default=None)


def _state_headline(comparison: Comparison, size: int) -> str:
    base, rival = _base(comparison, size), _top(_rivals(comparison, size), size)
    other = _top(_baselines(comparison, size), size)
    start = f"With {size:,} training examples, "
    what = f"of the positions of {comparison.subject}"
    if base is None or rival is None:
        best = comparison.best(size, "accuracy")
        return f"{start}{name_line(best)} predicts a legal next token at {_share(best, size)} {what}."
    rest = "" if other is None else f"; the best other architecture, {name_line(other)}, at {_share(other, size)}"
    ours, theirs = _share(rival, size), f"{name_line(base)} at {_share(base, size)}"
    if _lead(rival, base, size) > 0:
        return f"{start}{rival.label} predicts a legal next token at {ours} {what}, {theirs}{rest}."
    return (
        f"{start}no compact kernel is ahead of {name_line(base)}: the best, {rival.label}, predicts a legal next token at "
        f"{ours} {what}, {theirs}{rest}."
    )


def _state_best(comparison: Comparison) -> str:
    """Who is best in every column."""
    parts = []
    for measure, word in zip(MEASURES, ("highest accuracy", "lowest TVD"), strict=True):
        found = [(size, comparison.best(size, measure)) for size in comparison.sizes]
        names = ", ".join(f"{line.label} with {size:,} examples ({_share(line, size, measure)})" for size, line in found)
        parts.append(f"{word}: {names}")
    return f"{_capital('; '.join(parts))}."


def _state_kernels(comparison: Comparison) -> list[str]:
    """How many compact kernels are ahead of Gaussian attention with each number of examples."""
    parts = []
    for size in comparison.sizes:
        base, rivals = _base(comparison, size), _rivals(comparison, size)
        if base is not None and rivals:
            ahead = sum(_lead(line, base, size) > 0 for line in rivals)
            parts.append(f"{ahead} of {len(rivals)} with {size:,} examples")
    return [f"Compact kernels ahead of Gaussian attention in accuracy: {', '.join(parts)}."] if parts else []


def list_kernels(comparison: Comparison) -> list[str]:
    """The best compact kernel against Gaussian attention in both measures, an item for each number of examples."""
    items = []
    for size in comparison.sizes:
        base, rivals = _base(comparison, size), _rivals(comparison, size)
        if base is not None and rivals:
            parts = "; ".join(_hold_against_base(base, rivals, size, measure) for measure in MEASURES)
            items.append(f"With {size:,} examples: {parts}.")
    return items


def _hold_against_base(base: Line, rivals: Sequence[Line], size: int, measure: str) -> str:
    leads = [_lead(line, base, size, measure) for line in rivals]
    sign = 1 if measure == "accuracy" else -1
    lead, line = max(zip(leads, rivals, strict=True), key=lambda pair: (pair[0], sign * pair[1].cells[size].of(measure).mean))
    count = f"{sum(lead > 0 for lead in leads)} of {len(rivals)} ahead in {NAMES[measure]}"
    spreads = line.cells[size].of(measure), base.cells[size].of(measure)
    return f"{count}, the best, {line.label}, {_side(lead)}{_judge(*spreads)}"


def _judge(ours: Spread, theirs: Spread) -> str:
    """What the seeds say about a difference, where there are several; what one seed says is told once for all."""
    if ours.interval is None or theirs.interval is None:
        return ""
    texts = [f"{100 * low:.1f} to {100 * high:.1f}\u00a0%" for low, high in (ours.interval, theirs.interval)]
    apart = ours.interval[0] > theirs.interval[1] or theirs.interval[0] > ours.interval[1]
    seeds = span((ours.seeds, theirs.seeds))
    verdict = "apart" if apart else "overlapping, so it may be chance"
    return f" (95\u00a0% intervals over {seeds} seeds: {texts[0]} and {texts[1]}, {verdict})"


def _state_baselines(comparison: Comparison) -> list[str]:
    """The best mosaic against the best of the other architectures."""
    parts = []
    for size in comparison.sizes:
        mosaic = _top((line for line in _there(comparison, size) if line.variant.architecture == "mosaic"), size)
        other = _top(_baselines(comparison, size), size)
        if mosaic is not None and other is not None:
            sizes = state_sizes(mosaic.runs[0].config.model, other.runs[0].config.model)
            side = f"{_side(_lead(mosaic, other, size), ' of', ' to')} {name_line(other)}"
            parts.append(f"{side} with {size:,} examples{f' ({sizes})' if sizes else ''}")
    return [f"In accuracy the best Memory Mosaic is {', '.join(parts)}."] if parts else []


def _state_chance(comparison: Comparison) -> list[str]:
    """Whether a model does better than counting in the context, with each number of examples."""
    grams = [reference for reference in comparison.references if "gram" in reference.name]
    if not grams:
        return []
    gram = max(grams, key=lambda reference: reference.accuracy)
    parts = []
    for size in comparison.sizes:
        best = comparison.best(size, "accuracy")
        lead = _round(best.cells[size].accuracy.mean) - _round(gram.accuracy)
        verdict = f"{name_line(best)} does better" if lead > 0 else "no model does better" if lead < 0 else "the best equals it"
        parts.append(f"with {size:,} examples {verdict} ({_share(best, size)})")
    return [f"Without any training {gram.name} reaches {100 * gram.accuracy:.1f}\u00a0%: {', '.join(parts)}."]


def _state_seeds(comparison: Comparison) -> list[str]:
    """How many seeds there are, and that the best were chosen by looking."""
    counts = {cell.accuracy.seeds for line in comparison.lines for cell in line.cells.values()}
    if counts == {1}:
        text = ONE_SEED
    elif min(counts) > 1:
        text = f"Every number is a mean over {span(counts)} seeds"
    else:
        text = f"The numbers are of {span(counts)} seeds; differences between those of one may be chance"
    chosen = "" if len(comparison.lines) < 3 else "; the best of each size were chosen by these same numbers"
    return [f"{text}{chosen}."]


# -- beside the paper ----------------------------------------------------------------------------


def hold_against_paper(comparison: Comparison) -> list[str]:
    """How our means compare with the paper's, in sentences; none if the paper has no such numbers."""
    pairs = [
        (line.cells[size].of(measure).mean, getattr(cell, measure), measure)
        for line in comparison.lines
        for size in line.cells
        for measure in MEASURES
        if (cell := comparison.papers_cell(line, size)) is not None
    ]
    if not pairs:
        return []
    gaps = comparison.gaps
    worse = sum((gap.ours < gap.theirs) == (gap.measure == "accuracy") for gap in gaps)
    points = f"{100 * paper.GAP:g} points"
    sentences = [
        f"Of {len(pairs)} means, {len(pairs) - len(gaps)} are within {points} of the paper's, {worse} are worse and "
        f"{len(gaps) - worse} better."
    ]
    if gaps:
        counts = Counter(gap.status.kind for gap in gaps)
        kinds = ", ".join(f"{name}: {counts[kind]}" for kind, (_, name) in KINDS.items() if kind in counts)
        sentences.append(f"Further away: {len(gaps)} ({kinds}).")
    return sentences + _state_other_counts(comparison)


def _state_other_counts(comparison: Comparison) -> list[str]:
    """How much the accuracies would differ if other positions counted."""
    rows = [row for line in comparison.lines for rows in line.rows.values() for row in rows]
    parts = []
    for text, found in (
        ("at the last token alone, as the paper's text has it", [(row.last, row.accuracy) for row in rows]),
        ("without the positions before a separator", [(row.inside, row.accuracy) for row in rows]),
    ):
        moves = [100 * (part.right / part.positions - accuracy) for part, accuracy in found if part and part.positions]
        if moves:
            low, high = (f"{move:+.1f}".replace("-", "−") for move in (min(moves), max(moves)))
            parts.append(f"{text}, they move by {low if low == high else f'{low} to {high}'} points")
    return [f"Accuracies count every position; {'; '.join(parts)}."] if parts else []


def list_gaps(comparison: Comparison) -> list[str]:
    """Where we differ from the paper by more than two points: an item for each reason, with the rows that it is of."""
    found: dict[Status, dict[str, dict[str, None]]] = {}
    for gap in comparison.gaps:
        found.setdefault(gap.status, {}).setdefault(gap.line.label, {})[f"{gap.size:,}"] = None
    return [
        f"{_capital(KINDS[status.kind].name)}{f': {status.reasons}' if status.reasons else ''}."
        f" {'; '.join(f'{label} ({_join(sizes)} examples)' for label, sizes in rows.items())}."
        for status, rows in found.items()
    ]


def _join(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def list_departures(comparison: Comparison) -> list[str]:
    """Where the runs depart from the paper's recipe or lie outside of the space that it searched."""
    notes = _list_languages(comparison)
    notes += [] if comparison.split == "test" else [f"the {comparison.split} split; the paper's numbers are of the test split"]
    runs = [run for line in comparison.lines for run in line.runs]
    trainings, models = [run.config.training for run in runs], [run.config.model for run in runs]
    ours: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "epochs at most": ([round(count_epochs(run, run.config.training.steps)) for run in runs], (paper.EPOCHS,)),
        "batch": ([t.batch for t in trainings], (paper.BATCH,)),
        "learning rate": ([t.rate for t in trainings], paper.PUBLISHED_RATES),
        "weight decay": ([t.decay for t in trainings], paper.SEARCHED["weight decay"]),
        **read_memories(runs, paper.BETAS, (), paper.DROPOUTS),
        "attention dropout of the Transformer": (
            [m.attention_dropout for m in models if m.architecture == "transformer"],
            (paper.ATTENTION_DROPOUT,),
        ),
        "layers": ([m.layers for m in models if not m.bare], paper.SEARCHED["layers"]),
        "width": ([m.width for m in models], paper.SEARCHED["width"]),
        "heads": ([m.heads for m in models if m.architecture in ("mosaic", "transformer")], paper.SEARCHED["heads"]),
        "samples of a test": ([n for line in comparison.lines for n in line.samples], (paper.SAMPLES,)),
    }
    notes += list_changes(ours)
    if matched := [line.label for line in comparison.lines if line.runs[0].config.model.inner]:
        notes.append(f"of another size than the benchmark's, with no number of the paper beside them: {'; '.join(matched)}")
    if patience := {training.patience for training in trainings if training.patience}:
        notes.append(f"training stops {span(patience)} epochs after its lowest validation loss; the paper has no such stop")
    notes += _list_cut(comparison)
    return notes + list_doubts(comparison.lines, "examples") + list_failures(comparison.failed)


def _list_cut(comparison: Comparison) -> list[str]:
    """The runs that patience ended while the validation loss was falling, so that more of it might have changed the number."""
    found = []
    for run in filter(ended_falling, (run for line in comparison.lines for run in line.runs)):
        name = f"{run.variant.label} with {run.config.data.get('examples', 0):,} examples"
        losses = [loss for _, loss in run.validations]
        falls = ", ".join(f"{loss:.3f}" for loss in losses[-FALLING - 1 :])
        found.append(f"{name} (the last were {falls}; the lowest was {min(losses):.3f})")
    return [f"ended by patience while the validation loss was falling: {'; '.join(found)}"] if found else []


def _list_languages(comparison: Comparison) -> list[str]:
    """What the languages have different from the benchmark's: "letters of a string: 1 to 12; in the benchmark 1 to 49"."""
    theirs = asdict(RegularLanguages())
    return [
        f"{SETTINGS.get(name, name)}: {_spell(ours)}; in the benchmark {_spell(theirs.get(name, '–'))}"
        for name, ours in comparison.changes.items()
    ]


def _spell(setting: Any) -> str:
    """A number of the languages, or the ends of its range."""
    return span(setting) if isinstance(setting, list | tuple) else str(setting)


def list_epochs(comparison: Comparison) -> list[str]:
    """The epochs that each line did, in brackets the one that it is judged by, and its time: an item for each size."""
    items = []
    for size in comparison.sizes:
        parts = []
        for line in _there(comparison, size):
            runs = [run for run in line.runs if run.config.data.get("examples") == size]
            done = span(round(count_epochs(run, run.steps)) for run in runs)
            seconds = sum(run.cost.wall_seconds for run in runs) / len(runs)
            parts.append(f"{line.label}: {done} ({span(row.epoch for row in line.rows[size])}), {format_duration(seconds)}")
        items.append(f"With {size:,} examples: {'; '.join(parts)}.")
    return items


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _share(line: Line, size: int, measure: str = "accuracy") -> str:
    return f"{100 * line.cells[size].of(measure).mean:.1f}\u00a0%"


def _round(share: float) -> float:
    """A share in per cent, as it is shown."""
    return round(100 * share, 1)


def _lead(one: Line, other: Line, size: int, measure: str = "accuracy") -> float:
    """The points by which one is better than the other, by the numbers that are shown: none where those are equal."""
    gap = _round(one.cells[size].of(measure).mean) - _round(other.cells[size].of(measure).mean)
    return round(gap if measure == "accuracy" else -gap, 1)


def _side(lead: float, of: str = "", to: str = "") -> str:
    """A lead in words; `of` and `to` join it with what it is a lead of."""
    return f"{abs(lead):.1f} points {f'ahead{of}' if lead > 0 else 'behind'}" if lead else f"equal{to}"


def list_references(comparison: Comparison) -> list[str]:
    """What is reached without training on the same test set, in one sentence; none where no run noted it."""
    said = [f"{r.name} {100 * r.accuracy:.1f} % and {100 * r.tvd:.1f} %" for r in comparison.references]
    return [f"For reference, accuracy and TVD on the same examples without training: {'; '.join(said)}."] if said else []
