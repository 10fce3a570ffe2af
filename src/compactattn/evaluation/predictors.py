"""Predictors for RegBench without anything learned: points of reference for a model's score.

Each gives probabilities (B, T, V) of the next token at every position of examples first … first + count − 1. They read the
tokens up to there and no further; `predict_exactly` and `filter_states` also know the automaton.

Shapes: B batch, T positions, V vocabulary, A letters, S states.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from compactattn.data.draws import Array
from compactattn.data.regbench import Examples
from compactattn.evaluation.regbench import Predictor


def predict_exactly(examples: Examples, first: int, count: int) -> Array:
    """The automaton's own distribution: uniform over the legal letters. Accuracy 1, TVD 0, and the lowest loss there is."""
    may = (examples.legal(first, count)[:, :, None] >> np.arange(examples.vocab, dtype=np.uint32)) & 1
    return may / np.maximum(may.sum(2, keepdims=True), 1)


def predict_uniformly(examples: Examples, first: int, count: int) -> Array:
    """1 / V for every token. TVD is 1 − (legal letters) / V, and the arg-max is letter 0."""
    return np.full((count, examples.width, examples.vocab), 1 / examples.vocab)


def predict_ngrams(examples: Examples, first: int, count: int, order: int) -> Array:
    """What followed the last order − 1 letters so far in the same example, with back-off.

    p_n(a | c) = (#(c a) + p_{n−1}(a | c')) / (#(c) + 1), where c' drops the oldest letter of c and p_0 = 1 / A: one count is
    left to the shorter context. A separator ends all contexts, so that at the start of a string p is about first letters. It
    is never predicted itself. The benchmark's own n-grams give the share of the shorter context to unseen letters only.
    """
    if order < 1:
        raise ValueError(f"order = {order} must be at least 1")
    batch, alphabet = examples.batch(first, count), examples.languages.separator
    inputs, targets, counted = (part.numpy() for part in (batch.inputs, batch.targets, batch.counted))
    every = np.arange(count)
    # a context is the number whose digits in base A + 1 are its tokens; nothing before a string's start: the separator
    seen = [np.zeros((count, (alphabet + 1) ** size, alphabet)) for size in range(order)]
    contexts = [np.full(count, (alphabet + 1) ** size - 1) for size in range(order)]
    for counts, context in zip(seen, contexts, strict=True):
        counts[every, context, inputs[:, 0]] += 1  # the first letter follows nothing
    found = np.zeros((*inputs.shape, examples.vocab))
    for time in range(inputs.shape[1]):
        token = np.minimum(inputs[:, time], alphabet)  # padding is past the end, and not counted
        estimate = np.full((count, alphabet), 1 / alphabet)
        for size, counts in enumerate(seen):
            longer = (contexts[size] * (alphabet + 1) + token) % (alphabet + 1) ** size
            contexts[size] = np.where(token == alphabet, (alphabet + 1) ** size - 1, longer)
            here = counts[every, contexts[size]]
            estimate = (here + estimate) / (here.sum(1, keepdims=True) + 1)
        found[:, time, :alphabet] = estimate
        rows = np.flatnonzero(counted[:, time])
        for counts, context in zip(seen, contexts, strict=True):
            counts[rows, context[rows], targets[rows, time]] += 1
    return found


def filter_states(examples: Examples, first: int, count: int) -> Array:
    """Bayes' rule over the states of the known automaton, with every state equally likely at the start of each string.

    p(a) = Σ_s belief(s) · emits(s, a) with emits(s, a) = [a legal in s] / degree(s), and after a letter a
    belief'(s') ∝ Σ_s belief(s) · emits(s, a) · [a leads from s to s'].
    What it loses against the oracle is the price of not knowing where a string starts.
    """
    alphabet, automata = examples.languages.separator, examples.automata[first : first + count]
    inputs = examples.batch(first, count).inputs.numpy()
    table = automata.tables(alphabet).astype(np.int64)  # (B, S, A)
    emits = (table >= 0) / np.maximum(automata.degrees, 1)[:, :, None]
    start = (automata.degrees > 0) / automata.sizes[:, None]  # (B, S)
    every, belief = np.arange(count), start
    found = np.zeros((*inputs.shape, examples.vocab))
    for time in range(inputs.shape[1]):
        letter = np.minimum(inputs[:, time], alphabet - 1)
        target, weight = table[every, :, letter], belief * emits[every, :, letter]
        moved = np.zeros_like(belief)
        for state in range(belief.shape[1]):
            moved[every, np.maximum(target[:, state], 0)] += weight[:, state]
        mass = moved.sum(1, keepdims=True)
        read = (inputs[:, time] < alphabet)[:, None] & (mass > 0)  # else a new string, or padding
        belief = np.where(read, moved / np.where(mass > 0, mass, 1), start)
        found[:, time, :alphabet] = np.einsum("bs,bsa->ba", belief, emits)
    return found


PREDICTORS: dict[str, Predictor] = {
    "oracle": predict_exactly,
    "uniform": predict_uniformly,
    "2-gram": partial(predict_ngrams, order=2),
    "3-gram": partial(predict_ngrams, order=3),
    "state filter": filter_states,
}
