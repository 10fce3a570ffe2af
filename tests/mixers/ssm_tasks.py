"""Tasks that a state space model is known to solve, and the smallest model around one mixer that could."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SYMBOLS, DELAY, NOTHING = 4, 3, -100


def delayed_copy(batch):
    """a b c d … → what came DELAY positions ago: a linear memory of the past is enough."""
    tokens = torch.randint(0, SYMBOLS, (batch, 24))
    targets = tokens.roll(DELAY, 1)
    targets[:, :DELAY] = NOTHING
    return tokens, targets


def recall(batch):
    """k₂ v k₀ v k₃ v k₁ v k₃ → the value of k₃: a value must be stored under the key that stands before it."""
    keys = torch.rand(batch, SYMBOLS).argsort(1)
    values = torch.randint(0, SYMBOLS, (batch, SYMBOLS))
    asked = torch.randint(0, SYMBOLS, (batch, 1))
    tokens = torch.cat((torch.stack((keys, values + SYMBOLS), 2).flatten(1), keys.gather(1, asked)), 1)
    targets = torch.full_like(tokens, NOTHING)
    targets[:, -1:] = values.gather(1, asked)
    return tokens, targets


def latest_marked(batch):
    """A C D a C b d a c … → c from there to the end: a capital must overwrite the state, what follows must not touch it."""
    letters, marked = torch.randint(0, SYMBOLS, (batch, 48)), torch.rand(batch, 48) < 0.5
    marked[:, 0], marked[:, 12:] = True, False
    latest = torch.where(marked, torch.arange(48), 0).cummax(1).values
    targets = letters.gather(1, latest)
    targets[:, :12] = NOTHING
    return letters + SYMBOLS * marked, targets


class Reader(nn.Module):
    """Embedding, mixer, output layer: all that is learned along time is in the mixer."""

    def __init__(self, mixer, width):
        super().__init__()
        self.embedding, self.mixer, self.head = nn.Embedding(2 * SYMBOLS, width), mixer, nn.Linear(width, SYMBOLS)

    def forward(self, tokens):
        return self.head(self.mixer(self.embedding(tokens)))


def accuracy_after(task, mixer, width, steps, rate=1e-2):
    """Share of right answers on new samples, after training on `steps` batches."""
    model = Reader(mixer, width)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        tokens, targets = task(32)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=NOTHING)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        tokens, targets = task(256)
        right = model(tokens).argmax(-1) == targets
    return right[targets != NOTHING].float().mean().item()
