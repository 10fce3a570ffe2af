"""Runs of length generalisation put side by side: one comparison for each task and mode, one line for each variant.

Only runs that differ in nothing but the seed share a line, and only runs on the same data a comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from compactattn.data.sequences import TASKS
from compactattn.evaluation.statistics import Summary, summarise
from compactattn.report import lines, paper
from compactattn.report.evaluations import Evaluated
from compactattn.report.runs import Run

MODES = ("teacher-forced", "free-running")  # the published one first
SHORTEST = 32  # of the paper's training sources


def published_setting(task: str) -> dict[str, Any]:
    """What the paper's data for a task is made of; nothing for a task it does not have.

    Leaves the layout of the words out: runs of either layout stand beside the paper.
    """
    if task not in paper.LENGTHS:
        return {}
    numbers = {name: value for name, value in asdict(TASKS[task]).items() if name != "layout"}
    return numbers | {"shortest": SHORTEST, "longest": paper.LONGEST}


Line = lines.Line[int, Summary, Evaluated]


@dataclass(frozen=True)
class Comparison:
    """The lines of one task in one mode, in the paper's order."""

    task: str
    mode: str
    lines: tuple[Line, ...]
    failed: tuple[Run, ...] = ()
    former: bool = False  # whether its runs began from the former start

    @property
    def subject(self) -> str:
        return paper.TITLES.get(self.task, self.task)

    @property
    def title(self) -> str:
        return lines.name_start(self.subject, self.former)

    @property
    def name(self) -> str:
        """For links and files."""
        name = self.task if self.published else f"{self.task}-{self.longest}"
        return lines.name_start(name if self.mode == MODES[0] else f"{name}-{self.mode}", self.former)

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
        ours = {line.variant for line in self.lines} | {run.variant for run in self.failed}
        return [row.name for row in paper.MAIN.rows if row.variant not in ours] if self.beside_paper else []


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """All comparisons that the runs allow: the published start, the paper's tasks and the published mode come first."""
    groups: dict[tuple[str, str, str, bool], list[Run]] = {}
    failed: dict[tuple[str, bool], list[Run]] = {}
    for run, former in lines.split_starts(runs, _read_setting):
        setting = _read_setting(run), former
        if run.failed:
            failed.setdefault(setting, []).append(run)
        for task, mode in sorted({(row.task, row.mode) for row in run.evaluation if isinstance(row, Evaluated)}):
            groups.setdefault((task, mode, *setting), []).append(run)
    found = [
        Comparison(task, mode, _make_lines(group, task, mode), tuple(failed.get((data, former), ())), former)
        for (task, mode, data, former), group in groups.items()
    ]
    tasks = list(paper.LENGTHS)
    return sorted(
        found,
        key=lambda c: (
            *(c.former, not c.published, tasks.index(c.task) if c.task in tasks else 99),
            *(c.task, c.longest, c.mode != MODES[0]),
        ),
    )


def _read_setting(run: Run) -> str:
    return json.dumps(run.config.data, sort_keys=True)


def _make_lines(runs: Iterable[Run], task: str, mode: str) -> tuple[Line, ...]:
    groups = lines.group(runs)
    return lines.sort_lines([_make_line(group, lines.name(group[0], groups), task, mode) for group in groups], paper.ROWS)


def _make_line(runs: list[Run], label: str, task: str, mode: str) -> Line:
    lines.refuse_twins(runs, f"{label} on {task}")
    found: dict[int, list[Evaluated]] = {}
    early = False
    for run in runs:
        for row in run.latest:
            if isinstance(row, Evaluated) and (row.task, row.mode) == (task, mode):
                found.setdefault(row.length, []).append(row)
                early |= row.step < run.steps
    cells = {n: summarise([row.exact for row in rows], [row.samples for row in rows]) for n, rows in sorted(found.items())}
    line = Line(runs[0].variant, label, tuple(runs), cells, {n: tuple(rows) for n, rows in found.items()})
    return replace(line, label=f"{label}, at step {lines.span(line.steps)}") if early else line
