"""What a trained model writes: alone and as it comes, or several texts at once; and the file of a run that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compactattn.data.tokenizers import Tokenizer
from compactattn.experiments.language_modelling import Data
from compactattn.experiments.runs import Trained, open_run
from compactattn.models.generation import Sampling, TextStream, generate
from compactattn.training.config import RunError, check_seed
from compactattn.training.files import replace_durably

STORIES = "stories.jsonl"
SAMPLING = Sampling(temperature=0.8)  # a small model that always takes the likeliest token goes round in circles


@dataclass(frozen=True)
class Wish:
    """How a text is to be written."""

    tokens: int = 256  # at most
    sampling: Sampling = SAMPLING
    seed: int = 0
    stop: bool = True  # at the end of the story

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True)
class Teller:
    """A trained model with its tokenizer."""

    trained: Trained
    tokenizer: Tokenizer

    @staticmethod
    def open(folder: Path, device: str = "auto") -> Teller:
        """The weights that the run is judged by."""
        trained = open_run(folder, device)
        try:
            return Teller(trained, Data.of(trained.config).load_tokenizer())
        except ValueError as error:
            raise RunError(f"{folder}: {error}") from error

    def stream(self, prompt: str, wish: Wish) -> TextStream:
        """One text, piece by piece; equal to the only one that `tell` would write."""
        return TextStream(self._write([prompt], wish), self.tokenizer, wish.stop)

    def tell(self, prompts: Sequence[str], wish: Wish) -> list[TextStream]:
        """A text for each prompt, all written together; each still to be read, as one that streams."""
        rows = torch.stack(list(self._write(prompts, wish)), 1).tolist()
        return [TextStream(iter(row), self.tokenizer, wish.stop) for row in rows]

    def _write(self, prompts: Sequence[str], wish: Wish) -> Iterator[Tensor]:
        """The tokens of every text, (B,) at a time: as many as wished for, or as learned positions leave."""
        given = [self.tokenizer.encode(prompt) or [self.tokenizer.end] for prompt in prompts]
        tokens, longest = wish.tokens, self.trained.config.model.longest
        if longest:
            tokens = min(tokens, max(1, longest - max(map(len, given)) + 1))  # the last one that is written is never read
        stop = self.tokenizer.end if wish.stop else None
        return generate(self.trained.model, given, tokens, **asdict(wish.sampling), stop=stop, seed=wish.seed)

    def describe(self, prompt: str, text: str, wish: Wish, ended: bool, row: int = 0) -> dict[str, Any]:
        """A line of stories.jsonl: the text is what follows the prompt; each row of a seed has draws of its own.

        `ended` tells whether the model came to the end of its story.
        """
        how = {**asdict(wish.sampling), "seed": wish.seed, "row": row}
        return {"prompt": prompt, "text": text, "ended": ended, **how, "step": self.trained.step}


def tell_story(folder: Path, prompt: str, wish: Wish, device: str = "auto") -> str:
    """One story of a run, also kept in its stories.jsonl."""
    teller = Teller.open(folder, device)
    told = teller.stream(prompt, wish)
    text = "".join(told)
    save_stories(folder, [teller.describe(prompt, text, wish, told.ended)])
    return text


def save_stories(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Adds lines to the stories of a run."""
    path, added = folder / STORIES, "".join(json.dumps(line) + "\n" for line in lines)
    try:
        replace_durably(path, (path.read_bytes() if path.exists() else b"") + added.encode())
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}") from error
