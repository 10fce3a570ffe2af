"""What a run is, in frozen objects that can be written down, read back and compared."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from compactattn.data.differences import list_differences
from compactattn.models.config import ModelConfig

Precision = Literal["fp32", "bf16"]
Compile = Literal["none", "parts", "whole"]
Keep = Literal["best", "last"]
# where and how, which may change when a run is resumed; a folder of data is known by its checksum
FREE = ("training.device", "training.compile", "training.graph", "training.checkpoint_every", "data.folder")


class RunError(Exception):
    """Something about a run that a person can put right. The message is one sentence, to be shown without a traceback."""


@dataclass(frozen=True)
class TrainingConfig:
    """How the weights are learned: AdamW, a linear warm-up, then a cosine from `rate` to `final_rate`."""

    steps: int  # updates of the weights
    batch: int  # samples in an update, over all ranks and micro-batches
    rate: float = 1e-3
    final_rate: float = 5e-5  # reached exactly at the horizon, and kept
    horizon: int = 0  # steps of warm-up and cosine; 0 stands for all
    embedding_rate: float = 1.0  # what the rate is multiplied by for the tied embedding
    ssm_rate: float = 0.0  # the highest rate of state-space parameters, which then do not decay; 0 treats them as the others
    warmup: int = 0  # steps; `rate` is reached exactly at the last of them
    decay: float = 0.1  # of tensors with two or more dimensions, or of all
    decay_all: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # largest norm of the gradient; 0 leaves it alone
    precision: Precision = "fp32"
    accumulation: int = 1  # micro-batches in an update, on each rank
    compile: Compile = "none"  # "parts": what surrounds attention, one graph for every kernel; "whole": the loss
    graph: bool = False  # replay updates as a CUDA graph: small models then run as fast as the GPU, not as the host
    log_every: int = 10  # steps
    checkpoint_every: int = 500  # steps; the last step is always kept
    validate_every: int = 0  # steps; 0 stands for never
    patience: int = 0  # validations without a lower loss after which training stops; 0 stands for never
    keep: Keep = "best"  # the weights a run is judged by: of its lowest validation loss, if it has one, or of its last step
    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:1"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "log_every", "checkpoint_every"):
            _at_least(self, name, 1)
        for name in ("warmup", "horizon", "validate_every", "patience", "rate", "final_rate", "decay", "clip", "ssm_rate"):
            _at_least(self, name, 0)
        _at_least(self, "embedding_rate", 0)
        if self.embedding_rate == 0:
            raise ValueError("embedding_rate = 0 never trains the embedding; 1 gives it the rate of all")
        if self.rate == 0:
            raise ValueError("rate = 0 learns nothing; choose a positive rate, as in rate=1e-3")
        if self.final_rate > self.rate:
            raise ValueError(
                f"final_rate = {self.final_rate} is above rate = {self.rate}; the cosine only falls, lower final_rate"
            )
        if self.warmup >= self.steps:
            raise ValueError(f"warmup = {self.warmup} leaves none of the {self.steps} steps; choose fewer than {self.steps}")
        if self.horizon and self.warmup >= self.horizon:
            raise ValueError(
                f"warmup = {self.warmup} leaves nothing of horizon = {self.horizon} to the cosine; make it shorter"
            )
        if self.patience and not self.validate_every:
            raise ValueError(f"patience = {self.patience} counts validations, but validate_every = 0 makes none; set it")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas} must be two numbers from 0 up to, not including, 1")
        for name, kind in (("precision", Precision), ("compile", Compile), ("keep", Keep)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {choices}")
        if self.batch % self.accumulation:
            raise ValueError(
                f"batch = {self.batch} does not divide into accumulation = {self.accumulation} micro-batches;"
                f" choose a multiple of {self.accumulation}"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"device = {self.device!r} is unknown; choose 'auto', 'cpu', 'cuda' or, for one of several, 'cuda:1'"
            )


def _at_least(config: TrainingConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if TrainingConfig.__annotations__[name] == "int" and type(value) is not int:
        raise ValueError(f"{name} = {value!r} must be a whole number")
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{name} = {value} must be a finite number of at least {least}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed = {seed} must be at least 0 and less than 2^63")


@dataclass(frozen=True)
class RunConfig:
    """All that decides the result of a run. `data` belongs to the experiment: names to JSON values."""

    experiment: str
    seed: int
    model: ModelConfig
    training: TrainingConfig
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        try:
            plain = json.loads(json.dumps(self.data, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"data holds something JSON cannot ({error}); use finite numbers, text, lists and dictionaries"
            ) from None
        object.__setattr__(self, "data", plain)  # tuples become lists now, so that a config equals itself read back

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> RunConfig:
        """The config that `to_json` wrote. A ValueError names the field that is unknown, missing or of a wrong type."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        return cast(RunConfig, _read(RunConfig, values, ""))


def vary(
    config: RunConfig, *, seed: int | None = None, model: Mapping[str, Any] = {}, training: Mapping[str, Any] = {}
) -> RunConfig:
    """The config with other fields. Other steps end the cosine at the last of them, and fewer than the warm-up shorten that."""
    changed = replace(config.training, **{**_fit_schedule(config.training, training), **training})
    return replace(config, seed=config.seed if seed is None else seed, model=replace(config.model, **model), training=changed)


def _fit_schedule(old: TrainingConfig, changes: Mapping[str, Any]) -> dict[str, int]:
    steps = changes.get("steps", old.steps)
    return {"horizon": old.horizon if steps == old.steps else 0, **({"warmup": steps // 10} if old.warmup >= steps else {})}


def differences(old: RunConfig, new: RunConfig, ignore: tuple[str, ...] = ()) -> list[str]:
    """Fields that differ, as "training.rate: 0.001 → 0.002"; those whose path is in `ignore` may."""
    return list_differences(asdict(old), asdict(new), ignore)


def _read(kind: Any, value: Any, path: str) -> Any:
    """`value`, as JSON gives it, as the type `kind` says; complaints name `path`."""
    if is_dataclass(kind):
        return _read_fields(cast(type, kind), value, path)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(
                f"{path} = {json.dumps(value)} is unknown; choose one of {', '.join(map(json.dumps, get_args(kind)))}"
            )
        return value
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise ValueError(f"{path} = {json.dumps(value)} must be a list of {len(kinds)} values")
        return tuple(_read(inner, item, f"{path}[{i}]") for i, (inner, item) in enumerate(zip(kinds, value, strict=True)))
    kind = get_origin(kind) or kind
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # isinstance would take True for the number 1
        raise ValueError(f"{path} = {json.dumps(value)} must be {_NAMES[kind]}")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes", dict: "a dictionary"}


def _read_fields(kind: type, value: Any, path: str) -> Any:
    prefix = f"{path}." if path else ""
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'a config'} must be a dictionary of fields, not {json.dumps(value)}")
    known = {entry.name: entry for entry in fields(kind)}
    for name in value:
        if name not in known:
            raise ValueError(f"{prefix}{name} is unknown; {path or 'a config'} has the fields {', '.join(known)}")
    for name, entry in known.items():
        if name not in value and entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{prefix}{name} is missing; it has no default, so write it down")
    before = {name: entry.metadata["absent"] for name, entry in known.items() if "absent" in entry.metadata}
    value = {**{name: tell(value) for name, tell in before.items()}, **value}  # what an older file meant
    hints = get_type_hints(kind)
    inner = {name: _read(hints[name], item, prefix + name) for name, item in value.items()}
    try:
        return kind(**inner)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from None
