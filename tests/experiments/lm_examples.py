"""Small corpora and runs of language modelling for tests."""

from __future__ import annotations

from pathlib import Path

from compactattn.data.corpus import Corpus
from compactattn.data.preparation import prepare
from compactattn.data.sources import open_sources
from compactattn.data.stories import Stories, tell_stories
from compactattn.data.tokenizers import load_tokenizer
from compactattn.experiments import language_modelling as lm
from compactattn.training.config import RunConfig, vary

LENGTH = 24


def make_corpus(folder: Path, stories: int = 40, seed: int = 0, held_out: float = 0.2) -> Corpus:
    prepare([Stories(stories, seed)], load_tokenizer("bytes"), folder, held_out, workers=1)
    return Corpus.open(folder)


def write_stories(path: Path, stories: int = 6, seed: int = 5) -> Path:
    path.write_text("\n<|endoftext|>\n".join(story.text for story in tell_stories(seed, 0, stories)) + "\n")
    return path


def prepare_file(path: Path, folder: Path, held_out: float = 0.0) -> Path:
    prepare(open_sources([path]), load_tokenizer("bytes"), folder, held_out, workers=1)
    return folder


def tiny(corpus: Corpus, model: str = "mosaic", kernel: str = "triweight", **training: object) -> RunConfig:
    config = lm.cpu_quick(corpus, model, kernel, layers=1, length=LENGTH)  # type: ignore[arg-type]
    small = {"steps": 6, "batch": 4, "warmup": 1, "validate_every": 2, "checkpoint_every": 3, "log_every": 1, "device": "cpu"}
    return vary(config, model={"width": 16, "heads": 2, "slots": 8}, training={**small, **training})
