"""Runs of language modelling put side by side: one line for each variant, one column for each split.

Only runs of one corpus, depth, window, number of steps and batch share a comparison, so that all have seen as many tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compactattn.evaluation.loss_by_position import smooth
from compactattn.evaluation.statistics import mean_interval, pooled_reach
from compactattn.experiments.language_modelling import NAME
from compactattn.report import lines
from compactattn.report import lm_paper as paper
from compactattn.report.evaluations import Predicted, Story
from compactattn.report.facts import count_parameters
from compactattn.report.lines import Spread, spread_over_seeds
from compactattn.report.runs import Cost, Run

PLACE = "folder"  # where a corpus lies, which may differ


class Losses(NamedTuple):
    """What a variant reaches on a split: nats for each token, and bits for each byte of text where they were noted."""

    loss: Spread
    bits: Spread | None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss.mean)


Line = lines.Line[str, Losses, Predicted]


@dataclass(frozen=True)
class Comparison:
    """The lines of one setting, in the paper's order."""

    data: dict[str, Any]
    layers: int
    steps: int
    batch: int
    lines: tuple[Line, ...]
    former: bool = False  # whether its runs began from the former start

    @property
    def corpus(self) -> str:
        name = str(self.data.get("corpus", "a corpus without a name"))
        return paper.CORPORA.get(name, name)

    @property
    def name(self) -> str:
        """For links and files."""
        return lines.name_start(f"lm-{self.data.get('corpus', 'text')}-{self.layers}", self.former)

    @property
    def depth(self) -> str:
        return f"{self.layers} {'layer' if self.layers == 1 else 'layers'}"

    @property
    def title(self) -> str:
        return lines.name_start(f"{self.corpus}, {self.depth}", self.former)

    @property
    def length(self) -> int:
        """The tokens of a window; 0 where it is not known."""
        length = self.data.get("length")
        return length if isinstance(length, int) else 0

    @property
    def tokens(self) -> int:
        """The tokens that each run is to see; 0 where it is not known."""
        return self.steps * self.batch * self.length

    @cached_property
    def splits(self) -> list[str]:
        """Every split on which a line was evaluated: the validation split, the paper's other one, then the rest."""
        found = {split for line in self.lines for split in line.cells}
        known = [split for split in paper.SPLITS if split in found]
        return known + sorted(found - set(known))

    @property
    def home(self) -> str:
        """The split that ranks the lines: validation, where there is one."""
        return self.splits[0]

    def on(self, split: str) -> list[Line]:
        """The lines with a number on a split, the best first."""
        return sorted((line for line in self.lines if split in line.cells), key=lambda line: line.cells[split].loss.mean)

    def base(self, split: str) -> Line | None:
        """Gaussian attention; of several, the one that is best there."""
        return next((line for line in self.on(split) if line.variant == lines.BASE), None)

    def rivals(self, split: str) -> list[Line]:
        """The compact kernels, the best first."""
        return [line for line in self.usual(split, "mosaic") if line.variant.compact]

    def usual(self, split: str, architecture: str) -> list[Line]:
        """The lines of an architecture as it was published, the best first."""
        return [line for line in self.on(split) if line.variant.architecture == architecture and line.variant.usual]

    def contests(self) -> Iterator[tuple[str, Line, list[Line]]]:
        """Gaussian attention and the compact kernels, on each split that has both."""
        for split in self.splits:
            if (base := self.base(split)) is not None and (rivals := self.rivals(split)):
                yield split, base, rivals

    def reach(self, split: str, one: Line, other: Line) -> float | None:
        """How far apart seeds alone put two lines; None where no line has two seeds."""
        groups = [[row.loss for row in line.rows[split]] for line in self.on(split)]
        return pooled_reach(groups, one.cells[split].loss.seeds, other.cells[split].loss.seeds)

    def not_run(self) -> list[str]:
        """The rows of the paper's figures that no run here makes."""
        ours = {line.variant for line in self.lines}
        return [paper.ROWS[variant] for variant in paper.DRAWN if variant not in ours]


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """All comparisons that the runs allow, the published start first, by corpus and depth, the longest training first.

    A run that failed stands beside those that did not: a line without a number, which says why.
    """
    groups: dict[tuple[str, int, int, int, bool], list[Run]] = {}
    shown = [run for run in runs if _is_evaluated(run) or (run.failed and run.config.experiment == NAME)]
    for run, former in lines.split_starts(shown, _read_setting):
        groups.setdefault((*_read_setting(run), former), []).append(run)
    found = [
        Comparison(json.loads(data), layers, steps, batch, _make_lines(group), former)
        for (data, layers, steps, batch, former), group in groups.items()
        if any(map(_is_evaluated, group))
    ]
    known = list(paper.CORPORA.values())
    return sorted(
        found,
        key=lambda c: (
            *(c.former, c.corpus not in known, c.corpus, str(sorted(c.data.items(), key=str))),
            *(c.layers, -c.steps, -c.batch),
        ),
    )


