"""Why a number of RegBench is further from the paper's than `regbench_paper.GAP`: another model, other training, or open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from compactattn.experiments.in_context import RATES
from compactattn.kernels import norm_relu
from compactattn.report.lines import ended_falling, is_former, is_interrupted
from compactattn.report.regbench_paper import ATTENTION_DROPOUT, DROPOUTS
from compactattn.report.runs import Run


class Kind(NamedTuple):
    """The mark of a gap in a table, and what it is called."""

    mark: str
    name: str


KINDS = {
    "code": Kind("‡", "explained by code"),
    "recipe": Kind("◊", "a different recipe"),
    "steps": Kind("§", "explained by steps"),
    "open": Kind("†", "open"),
}


class Status(NamedTuple):
    """A key of `KINDS`, and every reason of that kind; an open gap has none."""

    kind: str
    reasons: str = ""


def _is_mosaic(run: Run) -> bool:
    return run.variant.architecture == "mosaic"


def _is_own(run: Run) -> bool:
    return run.variant.form == "own"


def _is_normalised_relu(run: Run) -> bool:
    return _is_mosaic(run) and run.variant.kernel == norm_relu() and run.variant.as_released != "plain"


def _lacks_attention_dropout(run: Run) -> bool:
    return run.variant.architecture == "transformer" and run.config.model.attention_dropout == 0


def _has_other_rates(run: Run) -> bool:
    return (run.config.training.rate, run.config.training.decay) not in RATES.values()


def _has_benchmarks_rate(run: Run) -> bool:
    return _is_mosaic(run) and (run.config.training.rate, run.config.training.decay) == RATES["benchmark"]


BARE = "RegBench's Mamba is one bare layer; this one is residual blocks"
OWN = "this model is of our own form, not of the benchmark's"
PLAIN = (
    "the paper's row is of the plain path, 2β⁴cos + 1 − 2β² (inferred from what RegBench imports), "
    "so it is not comparable with this row"
)
UNDROPPED = f"no attention dropout ({ATTENTION_DROPOUT} in the benchmark, whose best epochs are 176 and 194)"
RATE = f"rate and decay of no named recipe ({', '.join(f'{rate} and {decay}' for rate, decay in RATES.values())})"
BENCHMARKS = "the benchmark's rate and decay; the paper's repository names {} and {} for its Memory Mosaics".format(
    *RATES["repository"]
)
# in the order of `KINDS`: the first that applies says the kind
REASONS: Sequence[tuple[Callable[[Run], bool], str, str]] = (
    (lambda run: _is_own(run) and run.variant.architecture == "mamba", "code", BARE),
    (lambda run: _is_own(run) and run.variant.architecture != "mamba", "code", OWN),
    (_is_normalised_relu, "code", PLAIN),
    (lambda run: _is_mosaic(run) and is_former(run), "recipe", "the former start of the tied embedding"),
    (_lacks_attention_dropout, "recipe", UNDROPPED),
    (
        lambda run: _is_mosaic(run) and run.config.model.persistent_dropout == 0,
        "recipe",
        f"no dropout on persistent weights ({DROPOUTS[2]} in the paper)",
    ),
    (_has_other_rates, "recipe", RATE),
    (_has_benchmarks_rate, "recipe", BENCHMARKS),
    (is_interrupted, "steps", "a run was stopped before its end"),
    (ended_falling, "steps", "patience ended a run while its validation loss was falling"),
)


def explain(runs: Sequence[Run]) -> Status:
    """Why the number that these runs reach is not the paper's."""
    found = [(kind, reason) for holds, kind, reason in REASONS if any(map(holds, runs))]
    first = found[0][0] if found else "open"
    return Status(first, "; ".join(reason for kind, reason in found if kind == first))
