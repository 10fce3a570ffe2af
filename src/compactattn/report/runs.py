"""Runs, read from what they wrote: run folders, or the compact lines under results/ that stand for them.

Nothing is read out of a folder's name. What is malformed is told in one sentence that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from compactattn.report.evaluations import Evaluation, Story, read_evaluation, read_story
from compactattn.report.facts import count_parameters
from compactattn.report.inspected import Inspected, read_inspected
from compactattn.report.paper import Variant
from compactattn.training import checkpoint
from compactattn.training.config import RunConfig

POINTS = 200  # of a loss curve in a compact line


class Cost(NamedTuple):
    """What training took, as far as it was noted."""

    wall_seconds: float = 0.0  # over all starts, without validation
    tokens_per_second: float = 0.0  # the median over stretches of logged steps, but for the first of each start, which compiles
    peak_bytes: int = 0  # of GPU memory


@dataclass(frozen=True)
class Run:
    """A run and its results."""

    config: RunConfig
    environment: Mapping[str, Any]  # hardware, commit, command and versions, as the run noted them
    steps: int  # done
    cost: Cost
    losses: Sequence[tuple[int, float]]  # (step, training loss)
    evaluation: Sequence[Evaluation]
    source: str = field(default="", compare=False)  # the file or folder, for messages
    validations: Sequence[tuple[int, float]] = field(default_factory=list)  # (step, validation loss)
    stories: Sequence[Story] = field(default_factory=list)  # what the model wrote, where it was asked to
    failed: str = ""  # "diverged at step 412, loss nan", where it did not come to its end
    inspected: Sequence[Inspected] = field(default_factory=list)  # texts that it was inspected on; too much for a compact line

    @property
    def tokens(self) -> int:
        """Seen in training; 0 where the length of a window is not known."""
        length = self.config.data.get("length")
        return self.steps * self.config.training.batch * (length if isinstance(length, int) else 0)

    @property
    def variant(self) -> Variant:
        return Variant.of(asdict(self.config.model))

    @property
    def workers(self) -> int:
        """The most runs that the command which made it carries out at a time; 1 where it does not tell."""
        parts = (self.environment, *self.environment.get("resumed", ()))
        return max(int(n) for part in parts for n in ["1", *re.findall(r"--workers[= ](\d+)", str(part.get("command")))])

    @property
    def setting(self) -> dict[str, Any]:
        """The numbers of the data, by their own names whatever dictionary they are in."""
        return dict(_leaves(self.config.data))

    @property
    def longest(self) -> int | None:
        """The longest source seen in training."""
        longest = self.setting.get("longest")
        return longest if isinstance(longest, int) and longest > 0 else None

    @property
    def latest(self) -> list[Evaluation]:
        """The evaluation of the latest step at each task, mode and length, or split; of two of one step, the one written last.

        A row that does not note its step is taken to be of the last step that the run did.
        """
        found: dict[tuple[str, str, int], Evaluation] = {}
        for row in self.evaluation:
            if row.key not in found or row.step >= found[row.key].step:
                found[row.key] = row
        return [replace(row, step=row.step or self.steps) for row in found.values()]

    def to_json(self) -> dict[str, Any]:
        """The compact line of this run: everything a report needs, with at most `POINTS` points of the training loss."""
        return {
            "config": json.loads(self.config.to_json()),
            "environment": dict(self.environment),
            "steps": self.steps,
            **({"failed": self.failed} if self.failed else {}),
            "parameters": count_parameters(self.config.model),
            **({"tokens": self.tokens} if self.tokens else {}),
            "wall_seconds": round(self.cost.wall_seconds, 1),
            "tokens_per_second": round(self.cost.tokens_per_second),
            "peak_bytes": self.cost.peak_bytes,
            "losses": _round(thin(self.losses, POINTS)),
            **({"validations": _round(self.validations)} if self.validations else {}),
            "evaluation": [asdict(row) for row in self.evaluation],
            **({"stories": [asdict(story) for story in self.stories]} if self.stories else {}),
        }


def thin(points: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """At most `count` points of a curve: the mean of each of equal stretches, at its last step."""
    size = -(-len(points) // count) or 1
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in stretches]


def _round(curve: Sequence[tuple[int, float]]) -> list[list[float]]:
    return [[step, float(f"{loss:.5g}")] for step, loss in curve]


# -- reading -------------------------------------------------------------------------------------


def load(paths: Iterable[Path | str]) -> list[Run]:
    """The runs at paths: run folders, files of compact lines, or folders that hold either."""
    runs = [run for path in paths for run in _load_one(Path(path))]
    if not runs:
        raise ValueError("no runs were given; name run folders or files of results, as in results/length-gen/mqmtar.jsonl")
    return runs


def _load_one(path: Path) -> list[Run]:
    if path.is_file():
        return load_results(path)
    if (path / "config.json").is_file():
        return [read_run(path)]
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; name a run folder or a file of results")
    inside = sorted(p for p in path.iterdir() if p.suffix == ".jsonl" or p.is_dir())
    found = [run for p in inside if _holds_runs(p) for run in _load_one(p)]
    if not found:
        raise ValueError(f"there is no run in {path}: it has no config.json, and holds no folders of runs or files of results")
    return found


def _holds_runs(path: Path) -> bool:
    """Whether a folder holds runs, or a file of JSON lines is one of results; a file that cannot be read may be one."""
    if path.is_dir():
        return any(path.glob("**/config.json")) or any(map(_holds_runs, path.glob("**/*.jsonl")))
    try:
        return "config" in next(_read_lines(path), (0, {"config": {}}))[1]
    except ValueError:
        return True


def read_run(folder: Path | str) -> Run:
    """The run in a folder: config.json, environment.json, metrics.jsonl, timing.jsonl, evaluation.jsonl, stories.jsonl and
    inspections.jsonl.

    Only the config is needed; a run that was not evaluated has no results, one that was not timed no time.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    metrics = list(_read_lines(folder / "metrics.jsonl", growing=True))
    losses = [_read_loss(folder / "metrics.jsonl", line, row) for line, row in metrics if row.get("loss") is not None]
    validations = [
        _read_loss(folder / "metrics.jsonl", line, {"step": row.get("step"), "loss": row["validation"]["loss"]})
        for line, row in metrics
        if isinstance(row.get("validation"), dict) and row["validation"].get("loss") is not None
    ]
    environment = _read_json(folder / "environment.json") if (folder / "environment.json").exists() else {}
    evaluation = [
        read_evaluation(config.experiment, row, f"{folder / 'evaluation.jsonl'} line {n}")
        for n, row in _read_lines(folder / "evaluation.jsonl")
    ]
    saved = checkpoint.step_of(folder) if checkpoint.exists(folder) else 0  # one that was stopped was there, unlogged
    steps, failed = max(losses[-1][0] if losses else 0, saved), str(metrics[-1][1].get("failed", "")) if metrics else ""
    cost = _read_cost(folder / "timing.jsonl", [part["step"] for part in environment.get("resumed", [])])
    stories = [read_story(row, f"{folder / 'stories.jsonl'} line {n}") for n, row in _read_lines(folder / "stories.jsonl")]
    looks = [read_inspected(row, f"{path} line {n}") for path in [folder / "inspections.jsonl"] for n, row in _read_lines(path)]
    return Run(config, environment, steps, cost, losses, evaluation, str(folder), validations, stories, failed, looks)


