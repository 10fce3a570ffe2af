"""The experiments by name: what a run folder's config says it is of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from compactattn.experiments import in_context, language_modelling, length_generalisation
from compactattn.training.config import RunConfig, RunError
from compactattn.training.loop import Summary


class Experiment(Protocol):
    """What each module of an experiment offers for any of its configs."""

    NAME: str

    def run(
        self, config: RunConfig, folder: Path, *, resume: bool = False, show_progress: bool = True, tensorboard: bool = False
    ) -> Summary:
        """Trains the model of a config."""
        ...

    def example(self, config: RunConfig) -> tuple[list[int], list[str]]:
        """The tokens that a model reads of the first test example, and the words to show for them."""
        ...

    def read(self, config: RunConfig, text: str) -> tuple[list[int], list[str]]:
        """The tokens of a text that a person typed, and the words to show for them; a ValueError tells what is no word."""
        ...

    def window(self, config: RunConfig) -> int:
        """Tokens of the longest sequence that training shows."""
        ...

    def complete_evaluation(self, config: RunConfig, folder: Path, samples: int, device: str = "auto") -> None:
        """Evaluates a trained run where it has not been."""
        ...


EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {module.NAME: module for module in (length_generalisation, in_context, language_modelling)}
)


def experiment_of(config: RunConfig) -> Experiment:
    if config.experiment not in EXPERIMENTS:
        known = ", ".join(map(repr, EXPERIMENTS))
        raise RunError(f"the run is of the experiment {config.experiment!r}, which is unknown here; known are {known}")
    return EXPERIMENTS[config.experiment]
