"""What an evaluation says of a run: one kind of line for each experiment, checked as it is read; and what a model wrote.

Names that a line has beyond ours are left alone. What is malformed is told in one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Evaluated:
    """Length generalisation: how many samples of a test set a run answered exactly."""

    task: str
    length: int
    mode: str
    samples: int
    exact: int
    tokens: int = 0
    tokens_right: int = 0
    step: int = 0
    checksum: str = ""
    precision: str = ""  # that the model computed in, where it was noted

    def __post_init__(self) -> None:
        if not 0 <= self.exact <= self.samples or self.samples < 1:
            raise ValueError(f"exact = {self.exact} of samples = {self.samples} is no share of right answers")
        if self.length < 1:
            raise ValueError(f"length = {self.length} must be at least 1")

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is an evaluation of; the latest of several counts."""
        return self.task, self.mode, self.length


@dataclass(frozen=True)
class Part:
    """Some positions of a test set: how many there are, how many of them are right, and their mean TVD."""

    positions: int
    right: int
    tvd: float = 0.0

    def __post_init__(self) -> None:
        _check_part(self.positions, self.right, self.tvd)


@dataclass(frozen=True)
class Bins:
    """Positions of a test set by their place in the sequence: bin i holds edges[i] up to, not including, edges[i + 1]."""

    edges: tuple[int, ...]
    positions: tuple[int, ...]
    right: tuple[int, ...]
    tvd: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.positions)
        if not len(self.right) == len(self.tvd) == len(self.edges) - 1 == count:
            given = f"{len(self.edges)} edges, {count} positions, {len(self.right)} right and {len(self.tvd)} tvd"
            raise ValueError(f"by_position has {given}; n bins need n of each and n + 1 edges")
        _check_edges(self.edges)
        for part in zip(self.positions, self.right, self.tvd, strict=True):
            _check_part(*part)


@dataclass(frozen=True)
class Reference:
    """What a predictor that has learnt nothing reaches on the same split."""

    name: str
    accuracy: float
    tvd: float


