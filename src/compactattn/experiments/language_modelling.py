"""Language modelling: stories as a stream of tokens, and how well a model foretells the next one (paper §4.1).

A preset is a function from a corpus and a model to a complete config; a variant changes fields of it. What a run is judged by,
and what tells its stories, are the weights of its lowest validation loss, or with `training.keep = "last"` those of its last
step, as in the paper.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from torch import nn

from compactattn.data.batches import Batch
from compactattn.data.corpus import Corpus, fixed_windows, load_tokenizer_of, read_openings
from compactattn.data.draws import Array
from compactattn.data.meta import META
from compactattn.data.preparation import encode_block
from compactattn.data.sources import identify, name_corpus, open_sources
from compactattn.data.tokenizers import Tokenizer, check_ids
from compactattn.evaluation.loss_by_position import evaluate_positions
from compactattn.experiments.runs import find_best, open_run, read_data, read_evaluation, write_evaluation
from compactattn.kernels import parse, relumax, split_names
from compactattn.models.config import ModelConfig, own_output
from compactattn.models.language_model import build
from compactattn.models.zoo import ZOO
from compactattn.training.checkpoint import step_of
from compactattn.training.config import RunConfig, RunError, TrainingConfig, vary
from compactattn.training.loop import Summary, train

NAME = "lm"
OWN = "validation"  # the split of the run's own corpus that it is judged on
SEEN = 0.1  # share of a text's documents that may begin as one of training does
EXAMPLE = 64  # tokens of the text that is looked at unless another is given
Model = Literal["mosaic", "transformer"]


@dataclass(frozen=True)
class Data:
    """What a run is trained on: a prepared corpus, and the windows that are cut out of it."""

    corpus: str  # its name, for people
    folder: str  # where it lies: it may move, but not change
    tokenizer: str
    tokenizer_hash: str
    checksum: str  # of the training stream
    length: int = 512  # tokens of a window
    validation_windows: int = 256  # at most: no two of them overlap

    @staticmethod
    def of(config: RunConfig) -> Data:
        """The data of a config; a ValueError names what is wrong."""
        return cast(Data, read_data(Data, config, NAME))

    @staticmethod
    def describe(corpus: Corpus, length: int = 512, validation_windows: int = 256) -> Data:
        """The data of a new run; a ValueError says why the corpus cannot serve."""
        folder, made = corpus.folder.resolve(), corpus.meta["tokenizer"]
        checksum = corpus.meta["splits"]["train"]["sha256"]
        data = Data(folder.name, str(folder), made["name"], made["sha256"], checksum, length, validation_windows)
        data.cut_validation(corpus)
        with naming(f"the training split of {folder.name!r}"):
            corpus.windows(length, 0)
        return data

    def open(self) -> Corpus:
        """The corpus of the run, if it is where it was and what it was."""
        if not (Path(self.folder) / META).is_file():
            raise ValueError(
                f"the corpus {self.corpus!r} is no longer in {self.folder!r}; put it back, or write where it is now into"
                " data.folder of the run's config.json"
            )
        corpus = Corpus.open(self.folder)
        self.require_tokenizer(corpus)
        if not self.is_of(corpus):
            raise ValueError(f"{self.folder!r} holds another corpus than the run was trained on; put that one back")
        return corpus

    def is_of(self, corpus: Corpus) -> bool:
        """Whether the run was trained on this corpus, wherever it lies."""
        return corpus.meta["splits"]["train"]["sha256"] == self.checksum

    def require_tokenizer(self, corpus: Corpus) -> None:
        made = corpus.meta["tokenizer"]
        if (made["name"], made["sha256"]) != (self.tokenizer, self.tokenizer_hash):
            raise ValueError(
                f"the tokens in {str(corpus.folder)!r} are of tokenizer {made['name']!r} ({made['sha256'][:8]}…), those of the"
                f" run of {self.tokenizer!r} ({self.tokenizer_hash[:8]}…); prepare the text with --tokenizer {self.tokenizer}"
            )

    def require_unseen(self, path: Path, tokens: Array, sources: Sequence[Mapping[str, Any]]) -> None:
        """Raises a ValueError where the run was trained on one of these sources, or on more than a tenth of their documents.

        A document is known by its first tokens: neither its packing nor what was cut off or added behind hides it. A few that
        begin alike are chance.
        """
        try:
            corpus = self.open()
        except ValueError as error:  # the corpus is gone, and with it the record
            note(f"Note: whether the run was trained on text that is in {str(path)!r} could not be checked: {error}")
            return
        learned = [identify(source) for source in corpus.meta["sources"] if source["split"] != OWN]
        seen = any(identify(source) in learned for source in sources)
        if not seen:
            openings = list(read_openings(tokens, corpus.end))
            known = set(openings).intersection(read_openings(corpus.train, corpus.end))
            seen = sum(opening in known for opening in openings) > SEEN * len(openings)
        if seen:
            raise ValueError(
                f"the run was trained on text that is in {str(path)!r}; name another text, or none for the documents that were"
                " held out"
            )

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the run."""
        tokenizer = load_tokenizer_of(Path(self.folder), self.tokenizer)
        if tokenizer.hash != self.tokenizer_hash:
            raise ValueError(f"tokenizer {self.tokenizer!r} is no longer the one of the run; put its corpus back")
        return tokenizer

    def cut_validation(self, corpus: Corpus) -> Batch:
        """The windows of every validation during training."""
        if not len(corpus.validation):
            raise ValueError(
                f"{str(corpus.folder)!r} has no validation split; prepare the corpus with a share of documents in --held-out"
            )
        with naming(f"the validation split of {corpus.folder.name!r}"):
            return spread_windows(corpus.validation, self.length, self.validation_windows)


