"""What we want to reach, as ratios of forward + backward to a peer in the same run, and how far we are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from compactattn.bench.results import Row, format_markdown


@dataclass(frozen=True)
class Goal:
    """Our time for each kernel at most `limits[length]` times the peer's."""

    kernels: tuple[str, ...]
    peer: str
    peer_kernel: str
    regime: str
    limits: Mapping[int, float]


LENGTHS = (512, 2048, 8192, 32768)
HEAD_DIMS = (64, 128)
GOALS = (
    Goal(("biweight",), "adasplash-2", "biweight", "mild", dict.fromkeys(LENGTHS, 0.6)),
    Goal(("biweight",), "adasplash-2", "biweight", "local", {512: 0.6, 2048: 0.5, 8192: 0.4, 32768: 0.35}),
    Goal(("sparsemax", "triweight"), "sdpa-cudnn", "gaussian", "mild", {512: 1.4, 2048: 1.4, 8192: 1.3, 32768: 1.3}),
    Goal(("sparsemax", "biweight", "triweight", "relumax(1)", "relumax(2)", "relumax(3)"),
         "sdpa-cudnn", "gaussian", "local", {2048: 0.9, 8192: 0.6, 32768: 0.4}),
    Goal(("norm_relu",), "sdpa-cudnn", "gaussian", "mild", dict.fromkeys(LENGTHS, 1.0)),
)  # fmt: skip
TOKENS_PER_SECOND, BEHIND_TRANSFORMER = 450_000, 1.4  # goals for a training step of 8 layers


def serves_a_goal(contestant: str, kernel: str, regime: str, length: int, head_dim: int) -> bool:
    """Whether a goal needs this time."""
    return head_dim in HEAD_DIMS and any(
        regime == goal.regime
        and length in goal.limits
        and (kernel in goal.kernels if contestant == "ours" else (contestant, kernel) == (goal.peer, goal.peer_kernel))
        for goal in GOALS
    )


def format_goals(rows: Sequence[Row], head_dim: int) -> str:
    """The table of goals at one head dim: each ratio beside its goal; a cell that was lost says so."""
    header = ["ours / peer, forward + backward", "scores", *(f"n = {length:,}" for length in LENGTHS)]
    lines = [
        [
            f"`{kernel}` / {goal.peer}",
            goal.regime,
            *(judge(rows, goal, kernel, length, head_dim).text for length in LENGTHS),
        ]
        for goal in GOALS
        for kernel in goal.kernels
    ]
    return format_markdown(header, lines)


class Verdict(NamedTuple):
    """What became of a goal, and how a table says it."""

    kind: Literal["no goal", "not measured", "reached", "lost"]
    text: str


def count_verdicts(rows: Sequence[Row]) -> Counter[str]:
    """How many cells of the tables of goals there are of each kind."""
    return Counter(
        judge(rows, goal, kernel, length, head_dim).kind
        for goal in GOALS for kernel in goal.kernels for length in LENGTHS for head_dim in HEAD_DIMS
    )  # fmt: skip


def judge(rows: Sequence[Row], goal: Goal, kernel: str, length: int, head_dim: int) -> Verdict:
    """A goal in one cell; a peer that failed leaves it unmeasured, a failure of ours loses it."""
    if length not in goal.limits:
        return Verdict("no goal", "no goal")
    limit = goal.limits[length]
    place = {"regime": goal.regime, "length": str(length), "head_dim": str(head_dim)}
    ours = find_times(rows, place | {"contestant": "ours", "kernel": kernel})
    theirs = find_times(rows, place | {"contestant": goal.peer, "kernel": goal.peer_kernel})
    both = [run for run in ours if run in theirs]
    if not both:
        return Verdict("not measured", f"not measured (≤ {limit})")
    (mine, status), (other, other_status) = ours[max(both)], theirs[max(both)]
    if mine is None:
        return Verdict("lost", f"{status} (≤ {limit})")
    if other is None:
        return Verdict("not measured", f"{other_status} (≤ {limit})")
    ratio = mine / other
    if ratio <= limit:
        return Verdict("reached", f"{ratio:.2f} ≤ {limit}")
    return Verdict("lost", f"**{ratio:.2f}** > {limit}, lost")


def find_times(rows: Sequence[Row], wanted: Mapping[str, str]) -> dict[str, tuple[float | None, str]]:
    """For each run the time, None where there is none, and the status of the row with the wanted values."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return {row["started"]: (float(row["both_median_ms"]) if row["both_median_ms"] else None, row["status"]) for row in found}
