"""What a model is made of, in one frozen object that can be written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from compactattn.dropout import check_rate
from compactattn.kernels import parse
from compactattn.memory.released import departs

Architecture = Literal["mosaic", "transformer", "s4d", "h3", "gla", "retnet", "mamba"]
Positions = Literal["none", "alibi", "learned"]
Released = Literal["", "efficient", "plain"]
Output = Literal["", "scaled", "plain"]
ARCHITECTURES, POSITIONS, RELEASED, OUTPUTS = (get_args(choice) for choice in (Architecture, Positions, Released, Output))

MULTIPLES: Mapping[str, tuple[int, str]] = {  # what the width of a head must be a multiple of, and why
    "gla": (2, " with keys half as wide as values"),
    "retnet": (2, " of an even width, whose channels rotary positions turn in pairs"),
}


def own_output(architecture: str) -> Output:
    """How an architecture was published."""
    return "scaled" if architecture == "mosaic" else "plain"


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
    dropout: float = 0.0  # of the weights of contextual memory or attention, and of what each mixer and store adds
    embedding_dropout: float = 0.0
    output: Output = ""  # of the tied embedding: Memory Mosaics' (scaled) or GPT-2's (plain); empty is the architecture's own

    def __post_init__(self) -> None:
        choosable = {"architecture": ARCHITECTURES, "positions": POSITIONS, "as_released": RELEASED, "output": OUTPUTS}
        for name, choices in choosable.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {', '.join(map(repr, choices))}")
        for name in ("vocab", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("slots", "inner", "state", "longest"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")
        for name in ("dropout", "embedding_dropout"):
            check_rate(name, getattr(self, name))
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
    def scales_output(self) -> bool:
        """Whether logits are divided by √width, and the embedding starts as N(0, 1)."""
        return (self.output or own_output(self.architecture)) == "scaled"

    @property
    def slots_per_head(self) -> int:
        """7/2 · width unless told otherwise, which gives a mosaic block the parameters of a transformer block of that width."""
        return self.slots or self.width * 7 // 2


def _heads(number: int) -> str:
    return "head" if number == 1 else "heads"
