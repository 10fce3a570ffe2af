"""Runs put side by side: one comparison for each task and mode, one line for each variant, seeds summed up.

Only runs that differ in nothing but the seed share a line, and only runs on the same data a comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from compactattn.data.sequences import TASKS
from compactattn.evaluation.statistics import Summary, summarise
from compactattn.report import paper
from compactattn.report.paper import Variant
from compactattn.report.runs import Evaluated, Run

MODES = ("teacher-forced", "free-running")  # the published one first
IDLE = (
    "device",
    "log_every",
    "checkpoint_every",
    "validate_every",
    "accumulation",
    "compile",
    "graph",
)  # training fields that move no number
SHORTEST = 32  # of the paper's training sources


def span(values: Iterable[float]) -> str:
    """The least and the greatest of some numbers, or the one that they all are: "1 to 3"."""
    values = list(values)
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def published_setting(task: str) -> dict[str, Any]:
    """What the paper's data for a task is made of; nothing for a task it does not have."""
    if task not in paper.LENGTHS:
        return {}
    return asdict(TASKS[task]) | {"shortest": SHORTEST, "longest": paper.LONGEST}


@dataclass(frozen=True)
class Line:
    """A variant on a task: its runs, which differ in their seed alone, and what they reach at each length."""

    variant: Variant
    label: str
    runs: tuple[Run, ...]
    cells: dict[int, Summary]
    rows: dict[int, tuple[Evaluated, ...]]  # what each cell sums up, one for every run that was evaluated there

    @property
    def seeds(self) -> list[int]:
        return sorted(run.config.seed for run in self.runs)

    @property
    def steps(self) -> tuple[int, int]:
        """The fewest and the most steps of training behind its numbers."""
        done = [row.step for rows in self.rows.values() for row in rows]
        return min(done), max(done)

    @property
    def samples(self) -> list[int]:
        """The number of samples of every evaluation."""
        return [row.samples for rows in self.rows.values() for row in rows]

    @property
    def precisions(self) -> set[str]:
        """The precisions that its numbers were computed in, as far as they were noted."""
        return {row.precision for rows in self.rows.values() for row in rows if row.precision}


@dataclass(frozen=True)
class Comparison:
    """The lines of one task in one mode, in the paper's order."""

    task: str
    mode: str
    lines: tuple[Line, ...]

    @cached_property
    def title(self) -> str:
        return paper.TITLES.get(self.task, self.task)

    @cached_property
    def longest(self) -> int:
        """The longest source of training, which counts as 1×."""
        return self.lines[0].runs[0].longest or min(self.lengths)

    @cached_property
    def shortest(self) -> int:
        return self.lines[0].runs[0].setting.get("shortest") or self.longest

    @cached_property
    def lengths(self) -> list[int]:
        """Every length at which a line has a number, and the paper's too where it is the paper's task."""
        ours = {length for line in self.lines for length in line.cells}
        return sorted(ours | set(paper.LENGTHS[self.task] if self.beside_paper else ()))

    @cached_property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """What the data has different from the paper's, as name: (paper's, ours)."""
        setting = self.lines[0].runs[0].setting
        expected = published_setting(self.task).items()
        return {name: (value, setting[name]) for name, value in expected if setting.get(name, value) != value}

    @cached_property
    def published(self) -> bool:
        """Whether this is a task of the paper in the paper's setting."""
        return self.task in paper.LENGTHS and not self.changed

    @cached_property
    def beside_paper(self) -> bool:
        """Whether the paper's numbers may stand beside ours: the same task, answered in the same mode."""
        return self.published and self.mode == MODES[0]

    def factor(self, length: int) -> str:
        """A length as a multiple of the longest in training: "1.5×"."""
        return f"{length / self.longest:.3g}×"

    def papers_cell(self, line: Line, length: int) -> paper.Cell | None:
        row = paper.ROWS.get(line.variant) if self.beside_paper else None
        return None if row is None else row.cells.get((self.task, length))

    def not_run(self) -> list[str]:
        """The rows of the paper's main table that no run here makes."""
        ours = {line.variant for line in self.lines}
        return [row.name for row in paper.MAIN.rows if row.variant not in ours] if self.beside_paper else []


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """All comparisons that the runs allow, those of the paper's tasks first, the published mode before the other."""
    groups: dict[tuple[str, str, str], dict[str, list[Run]]] = {}
    for run in runs:
        for task, mode in sorted({(row.task, row.mode) for row in run.evaluation}):
            group = groups.setdefault((task, mode, json.dumps(run.config.data, sort_keys=True)), {})
            group.setdefault(_recipe(run), []).append(run)
    found = [Comparison(task, mode, _make_lines(group.values(), task, mode)) for (task, mode, _), group in groups.items()]
    tasks = list(paper.LENGTHS)
    return sorted(
        found,
        key=lambda c: (not c.published, tasks.index(c.task) if c.task in tasks else 99, c.task, c.longest, c.mode != MODES[0]),
    )


def _recipe(run: Run) -> str:
    """All of a config that may move a number, but the seed: one text for the runs of one line."""
    config = asdict(run.config)
    training = {name: value for name, value in config["training"].items() if name not in IDLE}
    model = config["model"] | {"kernel": str(run.variant.kernel)}  # by what it is, not by which of its names was typed
    return json.dumps({"model": model, "training": training}, sort_keys=True)


def _make_lines(groups: Iterable[list[Run]], task: str, mode: str) -> tuple[Line, ...]:
    groups = list(groups)
    lines = [_make_line(group, _name(group[0], groups), task, mode) for group in groups]
    order = list(paper.ROWS)
    return tuple(
        sorted(lines, key=lambda line: (order.index(line.variant) if line.variant in order else len(order), line.label))
    )


def _name(run: Run, groups: list[list[Run]]) -> str:
    """The variant's label, and where another line has the same variant, the fields that tell them apart."""
    twins = [json.loads(_recipe(group[0])) for group in groups if group[0].variant == run.variant]
    own = json.loads(_recipe(run))
    apart = [
        f"{name} {own[part][name]}"
        for part in own
        for name in own[part]
        if any(twin[part][name] != own[part][name] for twin in twins)
    ]
    return ", ".join([run.variant.label, *apart])


def _make_line(runs: list[Run], label: str, task: str, mode: str) -> Line:
    runs = sorted(runs, key=lambda run: run.config.seed)
    for one, other in pairwise(runs):
        if one.config.seed == other.config.seed:
            raise ValueError(
                f"{one.source} and {other.source} are both {label} on {task} with seed {one.config.seed}; give one of them"
            )
    found: dict[int, list[Evaluated]] = {}
    early = False
    for run in runs:
        for row in run.latest:
            if (row.task, row.mode) == (task, mode):
                found.setdefault(row.length, []).append(row)
                early |= row.step < run.steps
    cells = {n: summarise([row.exact for row in rows], [row.samples for row in rows]) for n, rows in sorted(found.items())}
    line = Line(runs[0].variant, label, tuple(runs), cells, {n: tuple(rows) for n, rows in found.items()})
    return replace(line, label=f"{label}, at step {span(line.steps)}") if early else line
