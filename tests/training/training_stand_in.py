"""A small model and an endless stream for the tests of the loop, and the run they make together."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compactattn.data.batches import Batch
from compactattn.models.config import ModelConfig
from compactattn.training.config import RunConfig, TrainingConfig
from compactattn.training.loop import train

VOCAB, LENGTH = 11, 7


class Tiny(nn.Module):
    """Predicts a token from the one before it and from the mean of the past; dropout makes it depend on the generators."""

    def __init__(self, dropout: float = 0.1, width: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.to(dtype)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x + past)))
        return self.norm(x)

    def loss(self, inputs, targets, counted):
        logits = self.hidden(inputs) @ self.embedding.weight.T
        each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return (each * counted).sum(), counted.sum()


class Numbers:
    """Sample i counts up from i in steps of i + 1; how many positions count differs from sample to sample."""

    vocab = VOCAB

    def batch(self, first, count):
        i = torch.arange(first, first + count)[:, None]
        tokens = (i + (i % 5 + 1) * torch.arange(LENGTH + 1)) % VOCAB
        counted = torch.arange(LENGTH) >= i % LENGTH
        return Batch(tokens[:, :-1], tokens[:, 1:], counted, counted)


class Failing(Numbers):
    """Breaks when a sample beyond `last` is drawn, as a machine might."""

    def __init__(self, last):
        self.last = last

    def batch(self, first, count):
        if first + count > self.last:
            raise RuntimeError("the machine broke")
        return super().batch(first, count)


def config(**changes) -> RunConfig:
    training = TrainingConfig(
        steps=12, batch=8, warmup=2, rate=1e-2, final_rate=1e-3, log_every=2, checkpoint_every=3, device="cpu"
    )
    run = RunConfig("stand-in", seed=3, model=ModelConfig(vocab=VOCAB, layers=1, width=8, heads=1), training=training)
    return replace(run, training=replace(training, **changes))


def run(folder, model=None, stream=None, resume=False, validate=None, **changes):
    model = Tiny() if model is None else model
    return train(config(**changes), model, stream or Numbers(), folder, resume=resume, validate=validate, show_progress=False)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def result(folder):
    return (folder / "checkpoint.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
