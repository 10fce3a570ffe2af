"""Which validation was the best, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BEST = "best"  # the subfolder of a run that keeps the checkpoint of its lowest validation loss


@dataclass
class Selection:
    """The lowest validation loss so far. It follows from the metrics alone, so a resumed run needs nothing else."""

    patience: int  # validations without a lower loss after which training stops; 0 stands for never
    loss: float = math.inf
    step: int = 0
    waited: int = 0  # validations since the best

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], patience: int, last: int) -> Selection:
        """The state after the lines of metrics.jsonl up to step `last`."""
        selection = Selection(patience)
        for line in lines:
            validation = line.get("validation", {})
            if "loss" in validation and line["step"] <= last:
                selection.add(line["step"], math.nan if validation["loss"] is None else validation["loss"])
        return selection

    def add(self, step: int, loss: float) -> bool:
        """Whether this loss is the lowest so far; of two that are equal the first stays the best, and NaN is never it."""
        if loss < self.loss:
            self.loss, self.step, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    @property
    def exhausted(self) -> bool:
        return 0 < self.patience <= self.waited
