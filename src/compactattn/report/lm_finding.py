"""What the numbers of language modelling say, in sentences made from them, beside what the paper says."""

from __future__ import annotations

from collections.abc import Sequence

from compactattn.report import lm_paper as paper
from compactattn.report.finding import Finding
from compactattn.report.lines import list_interrupted, list_precisions, list_test_sets, name_line, span
from compactattn.report.lm_comparison import Comparison, Line, count_seen, mean_validations, mean_within
from compactattn.report.lm_paper import Claim
from compactattn.report.lm_tables import name_split

RISE = 0.005  # nats above its lowest, from which on a validation loss counts as having risen again


def find(comparison: Comparison) -> Finding:
    """The best compact kernel against Gaussian attention on held-out text; then every split, and what is not known."""
    details = [
        *_state_fields(comparison),
        *_state_transformer(comparison),
        *_state_rise(comparison),
        _state_seeds(comparison),
    ]
    return Finding(_state_headline(comparison), details)


def _state_headline(comparison: Comparison) -> str:
    split = comparison.home
    text = f"held-out {comparison.corpus}" if split == paper.HOME else name_split(split)
    start = f"With {comparison.depth}"
    base, rivals = comparison.base(split), comparison.rivals(split)
    if base is None or not rivals:
        best = comparison.on(split)[0]
        return f"{start}, {name_line(best)} predicts {text} at {_loss(best, split)} nats a token."
    best, known = rivals[0], _judge(comparison, split, rivals[0], base)
    sure = {
        None: " (one seed each)",
        True: ", further apart than seeds explain",
        False: ", no further apart than seeds explain",
    }
    pair = f"predicts {text} at {_loss(best, split)} nats a token, {name_line(base)} at {_loss(base, split)}{sure[known]}"
    if _gap(best, base, split) < 0:
        return f"{start}, {best.label} {pair}."
    return f"{start}, no compact kernel is ahead of {name_line(base)}: the best, {best.label}, {pair}."


def _state_fields(comparison: Comparison) -> list[str]:
    """How many compact kernels are ahead of Gaussian attention on each split."""
    parts = []
    for split in comparison.splits:
        base, rivals = comparison.base(split), comparison.rivals(split)
        if base is None or not rivals:
            continue
        ahead = [line for line in rivals if _gap(line, base, split) < 0]
        sure = [_judge(comparison, split, line, base) for line in ahead]
        beyond = "" if None in sure or not ahead else f" ({sum(map(bool, sure))} by more than seeds explain)"
        parts.append(f"{len(ahead)} of {len(rivals)} on {name_split(split)}{beyond}")
    return [f"Compact kernels ahead of Gaussian attention: {', '.join(parts)}."] if parts else []


def _state_transformer(comparison: Comparison) -> list[str]:
    """The best mosaic against the transformer, on every split."""
    parts = []
    for split in comparison.splits:
        mosaic = next((line for line in comparison.on(split) if line.variant.architecture == "mosaic"), None)
        other = next((line for line in comparison.on(split) if line.variant.architecture == "transformer"), None)
        if mosaic is not None and other is not None:
            gap = _gap(mosaic, other, split)
            parts.append(f"{_distance(gap)} on {name_split(split)} ({mosaic.label})")
    return [f"Against the Transformer, the best Memory Mosaic is {', '.join(parts)}."] if parts else []


def _state_rise(comparison: Comparison) -> list[str]:
    """Whose validation loss had risen again by the end, which more training would not mend."""
    found = []
    for line in comparison.lines:
        curve = mean_validations(line)
        step, lowest = min(curve, key=lambda point: point[1], default=(0, 0.0))
        if curve and curve[-1][1] > lowest + RISE:
            found.append(f"{line.label} (from {lowest:.3f} at step {step:,} to {curve[-1][1]:.3f})")
    if not found:
        return []
    names = ", ".join(found) if len(found) <= 4 else f"{', '.join(found[:3])} and {len(found) - 3} more"
    return [f"By the end of training the validation loss had risen again for {names}."]