@dataclass(frozen=True)
class Scored:
    """RegBench: at how many positions of a split the likeliest token is legal, and the mean distance to the automaton (TVD)."""

    task: str
    split: str
    examples: int  # of training
    samples: int
    positions: int
    right: int
    tvd: float
    inside: Part | None = None  # without the positions before a separator
    last: Part | None = None  # the last token of each sample alone
    by_position: Bins | None = None
    references: tuple[Reference, ...] = ()
    loss: float | None = None
    step: int = 0  # of the lowest validation loss
    epoch: int = 0
    checksum: str = ""
    precision: str = ""

    def __post_init__(self) -> None:
        for name in ("examples", "samples", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        _check_part(self.positions, self.right, self.tvd)

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is an evaluation of; the latest of several counts."""
        return self.task, self.split, self.examples

    @property
    def accuracy(self) -> float:
        return self.right / self.positions


@dataclass(frozen=True)
class Stretches:
    """The loss by place in a window: stretch i holds the positions from edges[i] up to, not including, edges[i + 1]."""

    edges: tuple[int, ...]
    tokens: tuple[int, ...]
    loss: tuple[float | None, ...]  # the mean; none where no token counts

    def __post_init__(self) -> None:
        if not len(self.loss) == len(self.tokens) == len(self.edges) - 1:
            given = f"{len(self.edges)} edges, {len(self.tokens)} tokens and {len(self.loss)} loss"
            raise ValueError(f"by_position has {given}; n stretches need n of each and n + 1 edges")
        _check_edges(self.edges)
        for tokens, loss in zip(self.tokens, self.loss, strict=True):
            if tokens < 0 or (tokens > 0) != (loss is not None):
                raise ValueError(f"by_position has loss {loss} over {tokens} tokens; a stretch has a loss where it has tokens")
            _check_loss("by_position.loss", loss or 0.0)


@dataclass(frozen=True)
class Predicted:
    """Language modelling: the mean loss of the tokens of a split, in nats, and by their position in a window."""

    task: str
    split: str
    samples: int  # windows
    tokens: int
    loss: float
    perplexity: float | None = None
    bits_per_byte: float | None = None
    by_position: Stretches | None = None
    step: int = 0
    checksum: str = ""
    precision: str = ""
    tokenizer: str = ""
    text_bytes: int = 0
    text_checksum: str = ""  # of the whole text, of which the windows are a part

    def __post_init__(self) -> None:
        for name in ("samples", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        _check_loss("loss", self.loss)
        _check_loss("bits_per_byte", self.bits_per_byte or 0.0)
        if self.perplexity is not None and not math.isclose(math.log(max(self.perplexity, 1e-9)), self.loss, abs_tol=1e-3):
            raise ValueError(f"perplexity = {self.perplexity} is not e to the power of loss = {self.loss}")

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is an evaluation of; the latest of several counts."""
        return self.task, self.split, 0


@dataclass(frozen=True)
class Story:
    """What a model wrote after a prompt, and how it was sampled: each row of a seed has draws of its own."""

    prompt: str
    text: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    row: int = 0
    step: int = 0
    ended: bool | None = None  # whether the model came to the end of its story, where that was noted


def _check_loss(name: str, loss: float) -> None:
    if not 0 <= loss < math.inf:  # NaN neither
        raise ValueError(f"{name} = {loss} must be a finite number of at least 0")


def _check_edges(edges: tuple[int, ...]) -> None:
    if any(start >= end for start, end in pairwise(edges)):
        raise ValueError(f"the edges of by_position must rise, but are {list(edges)}")


def _check_part(positions: int, right: int, tvd: float) -> None:
    if not 0 <= right <= positions:
        raise ValueError(f"right = {right} of positions = {positions} is no share of right answers")
    if not 0 <= tvd <= 1:  # NaN neither
        raise ValueError(f"tvd = {tvd} must be between 0 and 1")


Evaluation = Evaluated | Scored | Predicted
KINDS: dict[str, type[Evaluated] | type[Scored] | type[Predicted]] = {  # by experiment
    "length-gen": Evaluated,
    "regbench": Scored,
    "lm": Predicted,
}


def read_evaluation(experiment: str, row: Any, where: str) -> Evaluation:
    """An evaluation from its line, as JSON gives it; complaints begin with `where`."""
    if experiment not in KINDS:
        raise ValueError(f"{where}: experiment {experiment!r} is unknown; a report knows {', '.join(KINDS)}")
    if not isinstance(row, dict):
        raise ValueError(f"{where}: an evaluation is a dictionary, not {type(row).__name__}")
    try:
        return cast(Evaluation, _read_fields(KINDS[experiment], row, "", "an evaluation"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_story(row: Any, where: str) -> Story:
    """A story from its line, as JSON gives it; complaints begin with `where`."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a story is a dictionary, not {type(row).__name__}")
    try:
        return cast(Story, _read_fields(Story, row, "", "a story"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_fields(kind: type, row: Mapping[str, Any], prefix: str, what: str) -> Any:
    hints, known = get_type_hints(kind), {}
    for entry in fields(kind):
        name = prefix + entry.name
        if row.get(entry.name) is not None:
            known[entry.name] = _read_value(hints[entry.name], row[entry.name], name, what)
        elif entry.default is MISSING:
            raise ValueError(f"{name} is missing from {what}")
    return kind(**known)


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _read_value(kind: Any, value: Any, name: str, what: str) -> Any:
    if value is None and _is_optional(kind):
        return None
    kind = next((choice for choice in get_args(kind) if choice is not type(None)), kind) if _is_optional(kind) else kind
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name} = {json.dumps(value)} must be a dictionary")
        return _read_fields(cast(type, kind), value, f"{name}.", what)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} = {json.dumps(value)} must be a list")
        return tuple(_read_value(get_args(kind)[0], item, f"{name}[{i}]", what) for i, item in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # isinstance would take True for the number 1
        raise ValueError(f"{name} = {json.dumps(value)} must be {_NAMES[kind]}")
    return value


def _is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind)
