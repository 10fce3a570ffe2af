"""What a trained model writes: alone and as it comes, or several texts at once; and the file of a run that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from compactattn.data.tokenizers import Tokenizer
from compactattn.experiments.language_modelling import Data
from compactattn.experiments.runs import Trained, open_run
from compactattn.models.generation import Sampling, TextStream, generate, stream_text
from compactattn.training.config import RunError

STORIES = "stories.jsonl"
SAMPLING = Sampling(temperature=0.8)  # a small model that always takes the likeliest token goes round in circles


@dataclass(frozen=True)
class Wish:
    """How a text is to be written."""

    tokens: int = 256  # at most
    sampling: Sampling = field(default=SAMPLING)
    seed: int = 0
    stop: bool = True  # at the end of the story


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
        tokens = self._room([self._read(prompt)], wish.tokens)
        return stream_text(
            self.trained.model, self.tokenizer, prompt, tokens, **asdict(wish.sampling), stop=wish.stop, seed=wish.seed
        )

    def tell(self, prompts: Sequence[str], wish: Wish) -> list[TextStream]:
        """A text for each prompt, all written together; each still to be read, as one that streams."""
        given = [self._read(prompt) for prompt in prompts]
        stop = self.tokenizer.end if wish.stop else None
        written = generate(
            self.trained.model, given, self._room(given, wish.tokens), **asdict(wish.sampling), stop=stop, seed=wish.seed
        )
        rows = torch.stack(list(written), 1).tolist()
        return [TextStream(iter(row), self.tokenizer, wish.stop) for row in rows]

    def _read(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt) or [self.tokenizer.end]

    def _room(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """So many tokens, or as many as learned positions leave; the last one that is written is never read."""
        longest = self.trained.config.model.longest
        return min(tokens, max(1, longest - max(map(len, prompts)) + 1)) if longest else tokens

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
    try:
        with open(folder / STORIES, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise RunError(f"cannot write to {folder / STORIES}: {error.strerror or error}") from error