@cache
def note(sentence: str) -> None:
    """Says something on stderr, once."""
    print(sentence, file=sys.stderr)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Begins the sentence of a ValueError with what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def spread_windows(tokens: Array, length: int, most: int) -> Batch:
    """At most so many windows of a stream, spread evenly over it. No two overlap, so that no token counts twice."""
    return fixed_windows(tokens, length, min(most, max(1, (len(tokens) - 1) // max(length, 1))))


# -- configs -------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """The highest learning rate and the last."""

    rate: float
    final_rate: float


HIGH, LOW = Rates(5e-3, 1e-4), Rates(1e-3, 5e-5)
RATES: Mapping[int, Rates] = {1: HIGH, 8: HIGH, 12: LOW}  # by layers: Table "Main training and model hyperparameters"
UNSTABLE: Mapping[tuple[int, Any], Rates] = {(8, relumax(2)): LOW}  # the footnote of that table
WARMUP, STEPS, BATCH, TOGETHER = 2000, 80_000, 512, 32  # TOGETHER: windows in a micro-batch


def choose_rates(model: ModelConfig) -> Rates:
    """Those of the paper's table; a depth that is not there takes the next larger one's, or the largest's.

    The paper has no transformer: ours takes the lower rates at every depth.
    """
    depth = min((layers for layers in RATES if layers >= model.layers), default=max(RATES))
    if model.architecture == "transformer":
        return LOW
    return UNSTABLE.get((depth, parse(model.kernel)), RATES[depth])


def choose_warmup(steps: int) -> int:
    """The paper's 2,000 steps, or a tenth of all where that is less."""
    return min(WARMUP, steps // 10)


def paper(corpus: Corpus, model: Model = "mosaic", kernel: str = "gaussian", layers: int = 8, length: int = 512) -> RunConfig:
    """The published recipe: 80,000 steps of 512 windows, in micro-batches of 32, judged by the last weights. Days on a GPU."""
    return _configure(
        Data.describe(corpus, length), _describe_model(corpus, model, kernel, layers, length), STEPS, BATCH,
        accumulation=BATCH // TOGETHER, log_every=100, checkpoint_every=2000, validate_every=1000, keep="last",
    )  # fmt: skip


def gpu_short(
    corpus: Corpus, model: Model = "mosaic", kernel: str = "gaussian", layers: int = 8, length: int = 512
) -> RunConfig:
    """The published model for 2,000 steps of 32 windows: minutes on a GPU, and 0.16 % of the published tokens."""
    return _configure(
        Data.describe(corpus, length), _describe_model(corpus, model, kernel, layers, length), 2000, TOGETHER,
        graph=True, log_every=20, checkpoint_every=2000, validate_every=100,
    )  # fmt: skip


def cpu_quick(
    corpus: Corpus, model: Model = "mosaic", kernel: str = "gaussian", layers: int = 2, length: int = 128
) -> RunConfig:
    """A narrow model on short windows: about two minutes on two CPU cores, where tokens are bytes.

    A mosaic has GPT-2's output layer too: with its own, so few steps end at a much higher loss, and its stories are no words.
    """
    output = {"output": "plain"} if own_output(model) == "scaled" else {}
    size = _describe_model(corpus, model, kernel, layers, length, width=128, heads=4, slots=64, **drop(0.0, model), **output)
    return _configure(
        Data.describe(corpus, length, validation_windows=64), size, 1000, 16, rates=Rates(5e-3, 5e-4),
        precision="fp32", compile="none", log_every=10, checkpoint_every=250, validate_every=100,
    )  # fmt: skip


def adjust(
    config: RunConfig, *, seed: int | None = None, model: Mapping[str, Any] = {}, training: Mapping[str, Any] = {}
) -> RunConfig:
    """The config with other fields, and with the warm-up and the micro-batches that fit them; only one of these has a graph."""
    steps, batch = (training.get(name, getattr(config.training, name)) for name in ("steps", "batch"))
    parts = training.get("accumulation", share(batch))
    usual = {"warmup": choose_warmup(steps), "accumulation": parts, "graph": config.training.graph and parts == 1}
    return vary(config, seed=seed, model=model, training={**usual, **training})


def hasten_embedding(config: RunConfig) -> RunConfig:
    """The config with √width times the rate for the tied embedding: one step of Adam then moves a logit as far as in GPT-2."""
    if not config.model.scales_output:
        raise ValueError(
            "a fast embedding makes up for logits that are divided by √width, and these are not; add --output scaled"
        )
    return vary(config, training={"embedding_rate": config.model.width**0.5})


def share(batch: int) -> int:
    """The fewest equal micro-batches of a process's share that hold at most 32 windows each."""
    own = batch // int(os.environ.get("WORLD_SIZE", "1"))  # training refuses a batch that does not divide
    return next((parts for parts in range(1, own) if own % parts == 0 and own // parts <= TOGETHER), max(own, 1))


PRESETS: dict[str, Callable[..., RunConfig]] = {"cpu-quick": cpu_quick, "gpu-short": gpu_short, "paper": paper}


def _describe_model(corpus: Corpus, model: Model, kernel: str, layers: int, longest: int, **changes: Any) -> ModelConfig:
    """A size of the paper: width 768, 12 heads, 2,688 slots; a transformer of that depth and width learns its positions."""
    learned = {"positions": "learned", "longest": longest} if model == "transformer" else {}
    given = {**drop(0.05, model), **changes, **learned}
    return ZOO["stories-1"].configure(vocab=corpus.vocab, architecture=model, kernel=kernel, layers=layers, **given)


def drop(rate: float, model: str = "mosaic") -> dict[str, float]:
    """One rate of dropout for weights of attention, weights of persistent memory and what each block adds, as published."""
    persistent = {"persistent_dropout": rate} if model == "mosaic" else {}
    return {"dropout": rate, "attention_dropout": rate, **persistent}


def _configure(
    data: Data, model: ModelConfig, steps: int, batch: int, *, rates: Rates | None = None, **settings: Any
) -> RunConfig:
    """AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, a warm-up and a cosine."""
    rate, final = rates or choose_rates(model)
    given = {"precision": "bf16", "compile": "parts", **settings}
    training = TrainingConfig(
        steps=steps, batch=batch, rate=rate, final_rate=final, warmup=choose_warmup(steps), decay=0.1, betas=(0.9, 0.95),
        clip=1.0, **given,
    )  # fmt: skip
    return RunConfig(NAME, 0, model, training, asdict(data))


# -- from a config to a model --------------------------------------------------------------------


def run(
    config: RunConfig, folder: Path, *, resume: bool = False, show_progress: bool = True, tensorboard: bool = False
) -> Summary:
    """Trains the model of a config on random windows; window i of a run is a pure function of its seed and i."""
    data = Data.of(config)
    corpus = data.open()
    corpus.verify()  # an id out of range would stop a GPU without a word
    data.load_tokenizer()  # without it nothing could be evaluated or told after hours of training
    held_out = data.cut_validation(corpus)

    def validate(model: nn.Module) -> dict[str, float]:
        return {"loss": evaluate_positions(model, [held_out]).loss}

    return train(
        config, build(config.model, config.seed), corpus.windows(data.length, config.seed), folder,
        resume=resume, validate=validate, show_progress=show_progress, tensorboard=tensorboard,
    )  # fmt: skip


def example(config: RunConfig) -> tuple[list[int], list[str]]:
    """The first tokens of the validation split, and the words to show for them."""
    data = Data.of(config)
    tokens = data.open().validation[: min(EXAMPLE, data.length)].tolist()
    return tokens, name_tokens(data.load_tokenizer(), tokens)


def read(config: RunConfig, text: str) -> tuple[list[int], list[str]]:
    """The tokens of a text, and what each of them spells."""
    tokenizer = Data.of(config).load_tokenizer()
    tokens = tokenizer.encode(text)
    if not tokens:
        raise ValueError("an empty text has no tokens; give some words")
    return tokens, name_tokens(tokenizer, tokens)


def window(config: RunConfig) -> int:
    """Tokens of a window, which are all that training shows at a time."""
    return Data.of(config).length


def name_tokens(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.decode([token]) for token in tokens]


# -- evaluation ----------------------------------------------------------------------------------


class Text(NamedTuple):
    """What a model is judged on: documents one after another, each ended by the end token."""

    name: str
    tokens: Array  # (tokens,) uint16
    checksum: str  # of all of it


def open_text(data: Data, where: str = "", name: str = "") -> Text:
    """The validation split of the run's own corpus, all documents of another one, or those of a text file.

    `where` is a folder, a file, or the name of a folder in data/ or beside the run's corpus; `name` stands for its own. A
    ValueError says where it holds what the run was trained on, or is not as it was prepared.
    """
    path = _find(data, where) if where else Path(data.folder)
    corpus = data.open() if not where else Corpus.open(path) if path.is_dir() else None
    if corpus is not None:
        data.require_tokenizer(corpus)
        if data.is_of(corpus):
            corpus.verify([OWN])  # the row goes by the checksum of meta.json
            return Text(name or OWN, corpus.validation, corpus.meta["splits"]["validation"]["sha256"])
    if name == OWN:
        raise ValueError(f"{OWN!r} stands for what was held out of the run's own corpus; give {str(path)!r} another name")
    tokens, checksum = _read_file(data, path) if corpus is None else _read_corpus(data, path, corpus)
    if not len(tokens):
        raise ValueError(f"there is no document in {str(path)!r}; give a text with words in it")
    own = name_corpus(path.resolve()) if path.is_file() else path.resolve().name
    return Text(name or (f"other {OWN}" if own == OWN else own), tokens, checksum)


def _read_corpus(data: Data, path: Path, corpus: Corpus) -> tuple[Array, str]:
    """Both splits one after the other, and a checksum made of theirs: of one split alone it is that split's."""
    streams = {"train": corpus.train, "validation": corpus.validation}
    full = {split: stream for split, stream in streams.items() if len(stream)}
    corpus.verify([*full])
    checksums = [corpus.meta["splits"][split]["sha256"] for split in full]
    tokens = next(iter(full.values())) if len(full) == 1 else np.concatenate([np.empty(0, "<u2"), *full.values()])
    data.require_unseen(path, tokens, corpus.meta["sources"])
    return tokens, checksums[0] if len(full) == 1 else hashlib.sha256("".join(checksums).encode()).hexdigest()


def _read_file(data: Data, path: Path) -> tuple[Array, str]:
    (source,), tokenizer = open_sources([path]), data.load_tokenizer()
    blocks = [encode_block(source, block, tokenizer).tokens for block in source.blocks()]
    tokens = np.concatenate([np.empty(0, "<u2"), *blocks])
    data.require_unseen(path, tokens, [source.describe()])
    return tokens, hashlib.sha256(tokens.tobytes()).hexdigest()


def _find(data: Data, where: str) -> Path:
    places = [Path(where), Path("data") / where, Path(data.folder).parent / where]
    for place in places:
        if place.exists():
            return place
    file = where if Path(where).suffix else f"{where}.txt"
    raise ValueError(
        f"{where!r} is neither a prepared corpus nor a text file, here, in data/ or beside the corpus of the run; prepare it,"
        f" as in: compactattn data text {shlex.quote(file)} --tokenizer {data.tokenizer}"
        f" --out {shlex.quote(f'data/{name_corpus(Path(file))}')}"
    )


def read_texts(asked: str, data: Data) -> dict[str, str]:
    """Where each text of "simplewiki=data/simplewiki,book.txt" lies, by its name; all are read before hours are spent.

    A ValueError names the text that cannot serve, or that is the run's own corpus or has no name of its own.
    """
    texts: dict[str, str] = {}
    for one in split_names(asked):
        first, named, rest = one.partition("=")
        where = rest if named else first
        with naming(one):
            text = open_text(data, where)
            spread_windows(text.tokens, data.length, 1)
        name = first if named else text.name
        if OWN in (name, text.name) or not name or name in texts:
            why = "is the corpus of the runs themselves" if text.name == OWN else f"would go by the name {name!r}"
            raise ValueError(f"{one} {why}; each other text needs a name of its own, as in simplewiki=data/simplewiki")
        texts[name] = where
    return texts


def evaluate_run(
    folder: Path,
    text: Text | str = "",
    samples: int = 1000,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The loss of a run on at most `samples` windows of a text, by position: the line that evaluation.jsonl keeps of it.

    A text that is not open yet is given by where it lies, as for `open_text`. The weights are those of the lowest validation
    loss, or the last ones (`training.keep`). `progress` is called with the windows done and those in all.
    """
    trained = open_run(folder, device)
    try:
        data = Data.of(trained.config)
        text = open_text(data, text) if isinstance(text, str) else text
        tokenizer = data.load_tokenizer()
        with naming(text.name):
            windows = spread_windows(text.tokens, data.length, samples)
            check_ids([int(windows.inputs.max())], tokenizer.vocab)
            text_bytes = count_bytes(tokenizer, windows.targets.numpy())
    except ValueError as error:
        raise RunError(str(error)) from error
    tell = None if progress is None else lambda done, _: progress(done, len(windows.inputs))
    with trained.evaluating():
        found = evaluate_positions(trained.model, [windows], progress=tell)
    row = found.to_row(
        task=NAME, split=text.name, bits_per_byte=found.bits_per_byte(text_bytes), text_bytes=text_bytes,
        text_checksum=text.checksum, tokenizer=tokenizer.name, checksum=_hash(windows),
        seed=trained.config.seed, step=trained.step, precision=trained.precision,
    )  # fmt: skip
    write_evaluation(folder, [row])
    return row


def count_bytes(tokenizer: Tokenizer, tokens: Array) -> int:
    """Bytes of UTF-8 that the tokens spell; the end of a document spells none."""
    ids, counts = np.unique(tokens, return_counts=True)
    sizes = [0 if i == tokenizer.end else len(tokenizer.to_bytes([i])) for i in ids.tolist()]
    return int(np.dot(counts, sizes))


def _hash(windows: Batch) -> str:
    tokens = np.concatenate([windows.inputs.numpy(), windows.targets.numpy()[:, -1:]], 1)
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()


def complete_evaluation(
    config: RunConfig, folder: Path, samples: int, device: str = "auto", texts: Mapping[str, str] = {}
) -> None:
    """Evaluates a trained run on its validation split, and on other texts by name, but for those of which it has been judged on
    as many windows."""
    data, step = Data.of(config), step_of(find_best(folder))
    done = {row.get("split"): row for row in read_evaluation(folder) if row["step"] == step}
    for name, where in {OWN: "", **texts}.items():
        text, row = open_text(data, where, name), done.get(name)
        windows = spread_windows(text.tokens, data.length, samples)
        if row is None or row.get("text_checksum") != text.checksum or row["samples"] < len(windows.inputs):
            evaluate_run(folder, text, samples, device)
