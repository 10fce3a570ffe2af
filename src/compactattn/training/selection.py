"""Which validation was the best, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
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
            loss = line.get("validation", {}).get("loss")
            if loss is not None and line["step"] <= last:
                selection.add(line["step"], loss)
        return selection

    def add(self, step: int, loss: float) -> bool:
        """Whether this loss is the lowest so far; of two that are equal the first stays the best."""
        if loss < self.loss:
            self.loss, self.step, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    @property
    def exhausted(self) -> bool:
        return 0 < self.patience <= self.waited


def chosen(folder: Path) -> Path:
    """Where the weights of a run are that should be used: those of its best validation, if it kept them."""
    return folder / BEST if (folder / BEST).is_dir() else folder
