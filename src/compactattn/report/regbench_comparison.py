"""Runs of RegBench put side by side: one line for each variant, one column for each number of training examples.

Only runs that differ in nothing but the seed share a cell, and only runs whose languages are made alike a comparison.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from compactattn.experiments.in_context import NAME, RATES
from compactattn.report import lines
from compactattn.report import regbench_paper as paper
from compactattn.report.evaluations import Reference, Scored
from compactattn.report.lines import Spread, spread_over_seeds
from compactattn.report.paper import Variant
from compactattn.report.regbench_status import Status, explain
from compactattn.report.runs import Run

MEASURES = ("accuracy", "tvd")  # the better the higher, and the better the lower
NAMES = {"accuracy": "accuracy", "tvd": "TVD"}
SPLIT = "test"  # the published one


class Scores(NamedTuple):
    """What a variant reaches with a number of examples."""

    accuracy: Spread
    tvd: Spread

    def of(self, measure: str) -> Spread:
        return self.accuracy if measure == "accuracy" else self.tvd


Line = lines.Line[int, Scores, Scored]


class Gap(NamedTuple):
    """A mean that is further from the paper's than `regbench_paper.GAP`, and why."""

    line: Line
    size: int
    measure: str
    ours: float
    theirs: float
    status: Status


@dataclass(frozen=True)
class Comparison:
    """The lines of one split, in the paper's order."""

    split: str
    changes: dict[str, Any]  # departures of the languages from the benchmark's
    lines: tuple[Line, ...]
    failed: tuple[Run, ...] = ()
    former: bool = False  # whether its runs began from the former start
    repository: bool = False  # whether they have the rate and the decay of the paper's repository, not the benchmark's

    @property
    def subject(self) -> str:
        return f"a changed {paper.TITLE}" if self.changes else paper.TITLE

    @property
    def title(self) -> str:
        return lines.name_start(self.subject + (", the repository's recipe" if self.repository else ""), self.former)

    @property
    def name(self) -> str:
        """For links and files."""
        changes = f"-{zlib.crc32(repr(self.changes).encode()):08x}" if self.changes else ""
        return self.title + changes + ("" if self.split == SPLIT else f"-{self.split}")

    @cached_property
    def sizes(self) -> list[int]:
        """Every number of examples at which a line has a number."""
        return sorted({size for line in self.lines for size in line.cells})

    @cached_property
    def main_size(self) -> int:
        """The number of examples of the headline and the curves: the one that most lines have, of equal ones the largest."""
        usual = [line for line in self.lines if line.variant.usual] or self.lines
        return max(self.sizes, key=lambda size: (sum(size in line.cells for line in usual), size))

    @cached_property
    def published(self) -> bool:
        """Whether these are the benchmark's languages and its test split, so that the paper's numbers may stand beside ours."""
        return not self.changes and self.split == SPLIT

    def papers_row(self, line: Line) -> paper.Row | None:
        """The row of the paper's table that a line makes; none where languages, split or the width inside are others."""
        benchmarks = self.published and not line.runs[0].config.model.inner
        return _find_row(line.variant) if benchmarks else None

    def papers_cell(self, line: Line, size: int) -> paper.Cell | None:
        row = self.papers_row(line)
        return None if row is None else row.cells.get(size)

    def find_gap(self, line: Line, size: int, measure: str) -> Gap | None:
        cell = self.papers_cell(line, size)
        if cell is None or size not in line.cells:
            return None
        ours, theirs = line.cells[size].of(measure).mean, getattr(cell, measure)
        if abs(ours - theirs) <= paper.GAP + 1e-9:
            return None
        return Gap(line, size, measure, ours, theirs, explain(self.runs_of(line, size)))

    def runs_of(self, line: Line, size: int) -> list[Run]:
        """The runs behind a cell."""
        return [run for run in line.runs if _place(run)[0] == size]

    def is_interrupted(self, line: Line, size: int) -> bool:
        """Whether a run behind a cell was stopped before its end."""
        return any(map(lines.is_interrupted, self.runs_of(line, size)))

    @cached_property
    def gaps(self) -> list[Gap]:
        """All of them, by line, size and measure."""
        found = (self.find_gap(line, size, measure) for line in self.lines for size in self.sizes for measure in MEASURES)
        return [gap for gap in found if gap is not None]

    def best(self, size: int, measure: str) -> Line:
        """The line with the best mean of a column; of equal ones the first."""
        there = [line for line in self.lines if size in line.cells]
        return min(there, key=lambda line: line.cells[size].of(measure).mean * (-1 if measure == "accuracy" else 1))

    @cached_property
    def references(self) -> list[Reference]:
        """What is reached without training on the same test set; none where no run noted it."""
        rows = (row for line in self.lines for rows in line.rows.values() for row in rows)
        return list({reference.name: reference for row in rows for reference in row.references}.values())

    def not_run(self) -> list[str]:
        """The rows of the paper's table that no run here makes, and the numbers of examples that none was trained on."""
        if not self.published:
            return []
        ours = [self.papers_row(line) for line in self.lines] + [_find_row(run.variant) for run in self.failed]
        sizes = [f"{size:,} examples" for size in paper.SIZES if size not in self.sizes]
        return [row.name for row in paper.ROWS.values() if row not in ours] + sizes


