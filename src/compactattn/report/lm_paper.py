"""What the paper says on language modelling, as data: its rows, its recipe, and its claims, one sentence each.

It reports curves and no table, so that there are no numbers to stand beside ours, only an order to be held against.
"""

from __future__ import annotations

from dataclasses import dataclass

from compactattn.experiments.language_modelling import BATCH, STEPS
from compactattn.kernels import Nearest, parse
from compactattn.report.paper import Variant

CORPORA = {"stories": "stories (BabiStories substitute)", "babistories": "BabiStories"}
SPLITS = {"validation": "validation", "simplewiki": "Simple English Wikipedia", "tinystories": "TinyStories"}  # as columns
HOME, AWAY = "validation", "simplewiki"  # the paper's two splits

LENGTH, WIDTH, HEADS, SLOTS = 512, 768, 12, 2_688
DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
DROPOUTS = (0.05, 0.05, 0.05)  # of outputs, contextual and persistent weights: Memory Mosaics' recipe, which it follows
NEIGHBOURS, CHOSEN = (16, 32, 64), 32  # k at one layer, and the best of them there, which deeper models take
TOKENS = STEPS * BATCH * LENGTH
# Not from its figures: what was published for the same model and data elsewhere.
PUBLISHED = {12: "Published for 12 layers with softmax on BabiStories: a validation loss of about 1.50 after 80,000 steps."}


def _mosaic(*kernels: str) -> tuple[Variant, ...]:
    return tuple(Variant("mosaic", parse(kernel)) for kernel in kernels)


GAUSSIAN = _mosaic("gaussian")
TOP_SOFTMAX = _mosaic(*(f"topk_softmax({k})" for k in NEIGHBOURS))
TOP_UNIFORM = _mosaic(*(f"topk_uniform({k})" for k in NEIGHBOURS))
NORM_RELU = _mosaic("norm_relu")
ADAPTIVE = _mosaic("epanechnikov", "biweight", "triweight")
ANCHORED = _mosaic("relumax(r=1)", "relumax(r=2)", "relumax(r=3)")
TRANSFORMER = Variant("transformer", parse("gaussian"), "learned")


def count_neighbours(variant: Variant) -> int | None:
    """The k of a variant that attends to the k nearest keys; None for the others."""
    rule = None if variant.kernel is None else variant.kernel.rule
    return rule.k if isinstance(rule, Nearest) else None


def _read(text: str) -> dict[Variant, str]:
    """Names by variant, from lines of name | kernel, in their order."""
    pairs = (line.split(" | ") for line in text.splitlines())
    return {_mosaic(kernel)[0]: name for name, kernel in pairs}


# In the order of the paper's tables; the transformer, which stands beside them here, comes last.
ROWS: dict[Variant, str] = _read(
    """\
Gaussian | gaussian
Gaussian kNN, k=16 | topk_softmax(16)
Gaussian kNN, k=32 | topk_softmax(32)
Gaussian kNN, k=64 | topk_softmax(64)
Uniform kNN, k=16 | topk_uniform(16)
Uniform kNN, k=32 | topk_uniform(32)
Uniform kNN, k=64 | topk_uniform(64)
Epanechnikov (normReLU) | norm_relu
Epanechnikov (1-ReLUmax) | relumax
Epanechnikov (sparsemax) | sparsemax
Biweight (2-ReLUmax) | relumax(r=2)
Biweight (1.5-entmax) | biweight
Triweight (3-ReLUmax) | relumax(r=3)
Triweight (4/3-entmax) | triweight"""
) | {TRANSFORMER: "Transformer"}
DRAWN = tuple(v for v in ROWS if v != TRANSFORMER and count_neighbours(v) in (None, CHOSEN))  # in its figures


INTERMEDIATE = (8,)  # depths that this is about
INSTABILITY = (
    "top-k Gaussian attention can reach competitive validation loss at intermediate depths, but exhibits mild instability"
)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and what it says of losses: those of `lower` are below those of `higher`, or, where there is
    no `higher`, all about the same."""

    text: str
    lower: tuple[Variant, ...]
    higher: tuple[Variant, ...] = ()
    layers: tuple[int, ...] = ()  # the depths it is about; all where none is named
    split: str = HOME
    within: int = 0  # only the first positions of a window; 0 stands for all
    beside: tuple[Variant, ...] = ()  # of whom it says nothing; told where they are lower than all that it names


CLAIMS = (
    Claim(
        "with one layer, compact kernels of adaptive bandwidth have a lower validation loss than Gaussian attention and top-k",
        ADAPTIVE, GAUSSIAN + TOP_SOFTMAX + TOP_UNIFORM, (1,),
    ),
    Claim(
        "with 8 layers, rectified polynomial kernels of adaptive bandwidth stay ahead of Gaussian attention and top-k",
        ADAPTIVE, GAUSSIAN + TOP_SOFTMAX + TOP_UNIFORM, (8,),
    ),
    Claim(
        "with 12 layers, all but normReLU and uniform kNN reach roughly the same validation loss",
        GAUSSIAN + TOP_SOFTMAX + ADAPTIVE + ANCHORED, (), (12,),
    ),
    Claim("sparsemax and entmax are consistently better than normReLU", ADAPTIVE, NORM_RELU),
    Claim("r-ReLUmax is better than normReLU with 8 and 12 layers", ANCHORED, NORM_RELU, (8, 12)),
    Claim("r-ReLUmax is slightly behind adaptive normalisation with 8 and 12 layers", ADAPTIVE, ANCHORED, (8, 12)),
    Claim(
        "on Simple English Wikipedia, Epanechnikov, biweight and triweight kernels are comparable to Gaussian attention",
        NORM_RELU + ADAPTIVE + ANCHORED + GAUSSIAN, split=AWAY,
    ),
    Claim(
        "on Simple English Wikipedia, ReLUmax is the best overall of the compact kernels",
        ANCHORED, NORM_RELU + ADAPTIVE, split=AWAY,
    ),
    Claim(
        "on Simple English Wikipedia, biweight and triweight kernels start from slightly lower losses than Gaussian attention",
        ADAPTIVE[1:] + ANCHORED[1:], GAUSSIAN, split=AWAY, within=32, beside=NORM_RELU + ADAPTIVE[:1] + ANCHORED[:1],
    ),
)  # fmt: skip