def _state_seeds(comparison: Comparison) -> str:
    """How many seeds there are, and that the best were chosen by looking."""
    counts = {cell.loss.seeds for line in comparison.lines for cell in line.cells.values()}
    chosen = "" if len(comparison.lines) < 3 else "; the best were chosen by these same numbers"
    if counts == {1}:
        text = "Every number is of a single seed: how much another would change it is not known, so differences may be chance"
    else:
        text = f"The numbers are of {span(counts)} {'seeds' if max(counts) > 1 else 'seed'}"
        text += "; what seeds explain is judged at 95\u00a0%, with the spread of all variants that have several seeds together"
    return f"{text}{chosen}."


# -- every split ---------------------------------------------------------------------------------


def rank(comparison: Comparison) -> list[str]:
    """The variants of each split from the lowest loss up, an item for each; and who is as good as the best for all we know."""
    items = []
    for split in comparison.splits:
        ranked = comparison.on(split)
        names = ", ".join(f"{line.label} ({_loss(line, split)})" for line in ranked)
        item = f"{_capital(name_split(split))}: {names}."
        level = [line.label for line in ranked[1:] if _judge(comparison, split, line, ranked[0]) is False]
        items.append(item + (f" No further from the first than seeds explain: {', '.join(level)}." if level else ""))
    return items


def list_kernels(comparison: Comparison) -> list[str]:
    """The compact kernels against Gaussian attention, an item for each split."""
    items = []
    for split in comparison.splits:
        base, rivals = comparison.base(split), comparison.rivals(split)
        if base is None or not rivals:
            continue
        first, last = rivals[0], rivals[-1]
        gaps = [_gap(line, base, split) for line in (first, last)]
        parts = [f"the best, {first.label}, is {_distance(gaps[0])}{_state_judgement(comparison, split, first, base)}"]
        parts += [f"the last, {last.label}, {_distance(gaps[1])}"] if last is not first else []
        items.append(f"{_capital(name_split(split))} (Gaussian {_loss(base, split)}): {'; '.join(parts)}.")
    return items


def _state_judgement(comparison: Comparison, split: str, one: Line, other: Line) -> str:
    reach = comparison.reach(split, one, other)
    if reach is None:
        return ""
    more = abs(_gap(one, other, split)) > reach
    return f" ({'more' if more else 'no more'} than the {reach:.3f} that seeds explain)"


def _judge(comparison: Comparison, split: str, one: Line, other: Line) -> bool | None:
    """Whether two lines are further apart than seeds explain; None where that is not known."""
    reach = comparison.reach(split, one, other)
    return None if reach is None else abs(_gap(one, other, split)) > reach


# -- beside the paper ----------------------------------------------------------------------------


def hold_against_paper(comparison: Comparison) -> list[str]:
    """Each claim of the paper that is about this depth, and what these runs say to it."""
    claims = (claim for claim in paper.CLAIMS if not claim.layers or comparison.layers in claim.layers)
    found = [(claim, _test(comparison, claim)) for claim in claims]
    return [f"The paper: {claim.text}. Here: {outcome}." for claim, outcome in found if outcome]


def state_published(comparison: Comparison) -> list[str]:
    """That the paper's curves and ours are not of the same data and length, and what number is known."""
    sentences = ["The paper draws curves on BabiStories and gives no table."]
    sentences += [paper.PUBLISHED[comparison.layers]] if comparison.layers in paper.PUBLISHED else []
    other = comparison.corpus != paper.CORPORA["babistories"]
    seen = f"{_share(comparison.tokens / paper.TOKENS)} of its {paper.TOKENS:,} tokens" if comparison.tokens else ""
    parts = ([f"on another corpus, {comparison.corpus}"] if other else []) + ([f"after {seen}"] if seen else [])
    if parts:
        sentences.append(f"Ours are {', and '.join(parts)}: losses cannot be held against each other, only their order.")
    return sentences


def _test(comparison: Comparison, claim: Claim) -> str:
    """What our losses say to a claim; nothing where not all of it can be looked at."""
    lower, higher = (_measure(comparison, claim, variants) for variants in (claim.lower, claim.higher))
    if claim.higher:
        pairs = [(ours, theirs) for ours in lower.values() for theirs in higher.values()]
        held = sum(ours < theirs for ours, theirs in pairs)
        where = f" over the first {claim.within} tokens" if claim.within else ""
        return f"holds for {held} of {len(pairs)} pairs{where}{_state_extremes(lower, higher)}" if pairs else ""
    if len(lower) < 2:
        return ""
    low, high = min(lower, key=lower.__getitem__), max(lower, key=lower.__getitem__)
    return f"they lie between {low} ({lower[low]:.3f}) and {high} ({lower[high]:.3f}), {lower[high] - lower[low]:.3f} apart"


