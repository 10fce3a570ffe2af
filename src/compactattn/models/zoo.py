"""Named sizes, from the paper's tables down to what a laptop trains while you wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compactattn.models.config import ModelConfig


@dataclass(frozen=True)
class Size:
    """A depth, a width and a number of heads, and where it comes from."""

    layers: int
    width: int
    heads: int
    vocab: int
    origin: str

    def configure(self, **changes: object) -> ModelConfig:
        """A model of this size; changes are fields of ModelConfig. Mamba has twice the layers, each half of another's block."""
        layers = self.layers * (2 if changes.get("architecture") == "mamba" else 1)
        given = {"vocab": self.vocab, "layers": layers, "width": self.width, "heads": self.heads, **changes}
        return ModelConfig(**given)  # type: ignore[arg-type]


ZOO: Mapping[str, Size] = MappingProxyType(
    {
        "laptop": Size(2, 128, 8, 135, "the demo: associative recall with 128 symbols"),
        "recall": Size(4, 512, 8, 263, "MQMTAR (paper, hyperparameters of length generalisation)"),
        "reverse": Size(4, 512, 8, 36, "reverse (the same table)"),
        "sort": Size(2, 512, 8, 36, "sort (the same table)"),
        "regular": Size(2, 128, 8, 20, "RegBench (paper, best Memory Mosaic)"),
        "stories-1": Size(1, 768, 12, 50257, "language modelling, 1 layer"),
        "stories-8": Size(8, 768, 12, 50257, "language modelling, 8 layers"),
        "stories-12": Size(12, 768, 12, 50257, "language modelling, 12 layers"),
    }
)