def load_results(path: Path | str) -> list[Run]:
    """The runs of a file with one compact line for each, as `export` gives them."""
    path = Path(path)
    return [_from_json(row, f"{path} line {number}", str(path)) for number, row in _read_lines(path)]


def export(folder: Path | str) -> dict[str, Any]:
    """The compact line of a run folder, to be kept where its checkpoints need not be."""
    return read_run(folder).to_json()


def _from_json(row: Mapping[str, Any], where: str, source: str) -> Run:
    for name in ("config", "steps", "evaluation"):
        if name not in row:
            raise ValueError(f"{where}: {name} is missing; a line of results holds config, environment, steps, evaluation")
    try:
        config = RunConfig.from_json(json.dumps(row["config"]))
        losses, validations = (
            [(int(step), float(loss)) for step, loss in row.get(name, [])] for name in ("losses", "validations")
        )
        steps, cost = int(row["steps"]), Cost(*(type(usual)(row.get(name, usual)) for name, usual in Cost()._asdict().items()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(row["evaluation"], list) or not isinstance(row.get("environment", {}), dict):
        raise ValueError(f"{where}: evaluation must be a list of lines, and environment a dictionary")
    if not isinstance(row.get("stories", []), list):
        raise ValueError(f"{where}: stories must be a list of what the model wrote")
    if not isinstance(row.get("failed", ""), str):
        raise ValueError(f"{where}: failed = {json.dumps(row['failed'])} must be text")
    evaluation = [read_evaluation(config.experiment, evaluated, where) for evaluated in row["evaluation"]]
    stories = [read_story(story, where) for story in row.get("stories", [])]
    return Run(
        config, row.get("environment", {}), steps, cost, losses, evaluation, source, validations, stories, row.get("failed", "")
    )


def _read_config(path: Path) -> RunConfig:
    if not path.is_file():
        raise ValueError(f"{path.parent} is no run folder: it has no {path.name}")
    try:
        return RunConfig.from_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a dictionary is expected, not {type(value).__name__}")
    return value


def _read_lines(path: Path, growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and value of each line of a file of JSON lines; nothing if there is no such file.

    A growing file may end in a line that was cut short; that one is left out.
    """
    if not path.is_file():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text: {error}") from None
    lines = text[: text.rfind("\n") + 1] if growing else text
    for number, line in enumerate(lines.split("\n"), start=1):  # JSON text may hold the other ends of lines
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number}: a dictionary is expected, not {type(row).__name__}")
        yield number, row


def _read_loss(path: Path, line: int, row: Mapping[str, Any]) -> tuple[int, float]:
    try:
        return int(row["step"]), float(row["loss"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} line {line}: a step and a loss are expected, got {json.dumps(row)}") from None


def _read_cost(path: Path, resumed: Sequence[int]) -> Cost:
    """What the lines of timing.jsonl come to, where training was resumed after these steps."""
    found: dict[str, list[float]] = {"step": [], "seconds": [], "tokens_per_second": [], "peak_bytes": []}
    for number, row in _read_lines(path, growing=True):
        for name, values in found.items():
            value = row.get(name, 0)
            if not isinstance(value, int | float):
                raise ValueError(f"{path} line {number}: {name} = {json.dumps(value)} must be a number")
            values.append(value)
    steps, seconds, speeds, peaks = found.values()
    warm = [
        speed
        for before, step, speed in zip(steps, steps[1:], speeds[1:], strict=False)
        if not any(before <= start < step for start in resumed)
    ]
    return Cost(sum(seconds), median(warm or [0.0]), int(max(peaks, default=0)))


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value
