"""What the numbers of language modelling say, in sentences made from them, beside what the paper says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compactattn.experiments.language_modelling import RATES, WARMUP, choose_rates
from compactattn.report import lm_paper as paper
from compactattn.report.facts import state_sizes
from compactattn.report.finding import Finding
from compactattn.report.lines import ONE_SEED, list_changes, list_doubts, name_line, read_memories, span
from compactattn.report.lm_claims import DIGITS, judge, tell_rises
from compactattn.report.lm_comparison import Comparison, Line, count_rises, mean_validations
from compactattn.report.lm_rates import add_clauses, rates_of, spell_rate, tell_apart
from compactattn.report.lm_stories import state_loops
from compactattn.report.lm_tables import name_split
from compactattn.report.runs import Run

RISE = 0.005  # nats above its lowest, from which on a validation loss counts as having risen again


def find(comparison: Comparison) -> Finding:
    """The best compact kernel against Gaussian attention on held-out text; then every split, and what is not known."""
    details = [
        *_state_fields(comparison),
        *_state_transformer(comparison),
        *_state_start(comparison),
        *_state_outputs(comparison),
        *_state_neighbours(comparison),
        *_state_rises(comparison),
        *_state_rise(comparison),
        *state_loops(comparison),
        *_state_failures(comparison),
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
    pair += add_clauses(tell_apart([best], base))
    pair += _state_first(comparison, split)
    if _lead(best, base, split) > 0:
        return f"{start}, {best.label} {pair}."
    return f"{start}, no compact kernel is ahead of {name_line(base)}: the best, {best.label}, {pair}."


def _state_first(comparison: Comparison, split: str) -> str:
    """Who is ahead of all the kernels that the headline speaks of: the transformer, or one with another output layer."""
    first, *others = comparison.on(split)
    if first.variant.output:
        return f"; {name_line(first)}, is ahead of all at {_loss(first, split)}"
    if first.variant.architecture != "transformer":
        return ""
    text = f"; the {first.label}, at {_loss(first, split)}, is ahead of every Memory Mosaic"
    same = next((line for line in others if line.variant.architecture == "mosaic" and line.variant.output), None)
    if same is None:
        return text
    lead = f"{_lead(first, same, split):.{DIGITS}f}"
    return f"{text}, of the best with its output layer ({same.label}, {_loss(same, split)}) by {lead}"


def _state_fields(comparison: Comparison) -> list[str]:
    """How many compact kernels are ahead of Gaussian attention on each split."""
    parts, others = [], []
    for split, base, rivals in comparison.contests():
        others.append(tell_apart(rivals, base))
        ahead = [line for line in rivals if _lead(line, base, split) > 0]
        sure = [_judge(comparison, split, line, base) for line in ahead]
        beyond = "" if None in sure or not ahead else f" ({sum(map(bool, sure))} by more than seeds explain)"
        parts.append(f"{len(ahead)} of {len(rivals)} on {name_split(split)}{beyond}")
    return [f"Compact kernels ahead of Gaussian attention: {', '.join(parts)}{add_clauses(*others)}."] if parts else []


def _state_transformer(comparison: Comparison) -> list[str]:
    """The best mosaic against the transformer, on every split."""
    parts, sizes, others = [], [], []
    for split in comparison.splits:
        mosaic, other = _find_pair(comparison, split)
        if mosaic is not None and other is not None:
            parts.append(f"{_distance(mosaic, other, split)} on {name_split(split)} ({mosaic.label})")
            sizes.append(state_sizes(mosaic.runs[0].config.model, other.runs[0].config.model))
            others.append(tell_apart([other], mosaic))
    found = " or ".join(size for size in dict.fromkeys(sizes) if size)
    own = ", each with its own output layer," if any(line.variant.output for line in comparison.lines) else ""
    which = f"the best Memory Mosaic, of {found}," if found else "the best Memory Mosaic"
    return [f"Against the Transformer{own or ','} {which} is {', '.join(parts)}{add_clauses(*others)}."] if parts else []


def _state_start(comparison: Comparison) -> list[str]:
    """How far the best mosaic was behind the transformer on the way, where training is but a part of the paper's."""
    mosaic, other = _find_pair(comparison, comparison.home)
    if mosaic is None or other is None or not 0 < comparison.tokens < paper.TOKENS:
        return []
    ours, theirs = dict(mean_validations(mosaic)), dict(mean_validations(other))
    steps = [step for step in ours if step in theirs]
    if len(steps) < 2:
        return []
    shown = dict.fromkeys((steps[0], steps[(len(steps) - 1) // 2], steps[-1]))
    gaps = ", ".join(f"{_spell_lead(theirs[step] - ours[step])} at step {step:,}" for step in shown)
    return [
        f"This is after {_share(comparison.tokens / paper.TOKENS)} of the paper's tokens."
        f" In validations during training {mosaic.label} was {gaps}."
    ]


def _find_pair(comparison: Comparison, split: str) -> list[Line | None]:
    """The best mosaic and the transformer, each with its own output layer."""
    return [next(iter(comparison.usual(split, name)), None) for name in ("mosaic", "transformer")]


def _state_outputs(comparison: Comparison) -> list[str]:
    """What the output layer is worth: lines with that of the other architecture, beside the same with their own."""
    split, parts = comparison.home, []
    for line in comparison.on(split):
        own = replace(line.variant, output="")
        same = next((one for one in comparison.on(split) if one.variant == own), None)
        if line.variant.output and same is not None:
            rest = add_clauses(tell_apart([line], same))
            lead = _distance(line, same, split)
            lead = f"{lead} of its own" if lead.endswith("ahead") else f"{lead} its own"
            parts.append(f"{line.label} is at {_loss(line, split)}, {lead}{rest}")
    if not parts:
        return []
    start = "N(0, 1)" if comparison.former else "N(0, 1/width)"
    return [
        f"The output layers differ too: a Memory Mosaic's logits are divided by √width and its embedding starts as {start}"
        f" (scaled), GPT-2's are not and its embedding is N(0, 0.02²) (plain). With the other's, {'; '.join(parts)}."
    ]


def _state_neighbours(comparison: Comparison) -> list[str]:
    """The best k of each kind of top-k attention, where several were run."""
    parts = []
    for name, variants in (("Gaussian kNN", paper.TOP_SOFTMAX), ("uniform kNN", paper.TOP_UNIFORM)):
        there = [line for line in comparison.on(comparison.home) if line.variant in variants]
        numbers = {paper.count_neighbours(line.variant): _loss(line, comparison.home) for line in reversed(there)}
        if len(numbers) > 1:
            losses = ", ".join(f"{k}: {numbers[k]}" for k in paper.NEIGHBOURS if k in numbers)
            parts.append(f"{paper.count_neighbours(there[0].variant)} for {name} ({losses})")
    theirs = f"; in the paper {paper.CHOSEN}" if comparison.layers == 1 else ""
    return [f"The best k on {name_split(comparison.home)}: {' and '.join(parts)}{theirs}."] if parts else []


def _state_rises(comparison: Comparison) -> list[str]:
    """Whose loss rose from one validation to the next, and how often: the paper's sign of instability."""
    counts = {line.label: count_rises(line) for line in comparison.lines}
    found = [f"{rises} of {pairs} times with {label}" for label, (rises, pairs) in counts.items() if rises]
    if found:
        others = ", and never with the others" if len(found) < sum(pairs > 0 for _, pairs in counts.values()) else ""
        return [f"From one validation to the next the loss rose {', '.join(found)}{others}."]
    return ["From one validation to the next no loss rose."] if any(pairs for _, pairs in counts.values()) else []


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


def _state_failures(comparison: Comparison) -> list[str]:
    """Who did not come to the end of training, and how."""
    failed = [f"{line.label} ({line.failure})" for line in comparison.lines if line.failure]
    return [f"Failed in training: {', '.join(failed)}."] if failed else []


def _state_seeds(comparison: Comparison) -> str:
    """How many seeds there are, and that the best were chosen by looking."""
    counts = {cell.loss.seeds for line in comparison.lines for cell in line.cells.values()}
    chosen = "" if len(comparison.lines) < 3 else "; the best were chosen by these same numbers"
    if counts == {1}:
        text = ONE_SEED
    else:
        text = f"The numbers are of {span(counts)} {'seeds' if max(counts) > 1 else 'seed'}"
        text += "; what seeds explain is judged at 95\u00a0%, with the spread of all variants that have several seeds together"
    return f"{text}{chosen}."


# -- every split ---------------------------------------------------------------------------------


def rank(comparison: Comparison) -> list[str]:
    """The variants of each split from the lowest loss up, an item for each that has two; and who may be as good as the best."""
    items = []
    for split in comparison.splits:
        ranked = comparison.on(split)
        if len(ranked) < 2:
            continue
        names = ", ".join(f"{line.label} ({_loss(line, split)})" for line in ranked)
        item = f"{_capital(name_split(split))}: {names}."
        level = [line.label for line in ranked[1:] if _judge(comparison, split, line, ranked[0]) is False]
        items.append(item + (f" No further from the first than seeds explain: {', '.join(level)}." if level else ""))
    return items


def list_kernels(comparison: Comparison) -> list[str]:
    """The compact kernels against Gaussian attention, an item for each split; where the best or the last of them had another
    learning rate, also the best or the last of those that had the same."""
    items = []
    for split, base, rivals in comparison.contests():
        first, last = rivals[0], rivals[-1]
        judged = _state_judgement(comparison, split, first, base)
        parts = [f"the best, {first.label}, is {_distance(first, base, split)}{judged}{_state_rate(split, rivals, base)}"]
        if last is not first:
            parts.append(f"the last, {last.label}, {_distance(last, base, split)}{_state_rate(split, rivals[::-1], base)}")
        items.append(f"{_capital(name_split(split))} (Gaussian {_loss(base, split)}): {'; '.join(parts)}.")
    return items


def _state_rate(split: str, ranked: Sequence[Line], base: Line) -> str:
    """That the first of some lines had another learning rate than Gaussian attention, and who comes first that had the same."""
    other = tell_apart(ranked[:1], base)
    alike = next((line for line in ranked if rates_of(line) == rates_of(base)), None)
    then = f"; of those at Gaussian's rate {alike.label}, {_distance(alike, base, split)}" if alike else ""
    return f" ({other}{then})" if other else ""


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
    found = [(claim.text, judge(comparison, claim)) for claim in claims]
    found += [(paper.INSTABILITY, tell_rises(comparison))] if comparison.layers in paper.INTERMEDIATE else []
    return [f"The paper: {text}. Here: {outcome}." for text, outcome in found if outcome]


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


def list_departures(comparison: Comparison) -> list[str]:
    """Where the mosaics depart from the paper's recipe, each with both numbers; where there are none, where the others do."""
    mosaics = [line for line in comparison.lines if line.variant.architecture == "mosaic"]
    lines = mosaics or comparison.lines
    runs = [run for line in lines for run in line.runs]
    models, trainings = [run.config.model for run in runs], [run.config.training for run in runs]
    neighbours = [k for line in lines if (k := paper.count_neighbours(line.variant)) is not None]
    notes = [] if comparison.corpus == "BabiStories" else [f"corpus: {comparison.corpus}; in the paper BabiStories"]
    others = dict.fromkeys(line.variant.label for line in comparison.lines if line not in mosaics)
    notes += [f"{', '.join(others)}: not in the paper's experiment"] if others else []
    changed = [line.label for line in mosaics if line.variant.output]
    notes += [f"{'; '.join(changed)}: with an output layer that is not the paper's"] if changed else []
    outputs = {run.variant.output for line in mosaics for run in line.runs} - {line.variant.output for line in mosaics}
    notes += [f"output layer: {output}; in the paper scaled" for output in sorted(outputs)]
    notes += [] if comparison.layers in RATES else [f"{comparison.depth}; in the paper 1, 8 and 12"]
    notes += list_changes(
        {
            "steps": ([comparison.steps], [paper.STEPS]),
            "batch": ([comparison.batch], [paper.BATCH]),
            "tokens of a window": ([comparison.length] if comparison.length else [], [paper.LENGTH]),
            "warm-up steps": ([t.warmup for t in trainings], [WARMUP]),
            "weight decay": ([t.decay for t in trainings], [paper.DECAY]),
            "largest norm of a gradient": ([t.clip for t in trainings], [paper.CLIP]),
            **read_memories(runs, paper.BETAS, [paper.SLOTS], paper.DROPOUTS),
            "dropout": ([m.dropout for m in models], paper.DROPOUTS[:1]),  # also of transformers, where they are alone
            "width": ([m.width for m in models], [paper.WIDTH]),
            "heads": ([m.heads for m in models], [paper.HEADS]),
            "k of the nearest neighbours": (neighbours, paper.NEIGHBOURS if comparison.layers == 1 else [paper.CHOSEN]),
        }
    )
    notes += _list_rates(comparison, runs)
    if any(t.keep == "best" for t in trainings):
        notes.append("judged by the weights of the lowest validation loss; in the paper by the last ones")
    seen = max((run.tokens for line in comparison.lines for run in line.runs), default=0)
    if seen and seen != paper.TOKENS:
        notes.append(f"tokens seen: at most {seen:,}, {_share(seen / paper.TOKENS)} of the paper's {paper.TOKENS:,}")
    return notes + list_doubts(comparison.lines, "split")


def _list_rates(comparison: Comparison, runs: Sequence[Run]) -> list[str]:
    """The rates of mosaics that are not the paper's for their depth and kernel, with the paper's."""
    notes, runs = [], [run for run in runs if run.config.model.architecture == "mosaic"]
    for name, words in (("rate", "learning rate"), ("final_rate", "last learning rate")):
        pairs = {(getattr(run.config.training, name), getattr(choose_rates(run.config.model), name)) for run in runs}
        others = sorted((ours, theirs) for ours, theirs in pairs if ours != theirs and comparison.layers in RATES)
        notes += [f"{words}: {spell_rate(ours)}; in the paper {spell_rate(theirs)}" for ours, theirs in others]
    return notes


# -- words ---------------------------------------------------------------------------------------


def _gap(one: Line, other: Line, split: str) -> float:
    return one.cells[split].loss.mean - other.cells[split].loss.mean


def _lead(one: Line, other: Line, split: str) -> float:
    """How far one is below the other, by the losses that are shown: nothing where those are equal."""
    ours, theirs = (round(line.cells[split].loss.mean, DIGITS) for line in (one, other))
    return round(theirs - ours, DIGITS)


def _distance(one: Line, other: Line, split: str) -> str:
    """The same in words."""
    return _spell_lead(_lead(one, other, split))


def _spell_lead(lead: float) -> str:
    lead = round(lead, DIGITS)
    return f"{abs(lead):.{DIGITS}f} {'ahead' if lead > 0 else 'behind'}" if lead else "equal"


def _loss(line: Line, split: str) -> str:
    return f"{line.cells[split].loss.mean:.{DIGITS}f}"


def _share(share: float) -> str:
    return f"{100 * share:.2g}\u00a0%"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
