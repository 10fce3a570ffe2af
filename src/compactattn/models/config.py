"""What a model is made of, in one frozen object that can be written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from compactattn.dropout import check_rate
from compactattn.kernels import parse
from compactattn.memory.contextual import LARGEST_LOG_BETA
from compactattn.memory.released import departs, scoring

Architecture = Literal["mosaic", "transformer", "s4d", "h3", "gla", "retnet", "mamba"]
Positions = Literal["none", "alibi", "learned"]
Released = Literal["", "efficient", "plain"]
Output = Literal["", "scaled", "plain"]
Start = Literal["published", "former", "unit"]
Form = Literal["own", "benchmark"]
ARCHITECTURES, POSITIONS, RELEASED, OUTPUTS, STARTS, FORMS = (
    get_args(choice) for choice in (Architecture, Positions, Released, Output, Start, Form)
)
RECURRENT = ("s4d", "h3", "gla", "retnet", "mamba")
GPT2_STD = 0.02

MULTIPLES: Mapping[str, tuple[int, str]] = {  # what the width of a head must be a multiple of, and why
    "gla": (2, " with keys half as wide as values"),
    "retnet": (2, " of an even width, whose channels rotary positions turn in pairs"),
}


def own_output(architecture: str) -> Output:
    """How an architecture was published."""
    return "scaled" if architecture == "mosaic" else "plain"


# what a config file that is older than a field meant, told from its other fields, where that is not the default
OLD_DROPOUT: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {"absent": lambda old: old.get("dropout", 0.0)}
OLD_START: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "absent": lambda old: "former" if _is_scaled(old) else "published"
}


def _is_scaled(model: Mapping[str, Any]) -> bool:
    return (model.get("output") or own_output(model.get("architecture", "mosaic"))) == "scaled"


@dataclass(frozen=True)
class ModelConfig:
    """A language model of `layers` blocks.

    A mosaic block is a contextual and a persistent memory, a transformer block attention and an MLP; the recurrent
    mixers take the place of attention, and a Mamba block has no MLP.
    """

    vocab: int
    layers: int = 4
    width: int = 512
    heads: int = 8
    architecture: Architecture = "mosaic"
    kernel: str = "gaussian"  # of contextual memory or of attention
    positions: Positions = "none"
    slots: int = 0  # of persistent memory, for each head; 0 stands for 7/2 · width
    inner: int = 0  # width inside an MLP, or channels of Mamba; 0 stands for 4 · width, or 2 · width
    state: int = 0  # of S4D, H3 and Mamba, for each channel; 0 stands for 64, 64 and 16
    longest: int = 0  # the longest sequence; only learned positions have one
    as_released: Released = ""  # the departures of the published code from the paper, to measure what they cost
    dropout: float = 0.0  # of what each mixer and store adds
    embedding_dropout: float = 0.0
    output: Output = ""  # of the tied embedding: Memory Mosaics' (scaled) or GPT-2's (plain); empty is the architecture's own
    attention_dropout: float = field(default=0.0, metadata=OLD_DROPOUT)  # of contextual or attention weights
    persistent_dropout: float = 0.0  # of the weights of persistent memory
    start: Start = field(default="published", metadata=OLD_START)  # of the tied embedding, see `embedding_std`
    beta_squared: float = 0.0  # of contextual memory at the start, 1/h²; 0 stands for the published e²
    form: Form = "own"  # of a recurrent model: ours, or that of RegBench's code

    def __post_init__(self) -> None:
        choosable = {"architecture": ARCHITECTURES, "positions": POSITIONS, "as_released": RELEASED, "output": OUTPUTS}
        choosable |= {"start": STARTS, "form": FORMS}
        for name, choices in choosable.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {', '.join(map(repr, choices))}")
        for name in ("vocab", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("slots", "inner", "state", "longest"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")
        for name in ("dropout", "embedding_dropout", "attention_dropout", "persistent_dropout"):
            check_rate(name, getattr(self, name))
        self._check_bandwidth()
        if self.form != "own" and self.architecture not in RECURRENT:
            raise ValueError(f"form = {self.form!r} is for {', '.join(RECURRENT)}; a {self.architecture} has one form only")
        if self.bare and self.layers > 1:
            raise ValueError(
                f"layers = {self.layers}: RegBench's Mamba is one layer, since its code gives each layer the raw embeddings;"
                " choose layers = 1, or form = 'own' for residual blocks"
            )
        if self.bare and (self.dropout or self.embedding_dropout):
            raise ValueError("RegBench's Mamba reads raw embeddings, where no dropout has an effect; leave dropout at 0")
        if self.start == "former" and not self.scales_output:
            raise ValueError("start = 'former' changes nothing beside a plain output; leave it out")
        if self.start == "unit" and self.scales_output:
            raise ValueError("start = 'unit' beside a scaled output is the former start; name it 'former'")
        self._check_heads()
        if self.architecture in ("s4d", "h3") and self.state % 2:
            raise ValueError(
                f"state = {self.state} of {self.architecture} does not divide into pairs of conjugates; choose an even number"
            )
        if self.positions == "learned" and self.longest < 1:
            raise ValueError("learned positions need the longest sequence, as in longest=512")
        if self.as_released and (self.architecture != "mosaic" or not departs(parse(self.kernel), self.as_released)):
            raise ValueError(
                f"as_released = {self.as_released!r} changes nothing for a {self.architecture} with {self.kernel}; leave it out"
            )
        parse(self.kernel)

    def _check_bandwidth(self) -> None:
        largest = math.exp(2 * LARGEST_LOG_BETA)
        if not 0 <= self.beta_squared <= largest:
            raise ValueError(f"beta_squared = {self.beta_squared} must be from 0, for e², to {largest:,.0f}")
        if self.beta_squared and scoring(parse(self.kernel), self.as_released).power == 0:
            raise ValueError(f"the {self.as_released} path of {self.kernel} has no bandwidth, so it can start from none")
        if self.beta_squared and self.architecture != "mosaic":
            raise ValueError(f"beta_squared = {self.beta_squared} is for a mosaic; a {self.architecture} learns no bandwidth")

    def _check_heads(self) -> None:
        """Refuses a width that does not divide into the heads, and names the nearest numbers that would do."""
        part, why = MULTIPLES.get(self.architecture, (1, ""))
        if not self.width % (part * self.heads):
            return
        fits = [heads for heads in range(1, self.width + 1) if self.width % (part * heads) == 0]
        near = [*(n for n in fits if n < self.heads)][-1:] + [*(n for n in fits if n > self.heads)][:1]
        others = f"{' or '.join(map(str, near))} {_heads(near[-1])}, or " if near else ""
        raise ValueError(
            f"width {self.width} does not divide into {self.heads} {_heads(self.heads)}{why};"
            f" choose {others}a width of {self.width + -self.width % (part * self.heads)}"
        )

    @property
    def bare(self) -> bool:
        """Whether it is one layer on raw embeddings, with no norm and no residual: RegBench's Mamba."""
        return (self.architecture, self.form) == ("mamba", "benchmark")

    @property
    def scales_output(self) -> bool:
        """Whether logits are divided by √width."""
        return _is_scaled({"output": self.output, "architecture": self.architecture})

    @property
    def embedding_std(self) -> float:
        """Of the tied embedding at the start.

        Published is N(0, 1/width) beside a scaled output, so that the first loss of a mosaic is ln(vocab), and GPT-2's
        N(0, 0.02²) beside a plain one. The former start gave a mosaic N(0, 1), by mistake, and a first loss of two to four
        times that; it stays so that older runs can be resumed. "unit" is N(0, 1) for any model, as RegBench's Mamba has it.
        """
        published = self.width**-0.5 if self.scales_output else GPT2_STD
        former = 1.0 if self.scales_output else GPT2_STD
        return {"published": published, "former": former, "unit": 1.0}[self.start]

    @property
    def slots_per_head(self) -> int:
        """7/2 · width unless told otherwise, which gives a mosaic block the parameters of a transformer block of that width."""
        return self.slots or self.width * 7 // 2


def _heads(number: int) -> str:
    return "head" if number == 1 else "heads"