def _find_row(variant: Variant) -> paper.Row | None:
    """The paper's row of that name. The code may be another; the status of a gap says so."""
    return paper.ROWS.get(replace(variant, as_released="", form=""))


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """All comparisons that the runs allow, the published start first; another split only where no run has the test split."""
    own = [run for run in runs if run.config.experiment == NAME]
    groups: dict[tuple[str, tuple[str, bool, bool]], list[Run]] = {}
    failed: dict[tuple[str, bool, bool], list[Run]] = {}
    for run, former in lines.split_starts(own, lambda run: (_name_changes(run), _is_repository(run))):
        setting = _name_changes(run), former, _is_repository(run)
        if run.failed:
            failed.setdefault(setting, []).append(run)
        for split in sorted({row.split for row in run.evaluation if isinstance(row, Scored)}):
            groups.setdefault((split, setting), []).append(run)
    found = [
        Comparison(split, json.loads(setting[0]), _make_lines(group, split), tuple(failed.get(setting, ())), *setting[1:])
        for (split, setting), group in groups.items()
        if split == SPLIT or (SPLIT, setting) not in groups
    ]
    return sorted(
        found,
        key=lambda c: (c.former, not c.published, bool(c.changes), c.repository, c.split != SPLIT, c.split, str(c.changes)),
    )


def _name_changes(run: Run) -> str:
    return json.dumps(run.config.data.get("changes", {}), sort_keys=True)


def _is_repository(run: Run) -> bool:
    return (run.config.training.rate, run.config.training.decay) == RATES["repository"]


def count_epochs(run: Run, steps: int) -> float:
    """How often that many steps go through the training examples."""
    return steps * run.config.training.batch / max(1, run.config.data.get("examples", 0))


def _read_recipe(run: Run) -> lines.Recipe:
    """What makes a line: as elsewhere, but training counts in epochs, since the columns differ in the steps of one.

    Patience is no part of it: of runs that differ in nothing else the one that has come furthest counts, which has seen all
    that the others have.
    """
    recipe = lines.read_recipe(run)
    training = recipe["training"]
    del training["patience"]
    steps, warmup = training.pop("steps"), training.pop("warmup")
    training["epochs"] = round(count_epochs(run, steps))
    tenth = warmup == steps // 10  # the recipe's, which of few steps, rounded down, is another quotient
    training["warm-up share"] = "0.1" if tenth else f"{warmup / steps:.1g}"
    return recipe


def keep_furthest(runs: Sequence[Run]) -> list[Run]:
    """Of the runs of one number of examples and one seed those with the patience of the one that has done the most steps.

    Of equal steps the more patient one counts, and a patience of 0 has no end. Two of one patience are twins, and both stay.
    """
    furthest: dict[tuple[int, int], Run] = {}
    for run in sorted(runs, key=lambda run: (run.steps, _patience(run))):
        furthest[_place(run)] = run
    return [run for run in runs if _patience(run) == _patience(furthest[_place(run)])]


def _patience(run: Run) -> float:
    return run.config.training.patience or math.inf


def _place(run: Run) -> tuple[int, int]:
    return run.config.data.get("examples", 0), run.config.seed


def _make_lines(runs: list[Run], split: str) -> tuple[Line, ...]:
    groups = [keep_furthest(group) for group in lines.group(runs, _read_recipe)]
    made = [_make_line(group, lines.name(group[0], groups, _read_recipe), split) for group in groups]
    return lines.sort_lines(made, paper.ROWS)


def _make_line(runs: list[Run], label: str, split: str) -> Line:
    found: dict[int, list[tuple[Run, Scored]]] = {}
    for run in runs:
        for row in run.latest:
            if isinstance(row, Scored) and row.split == split:
                found.setdefault(row.examples, []).append((run, row))
    for size, pairs in found.items():
        lines.refuse_twins([run for run, _ in pairs], f"{label} on {size:,} examples of {paper.TITLE}")
    rows = {size: tuple(row for _, row in pairs) for size, pairs in sorted(found.items())}
    cells = {
        size: Scores(
            spread_over_seeds([row.accuracy for row in found], max), spread_over_seeds([row.tvd for row in found], min)
        )
        for size, found in rows.items()
    }
    return Line(runs[0].variant, label, tuple(runs), cells, rows)