def _read_setting(run: Run) -> tuple[str, int, int, int]:
    training, data = run.config.training, {k: v for k, v in run.config.data.items() if k != PLACE}
    return json.dumps(data, sort_keys=True), run.config.model.layers, training.steps, training.batch


def _is_evaluated(run: Run) -> bool:
    return any(isinstance(row, Predicted) for row in run.evaluation)


def _make_lines(runs: list[Run]) -> tuple[Line, ...]:
    groups = lines.group(runs)
    outputs = {run.variant.output for run in runs if run.variant.architecture == "mosaic"}
    shared = outputs.pop() if len(outputs) == 1 else ""
    return lines.sort_lines([_make_line(group, lines.name(group[0], groups), shared) for group in groups], paper.ROWS)


def _make_line(runs: list[Run], label: str, shared: str) -> Line:
    """One line; an output layer that all mosaics share belongs to the setting, and tells no variant from others."""
    variant = given = runs[0].variant
    if given.architecture == "mosaic" and given.output == shared:
        variant = replace(given, output="")
    label = variant.label + label.removeprefix(given.label)
    lines.refuse_twins(runs, f"{label} on {runs[0].config.data.get('corpus')}")
    found: dict[str, list[Predicted]] = {}
    for run in runs:
        for row in run.latest:
            if isinstance(row, Predicted):
                found.setdefault(row.split, []).append(row)
    rows = {split: tuple(rows) for split, rows in found.items()}
    return Line(variant, label, tuple(runs), {split: _sum_up(rows) for split, rows in found.items()}, rows)


def _sum_up(rows: Sequence[Predicted]) -> Losses:
    bits = [row.bits_per_byte for row in rows if row.bits_per_byte is not None]
    whole = len(bits) == len(rows)
    loss = spread_over_seeds([row.loss for row in rows], min, mean_interval)
    return Losses(loss, spread_over_seeds(bits, min, mean_interval) if whole else None)


# -- what a line has besides its cells -----------------------------------------------------------


def count_size(line: Line) -> int:
    """The parameters of its model."""
    return count_parameters(line.runs[0].config.model)


def mean_cost(line: Line) -> Cost:
    """What training took, each number as a mean over the runs that noted it."""
    noted = ([cost for cost in costs if cost] for costs in zip(*(run.cost for run in line.finished), strict=True))
    seconds, speed, peak = (sum(costs) / len(costs) if costs else 0.0 for costs in noted)
    return Cost(seconds, speed, round(peak))


def choose_story(line: Line) -> Story | None:
    """The first that was written at the latest step; of several, one that came to its end."""
    told = (story for run in line.runs for story in run.stories)
    return max(told, key=lambda story: (story.step, story.ended is True), default=None)


def mean_validations(line: Line) -> list[tuple[int, float]]:
    """(step, validation loss), the mean over the runs at the steps where all of them have one."""
    curves = [dict(run.validations) for run in line.finished if run.validations]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [(step, sum(curve[step] for curve in curves) / len(curves)) for step in steps]


def count_rises(line: Line) -> tuple[int, int]:
    """How often the loss of a run rose from one validation to the next, and of how many times, over all its seeds."""
    pairs = [pair for run in line.finished for pair in pairwise(loss for _, loss in run.validations)]
    return sum(later > earlier for earlier, later in pairs), len(pairs)


def pool_positions(line: Line, split: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Edges, sums of losses and tokens of the stretches of a window, over all seeds; None where no run has noted them.

    Runs whose stretches are not those of the first are left out.
    """
    noted = [row.by_position for row in line.rows.get(split, ()) if row.by_position is not None]
    if not noted:
        return None
    alike = [one for one in noted if one.edges == noted[0].edges]
    tokens = np.sum([one.tokens for one in alike], axis=0)
    losses = np.array([[loss or 0.0 for loss in one.loss] for one in alike])
    return np.array(noted[0].edges), (losses * [one.tokens for one in alike]).sum(0), tokens


def smooth_positions(line: Line, split: str) -> dict[int, float]:
    """The moving average of the loss by the number of tokens read, at the end of each stretch; empty where none is noted."""
    pooled = pool_positions(line, split)
    if pooled is None:
        return {}
    edges, sums, tokens = pooled
    smoothed = smooth(sums, tokens, widths=np.diff(edges))
    return {int(end): float(loss) for end, loss in zip(edges[1:], smoothed, strict=True) if not math.isnan(loss)}


def mean_within(line: Line, split: str, positions: int) -> float | None:
    """The mean loss of the stretches that end within the first positions; None where none is noted."""
    pooled = pool_positions(line, split)
    if pooled is None:
        return None
    edges, sums, tokens = pooled
    early = edges[1:] <= positions
    return float(sums[early].sum() / tokens[early].sum()) if tokens[early].any() else None
