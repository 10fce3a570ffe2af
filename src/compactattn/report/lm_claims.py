"""What our losses of language modelling say to a claim of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compactattn.report import lm_paper as paper
from compactattn.report.lm_comparison import Comparison, Line, count_rises, mean_within
from compactattn.report.lm_paper import Claim
from compactattn.report.lm_rates import add_clauses, list_odd, rates_of, tell_odd

DIGITS = 3  # of a loss that is shown


def judge(comparison: Comparison, claim: Claim) -> str:
    """What our losses say to a claim; nothing where not all of it can be looked at."""
    lower, higher = (_measure(comparison, claim, variants) for variants in (claim.lower, claim.higher))
    involved = [line for line in comparison.lines if line.label in lower | higher]
    if claim.higher:
        pairs = {(one, other): round(lower[one], DIGITS) < round(higher[other], DIGITS) for one in lower for other in higher}
        where = f" over the first {claim.within} tokens" if claim.within else ""
        where += _state_choice(comparison, claim)
        count = f"{sum(pairs.values())} of {len(pairs)} pairs{where}{_count_alike(comparison, involved, pairs)}"
        rest = f"{_state_extremes(lower, higher)}{_state_beside(comparison, claim, lower | higher)}" if pairs else ""
        return f"holds for {count}{rest}" if pairs else ""
    if len(lower) < 2:
        return ""
    odd = [line.label for line in list_odd(comparison, involved)]
    alike = {label: loss for label, loss in lower.items() if label not in odd}
    again = f"the others lie {_span(alike)}" if odd and len(alike) > 1 else ""
    return f"they lie {_span(lower)}{_state_choice(comparison, claim)}{add_clauses(tell_odd(comparison, involved), again)}"


def _span(losses: Mapping[str, float]) -> str:
    low, high = (choose(losses, key=losses.__getitem__) for choose in (min, max))
    return f"between {low} ({losses[low]:.3f}) and {high} ({losses[high]:.3f}), {losses[high] - losses[low]:.3f} apart"


def _state_beside(comparison: Comparison, claim: Claim, named: Mapping[str, float]) -> str:
    """Who is lower than all that a claim names, of those that stand beside it."""
    found = _measure(comparison, claim, claim.beside)
    ahead = {label: loss for label, loss in found.items() if round(loss, DIGITS) < round(min(named.values()), DIGITS)}
    names = " and ".join(f"{label} ({loss:.3f})" for label, loss in sorted(ahead.items(), key=lambda item: item[1]))
    odd = tell_odd(comparison, (line for line in comparison.lines if line.label in ahead))
    return add_clauses(f"lower than all of these: {names}" if names else "", odd)


def _count_alike(comparison: Comparison, lines: Sequence[Line], pairs: Mapping[tuple[str, str], bool]) -> str:
    """How many of the pairs have one learning rate and hold, and who has another; nothing where all have one."""
    rates = {line.label: rates_of(line) for line in lines}
    alike = [held for (one, other), held in pairs.items() if rates[one] == rates[other]]
    if len(alike) == len(pairs):
        return ""
    count = f"{sum(alike)} of {len(alike)}" if alike else "none"
    return f", {count} at one learning rate ({tell_odd(comparison, lines)})"


def tell_rises(comparison: Comparison) -> str:
    """How often the validation loss of Gaussian top-k rose from one validation to the next, beside that of the Gaussian."""
    lines = [line for line in comparison.lines if line.variant in paper.TOP_SOFTMAX + paper.GAUSSIAN]
    counts = {line.label: count_rises(line) for line in lines}
    parts = [f"{rises} of {pairs} times with {label}" for label, (rises, pairs) in counts.items() if pairs]
    nearest = any(line.variant in paper.TOP_SOFTMAX for line in lines)
    other = add_clauses(tell_odd(comparison, lines))
    return f"from one validation to the next the loss rose {', '.join(parts)}{other}" if parts and nearest else ""


def _state_extremes(lower: dict[str, float], higher: dict[str, float]) -> str:
    first, best = (min(found, key=found.__getitem__) for found in (lower, higher))
    return f"; the best of each: {first} {lower[first]:.3f}, {best} {higher[best]:.3f}"


def _measure(comparison: Comparison, claim: Claim, variants: Sequence[paper.Variant]) -> dict[str, float]:
    """The losses that a claim is about, by label."""
    there = [line for line in comparison.on(claim.split) if line.variant in variants and not _is_surpassed(comparison, line)]
    found = {
        line.label: mean_within(line, claim.split, claim.within) if claim.within else line.cells[claim.split].loss.mean
        for line in there
    }
    return {label: loss for label, loss in found.items() if loss is not None}


def _state_choice(comparison: Comparison, claim: Claim) -> str:
    """That of several k of a kind the best is judged, where a claim is about them."""
    involved = [line for line in comparison.on(claim.split) if line.variant in claim.lower + claim.higher]
    return " with the best k" if any(_is_surpassed(comparison, line) for line in involved) else ""


def _is_surpassed(comparison: Comparison, line: Line) -> bool:
    """Whether another k of its kind has a lower validation loss: the paper reports the best k."""
    kind = next((kind for kind in (paper.TOP_SOFTMAX, paper.TOP_UNIFORM) if line.variant in kind), ())
    best = next((other.variant for other in comparison.on(comparison.home) if other.variant in kind), line.variant)
    return line.variant != best