def _state_extremes(lower: dict[str, float], higher: dict[str, float]) -> str:
    first, best = (min(found, key=found.__getitem__) for found in (lower, higher))
    return f"; the best of each: {first} {lower[first]:.3f}, {best} {higher[best]:.3f}"


def _measure(comparison: Comparison, claim: Claim, variants: Sequence[paper.Variant]) -> dict[str, float]:
    """The losses that a claim is about, by label."""
    there = [line for line in comparison.on(claim.split) if line.variant in variants]
    found = {
        line.label: mean_within(line, claim.split, claim.within) if claim.within else line.cells[claim.split].loss.mean
        for line in there
    }
    return {label: loss for label, loss in found.items() if loss is not None}


def list_departures(comparison: Comparison) -> list[str]:
    """Where the runs depart from the paper's recipe, each with both numbers."""
    runs = [run for line in comparison.lines for run in line.runs]
    trainings = [run.config.training for run in runs]
    mosaics = [run.config.model for run in runs if run.config.model.architecture == "mosaic"]
    notes = [] if comparison.corpus == "BabiStories" else [f"corpus: {comparison.corpus}; in the paper BabiStories"]
    ours: dict[str, tuple[Sequence[float], float | None]] = {
        "steps": ([t.steps for t in trainings], paper.STEPS),
        "batch": ([t.batch for t in trainings], paper.BATCH),
        "tokens of a window": ([comparison.length] if comparison.length else [], paper.LENGTH),
        "learning rate": (_list_rates(comparison), paper.RATES.get(comparison.layers)),
        "warm-up steps": ([t.warmup for t in trainings], paper.WARMUP),
        "weight decay": ([t.decay for t in trainings], paper.DECAY),
        "second beta of AdamW": ([t.betas[1] for t in trainings], paper.BETAS[1]),
        "width": ([run.config.model.width for run in runs], paper.WIDTH),
        "heads": ([run.config.model.heads for run in runs], paper.HEADS),
        "slots of persistent memory": ([model.slots_per_head for model in mosaics], paper.SLOTS),
    }
    for name, (values, theirs) in ours.items():
        if theirs is not None and values and set(values) != {theirs}:
            notes.append(f"{name}: {span(values)}; in the paper {theirs:,}")
    seen = max(map(count_seen, runs))
    if seen and seen != paper.TOKENS:
        notes.append(f"tokens seen: at most {seen:,}, {_share(seen / paper.TOKENS)} of the paper's {paper.TOKENS:,}")
    notes += [] if comparison.layers in paper.RATES else [f"{comparison.depth}; in the paper 1, 8 and 12"]
    about = list_precisions(comparison.lines), list_test_sets(comparison.lines, "split"), list_interrupted(comparison.lines)
    return [*notes, *(note for found in about for note in found)]


def _list_rates(comparison: Comparison) -> list[float]:
    """The learning rates; one that the paper lowered for a single row as we did counts as the paper's."""
    usual = paper.RATES.get(comparison.layers, 0.0)
    return [
        usual
        if run.config.training.rate == paper.LOWER_RATES.get((comparison.layers, line.variant))
        else run.config.training.rate
        for line in comparison.lines
        for run in line.runs
    ]


# -- words ---------------------------------------------------------------------------------------


def _gap(one: Line, other: Line, split: str) -> float:
    return one.cells[split].loss.mean - other.cells[split].loss.mean


def _distance(gap: float) -> str:
    """A difference of losses in words; below zero is ahead."""
    if abs(gap) < 0.0005:
        return "level to within 0.001"
    return f"{abs(gap):.3f} {'ahead' if gap < 0 else 'behind'}"


def _loss(line: Line, split: str) -> str:
    return f"{line.cells[split].loss.mean:.3f}"


def _share(share: float) -> str:
    return f"{100 * share:.2g}\u00a0%"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
