"""The learning rates of a comparison: who has which, and a clause for wherever two lines of other rates are held together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal

from compactattn.experiments.language_modelling import UNSTABLE, Rates
from compactattn.report.lm_comparison import Comparison, Line


def rates_of(line: Line) -> Rates:
    """The highest learning rate and the last, which all runs of a line share."""
    training = line.runs[0].config.training
    return Rates(training.rate, training.final_rate)


def describe_rates(comparison: Comparison) -> str:
    """The rates that most lines have, then who has others, and where it is the paper that sets a line apart."""
    usual, *others = _group(comparison.lines).items()
    parts = [f"Learning rate {_spell(usual[0])}"]
    parts += [f"{_spell(rates)}, for {_join(line.label for line in lines)}" for rates, lines in others]
    low = [line.label for line in comparison.lines if UNSTABLE.get((comparison.layers, line.variant.kernel)) == rates_of(line)]
    why = f" The paper lowers it for {_join(low)} with {comparison.depth}, for its instability." if others and low else ""
    return f"{'; '.join(parts)}.{why}"


def list_odd(comparison: Comparison, lines: Iterable[Line]) -> list[Line]:
    """Those of the lines that have not the rates of most of the comparison."""
    usual = next(iter(_group(comparison.lines)))
    return [line for line in lines if rates_of(line) != usual]


def tell_odd(comparison: Comparison, lines: Iterable[Line]) -> str:
    """A clause on those lines: "2-ReLUmax had a learning rate of 0.001 and not 0.005"; nothing where there are none."""
    usual, *_ = _group(comparison.lines).values()
    return tell_apart(list_odd(comparison, lines), usual[0])


def tell_apart(lines: Sequence[Line], base: Line) -> str:
    """The same of the lines that have other rates than one that they are held against."""
    theirs, clauses = rates_of(base), []
    for ours, alike in _group(line for line in lines if rates_of(line) != rates_of(base)).items():
        which = 0 if ours.rate != theirs.rate else 1
        kind = ("a learning rate", "a last learning rate")[which]
        clauses.append(
            f"{_join(map(_name, alike))} had {kind} of {spell_rate(ours[which])} and not {spell_rate(theirs[which])}"
        )
    return ", ".join(clauses)


def add_clauses(*clauses: str) -> str:
    """Clauses at the end of a sentence, each once."""
    return "".join(f"; {clause}" for clause in dict.fromkeys(clauses) if clause)


def spell_rate(rate: float) -> str:
    """A rate in plain digits: 0.00005 rather than 5e-05."""
    return f"{Decimal(str(rate)):f}"


def _group(lines: Iterable[Line]) -> dict[Rates, list[Line]]:
    """The lines of each pair of rates, the pair of most lines first."""
    found: dict[Rates, list[Line]] = {}
    for line in lines:
        found.setdefault(rates_of(line), []).append(line)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _spell(rates: Rates) -> str:
    falling = "" if rates.final_rate == rates.rate else f", falling to {spell_rate(rates.final_rate)}"
    return spell_rate(rates.rate) + falling


def _name(line: Line) -> str:
    return f"the {line.label}" if line.variant.architecture == "transformer" else line.label


def _join(names: Iterable[str]) -> str:
    *names, last = names
    return f"{', '.join(names)} and {last}" if names else last
