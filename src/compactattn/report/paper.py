"""What the paper compares, and what it reports on length generalisation, as data: its three tables and its recipe.

A cell is "mean/maximum" over three seeds, in hundredths, of the share of samples answered exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from compactattn.kernels import Anchored, Fixed, Kernel, Nearest, encode, parse
from compactattn.models.config import RECURRENT, own_output

LONGEST = 64  # of the training sources; a test at 4× has sources of 256
SEEDS = 3
SAMPLES = 1000
WARMUP = 40_000
LENGTHS = {  # of the tests, in the order of the columns
    "mqmtar": tuple(LONGEST * factor for factor in (1, 2, 4, 8, 16, 32, 64)),
    "reverse": (LONGEST, LONGEST * 3 // 2),
    "sort": (LONGEST, LONGEST * 2, LONGEST * 4),
}
TITLES = {"mqmtar": "MQMTAR", "reverse": "Reverse", "sort": "Sort", "copy": "Copy"}


class Recipe(NamedTuple):
    """The published setting of a task (Table "Hyperparameters used for MQMTAR recall, reverse, and sorting tasks")."""

    examples: int
    layers: int
    batch: int = 256
    width: int = 512
    heads: int = 8
    rate: float = 1e-3
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    slots: int = 2_688
    dropouts: tuple[float, float, float] = (0.05, 0.0, 0.05)  # of outputs, contextual and persistent weights

    @property
    def steps(self) -> int:
        return self.examples // self.batch


RECIPES = {"mqmtar": Recipe(50_000_000, 4), "reverse": Recipe(30_000_000, 4), "sort": Recipe(40_000_000, 2)}


_ARCHITECTURES = {  # the names they go by; a mosaic goes by its kernel's
    "transformer": "Transformer",
    "retnet": "RetNet",
    "h3": "H3",
    "gla": "GLA",
    "s4d": "S4D",
    "mamba": "Mamba",
}
_ATTENTIVE = ("mosaic", "transformer")


@dataclass(frozen=True)
class Variant:
    """What is compared: an architecture with a kernel and positions. Two texts of one kernel are the same variant.

    A recurrent architecture attends to nothing: it has no kernel.
    """

    architecture: str
    kernel: Kernel | None
    positions: str = "none"
    as_released: str = ""
    output: str = ""  # where it is not the architecture's own
    form: str = ""  # "own" for a recurrent model that is ours and not the benchmark's
    beta_squared: float = 0.0  # at the start, where it is not the published e²

    @staticmethod
    def of(model: Mapping[str, Any]) -> Variant:
        """The variant of a model's settings, as config.json holds them."""
        architecture = model["architecture"]
        kernel = parse(model["kernel"]) if architecture in _ATTENTIVE else None
        output = model.get("output", "")
        other = "" if output == own_output(architecture) else output
        same = {name: model[name] for name in ("positions", "as_released", "beta_squared") if name in model}
        form = "own" if architecture in RECURRENT and model.get("form", "own") == "own" else ""
        return Variant(architecture, kernel, output=other, form=form, **same)

    @property
    def compact(self) -> bool:
        """Whether it attends with a kernel that can give exact zeros."""
        return self.kernel is not None and self.kernel.compact

    @property
    def label(self) -> str:
        """A short name for a line or a row: "sparsemax", "2-ReLUmax", "RetNet", "Transformer, ALiBi"."""
        name = "" if self.kernel is None else name_kernel(self.kernel)
        parts = [name] if self.architecture == "mosaic" else [_ARCHITECTURES.get(self.architecture, self.architecture)]
        if self.architecture != "mosaic" and name not in ("", "Gaussian"):
            parts.append(name)
        usual = "learned" if self.architecture == "transformer" else "none"  # GPT-2 learns its positions
        if self.positions != usual:
            parts.append({"alibi": "ALiBi", "none": "no positions"}.get(self.positions, f"{self.positions} positions"))
        way = f", {self.as_released} path" if self.as_released else ""
        parts += ["own form"] if self.form else []
        way += f", {self.output} output" if self.output else ""
        return ", ".join(parts) + way + (f", β² from {self.beta_squared:g}" if self.beta_squared else "")

    @property
    def usual(self) -> bool:
        """Whether nothing about it is changed from how the paper, or GPT-2, has it."""
        return not (self.as_released or self.output or self.form or self.beta_squared)


_NAMES = {
    "gaussian": "Gaussian",
    "epanechnikov": "sparsemax",
    "biweight": "1.5-entmax",
    "triweight": "4/3-entmax",
    "norm_relu": "normReLU",
}


def name_kernel(kernel: Kernel | str) -> str:
    """What the paper calls a kernel, or its text where the paper has no name for it."""
    kernel = parse(kernel) if isinstance(kernel, str) else kernel
    r, _, value = encode(kernel)
    if kernel.rule == Anchored(1.0) and 1 <= r < float("inf"):
        return f"{r:g}-ReLUmax"
    if isinstance(kernel.rule, Nearest) and r in (0, float("inf")):
        return f"{'uniform' if r == 0 else 'Gaussian'} kNN, k={value:g}"
    if kernel.rule == Fixed() and r > 1:
        return f"normReLU^{r:g}"
    return _NAMES.get(str(kernel), str(kernel))


