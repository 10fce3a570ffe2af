"""Named sizes, from the paper's tables down to what a laptop trains while you wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build, count_parameters

STEP = 16  # in which the inner width of a model is fitted


@dataclass(frozen=True)
class Size:
    """A depth, a width and a number of heads, and where it comes from."""

    layers: int
    width: int
    heads: int
    vocab: int
    origin: str
    longest: int = 0  # positions that its transformer learns; 0 stands for a transformer without

    def configure(self, **changes: object) -> ModelConfig:
        """A model of this size; changes are fields of ModelConfig. Mamba has twice the layers, each half of another's block.

        The recurrent ones, and a transformer that learns positions, are as wide inside as gives them the parameters of a
        Memory Mosaic.
        """
        architecture = changes.get("architecture", "mosaic")
        layers = self.layers * (2 if architecture == "mamba" else 1)
        given = {"vocab": self.vocab, "layers": layers, "width": self.width, "heads": self.heads, **changes}
        learned = architecture == "transformer" and self.longest > 0
        if learned:
            given = {"positions": "learned", "longest": self.longest, **given}
        if (learned or architecture not in ("mosaic", "transformer")) and "inner" not in changes:
            given["inner"] = self._fit(given)
        return ModelConfig(**given)  # type: ignore[arg-type]

    def _fit(self, given: Mapping[str, object]) -> int:
        """The inner width with which a model has the parameters of a Memory Mosaic of this size, to the nearest STEP."""
        mosaic = {"architecture": "mosaic", "layers": self.layers, "positions": "none"}
        narrow, wide, wanted = (
            _count(ModelConfig(**{**given, **change}))  # type: ignore[arg-type]
            for change in ({"inner": STEP}, {"inner": 2 * STEP}, mosaic)
        )
        return STEP * max(1, 1 + round((wanted - narrow) / (wide - narrow)))


ZOO: Mapping[str, Size] = MappingProxyType(
    {
        "laptop": Size(2, 128, 8, 135, "the demo: associative recall with 128 symbols"),
        "recall": Size(4, 512, 8, 263, "MQMTAR (paper, hyperparameters of length generalisation)"),
        "reverse": Size(4, 512, 8, 36, "reverse (the same table)"),
        "sort": Size(2, 512, 8, 36, "sort (the same table)"),
        "regular": Size(2, 128, 8, 20, "RegBench (paper, best Memory Mosaic)", longest=949),
        "stories-1": Size(1, 768, 12, 50257, "language modelling, 1 layer"),
        "stories-8": Size(8, 768, 12, 50257, "language modelling, 8 layers"),
        "stories-12": Size(12, 768, 12, 50257, "language modelling, 12 layers"),
    }
)


def _count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return count_parameters(build(config))