class Cell(NamedTuple):
    """A share of samples answered exactly: the mean and the maximum over seeds."""

    mean: float
    maximum: float


@dataclass(frozen=True)
class Row:
    """A row of a table: its name in the paper, the variant that makes it here, and its cells by task and length."""

    name: str
    variant: Variant
    cells: Mapping[tuple[str, int], Cell]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    label: str
    caption: str
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]


def _read(text: str, tasks: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows from lines of name | kernel [positions [architecture]] | the cells of a task | …"""
    rows = []
    for line in text.splitlines():
        name, variant, *columns = (part.strip() for part in line.split("|"))
        kernel, positions, architecture = (*variant.split(), *("none", "mosaic")[len(variant.split()) - 1 :])
        cells = {}
        for task, column in zip(tasks, columns, strict=True):
            for length, cell in zip(LENGTHS[task], column.split(), strict=True):
                mean, maximum = cell.split("/")
                cells[task, length] = Cell(int(mean) / 100, int(maximum) / 100)
        rows.append(Row(name, Variant(architecture, parse(kernel), positions), cells))
    return tuple(rows)


MAIN = PaperTable(
    "tab:LG_results",
    "Exact match accuracy on representative synthetic tasks",
    tuple(LENGTHS),
    _read(
        """\
Transformer | gaussian alibi transformer | 100/100 100/100 99/99 9/15 1/1 0/0 0/0 | 100/100 52/62 | 100/100 0/0 0/0
Gaussian | gaussian | 99/100 96/100 93/99 85/97 64/81 14/20 0/0 | 100/100 14/38 | 100/100 6/17 0/0
Gaussian kNN, k=32 | topk_softmax(32) | 99/100 97/100 93/99 84/96 68/85 27/36 5/5 | 99/100 0/0 | 100/100 80/91 1/2
Uniform kNN, k=32 | topk_uniform(32) | 4/8 0/0 0/0 0/0 0/0 0/0 0/0 | 42/66 0/0 | 100/100 0/0 0/0
Epanechnikov (normReLU) | norm_relu | 100/100 100/100 89/100 66/100 44/100 33/98 31/94 | 100/100 19/56 | 100/100 5/14 0/0
Epanechnikov (1-ReLUmax) | relumax | 100/100 100/100 99/100 92/96 74/87 42/59 12/18 | 100/100 23/68 | 100/100 80/100 30/91
Epanechnikov (sparsemax) | sparsemax | 100/100 100/100 100/100 98/100 86/98 63/84 31/51 | 100/100 3/6 | 100/100 92/100 29/79
Biweight (2-ReLUmax) | relumax(r=2) | 99/100 97/100 93/100 85/96 69/87 27/43 4/6 | 100/100 26/74 | 100/100 93/100 34/74
Biweight (1.5-entmax) | biweight | 100/100 100/100 99/100 95/99 75/93 51/74 23/42 | 100/100 5/6 | 100/100 39/100 26/77
Triweight (3-ReLUmax) | relumax(r=3) | 99/100 97/100 93/99 85/96 71/87 37/58 8/18 | 100/100 29/88 | 100/100 95/97 30/62
Triweight (4/3-entmax) | triweight | 100/100 100/100 99/100 97/98 89/95 61/76 25/45 | 100/100 26/70 | 100/100 98/99 7/11""",
        tuple(LENGTHS),
    ),
)
NEIGHBOURS = PaperTable(
    "tab:k_results",
    "Exact match accuracy for other numbers of neighbours k",
    tuple(LENGTHS),
    _read(
        """\
Gaussian kNN, k=16 | topk_softmax(16) | 99/100 97/100 93/99 85/96 65/78 25/36 5/9 | 86/100 0/0 | 100/100 74/89 0/0
Gaussian kNN, k=32 | topk_softmax(32) | 99/100 97/100 93/99 84/96 68/85 27/36 5/5 | 99/100 0/0 | 100/100 80/91 1/2
Uniform kNN, k=16 | topk_uniform(16) | 58/71 1/1 0/0 0/0 0/0 0/0 0/0 | 0/0 0/0 | 100/100 41/63 0/0
Uniform kNN, k=32 | topk_uniform(32) | 4/8 0/0 0/0 0/0 0/0 0/0 0/0 | 42/66 0/0 | 100/100 0/0 0/0""",
        tuple(LENGTHS),
    ),
)
ALIBI = PaperTable(
    "tab:alibi_comparison",
    "Exact match accuracy on MQMTAR with and without ALiBi",
    ("mqmtar",),
    _read(
        """\
Transformer (ALiBi) | gaussian alibi transformer | 100/100 100/100 99/99 9/15 1/1 0/0 0/0
MM, Epanechnikov (ALiBi) | sparsemax alibi | 99/100 96/100 92/100 85/100 72/94 43/71 14/29
MM, Epanechnikov (no ALiBi) | sparsemax | 100/100 100/100 100/100 98/100 86/98 63/84 31/51""",
        ("mqmtar",),
    ),
)
TABLES = (MAIN, NEIGHBOURS, ALIBI)

# Every variant of the paper once, in its order: the rows of the main table, then those of the others.
ROWS: dict[Variant, Row] = {}
for _table in TABLES:
    for _row in _table.rows:
        ROWS.setdefault(_row.variant, _row)
