"""The family: a kernel is a profile and a support rule, nothing else.

Every mechanism of the paper weighs a key by w_i ∝ K(s_i − θ). The *profile* is the shape
K(t) = t₊^r; the *rule* sets the threshold θ from the row of scores. Both are small frozen
objects, so a kernel can be compared, hashed, printed and parsed, and code that works for one
works for all.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Profile:
    """The shape K(t) = t₊^r of a kernel.

    r = 0 is the step, 1 Epanechnikov, 2 biweight, 3 triweight, and r → ∞ the Gaussian (paper §2.1).
    With a learned alpha, one number per head, r is NaN here and 1/(alpha − 1) at every call. Two of them are equal if
    they learn the same tensor.
    """

    r: float
    alpha: Tensor | None = None

    def __post_init__(self) -> None:
        _check_number("r", self.r)
        if self.alpha is not None:
            _check_alpha(self.alpha)
            object.__setattr__(self, "r", math.nan)
        elif not (self.r == 0 or self.r >= 1):
            raise ValueError(
                f"profile order r = {self.r} is outside the family; use r = 0 (step), r ≥ 1, or math.inf (Gaussian)"
            )
        else:
            object.__setattr__(self, "r", float(self.r))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Profile):
            return NotImplemented
        return self.alpha is other.alpha and (self.alpha is not None or self.r == other.r)

    def __hash__(self) -> int:
        return hash(self.r) if self.alpha is None else id(self.alpha)

    def __str__(self) -> str:
        return "learned t₊^r" if self.alpha is not None else _PROFILE_NAMES.get(self.r, f"t₊^{self.r:g}")


def values_are_free(tensor: Tensor) -> bool:
    """Whether looking at a tensor's values costs nothing: no graph to break, no GPU to wait for."""
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu"


def _check_number(name: str, x: float) -> None:
    if isinstance(x, Tensor):
        raise TypeError(f"{name} is a number; only entmax's alpha may be a tensor, got one of shape {tuple(x.shape)}")


_OUTSIDE = "is outside 1 ≤ alpha ≤ 2, where 1 is softmax and 2 sparsemax"


def _check_alpha(alpha: Tensor) -> None:
    if alpha.ndim > 1 or not alpha.is_floating_point():
        raise ValueError(f"a learned alpha has shape () or (heads,), got {alpha.dtype} of shape {tuple(alpha.shape)}")
    if values_are_free(alpha) and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        raise ValueError(f"alpha = {alpha.tolist()} {_OUTSIDE}; parameterise it, e.g. 1 + sigmoid(a)")


_PROFILE_NAMES = {0.0: "step", 1.0: "Epanechnikov", 2.0: "biweight", 3.0: "triweight", math.inf: "Gaussian"}
STEP, EPANECHNIKOV, BIWEIGHT, TRIWEIGHT, GAUSSIAN = (Profile(r) for r in _PROFILE_NAMES)


@dataclass(frozen=True)
class Fixed:
    """θ = (score of a perfect match) − b. With b = ½ the bandwidth is h = 1/√scale (paper Eq. 6)."""

    b: float = 0.5

    def __post_init__(self) -> None:
        _check_margin(self.b)


@dataclass(frozen=True)
class Anchored:
    """θ = max s − b: every key within a margin b of the best one (paper Eqs. 11 and 12)."""

    b: float = 1.0

    def __post_init__(self) -> None:
        _check_margin(self.b)


@dataclass(frozen=True)
class Normalising:
    """θ such that Σ w = 1 with no division: the bandwidth adapts (paper Eqs. 7 to 9)."""


@dataclass(frozen=True)
class Nearest:
    """θ = k-th largest score: at most the k nearest keys (paper Eq. 4). The earlier key wins a tie."""

    k: int

    def __post_init__(self) -> None:
        _check_number("k", self.k)
        if isinstance(self.k, bool) or not (self.k >= 1 and self.k == int(self.k)):
            raise ValueError(f"k = {self.k!r} neighbours: k must be a whole number ≥ 1, for example topk_softmax(32)")
        object.__setattr__(self, "k", int(self.k))


def _check_margin(b: float) -> None:
    _check_number("b", b)
    if not 0 < b < math.inf:
        raise ValueError(f"b = {b!r}: the margin b must be positive and finite, for example relumax(r=1, b=1)")


Rule = Fixed | Anchored | Normalising | Nearest
RULES: dict[str, type[Rule]] = {"fixed": Fixed, "anchored": Anchored, "normalising": Normalising, "nearest": Nearest}


@dataclass(frozen=True, repr=False)
class Kernel:
    """A profile and a support rule. Build one with the named members, or with any two of your own."""

    profile: Profile
    rule: Rule

    def __post_init__(self) -> None:
        if self.learned and not isinstance(self.rule, Normalising):
            raise ValueError(f"only a normalising kernel can learn its order; {self.rule} needs a plain number r")
        if self.profile.r == 0 and isinstance(self.rule, Normalising):
            raise ValueError("the step profile cannot normalise itself: it has no θ with Σ w = 1; use topk_uniform(k)")
        if self.profile.r == math.inf and isinstance(self.rule, Fixed):
            object.__setattr__(self, "rule", Normalising())  # exp has no edge to place: both are softmax

    @property
    def r(self) -> float:
        """The order of the profile; NaN if it is learned."""
        return self.profile.r

    @property
    def learned(self) -> bool:
        return self.profile.alpha is not None

    @property
    def compact(self) -> bool:
        """Whether the kernel has a finite threshold, so that it can give exact zeros."""
        return self.r != math.inf or isinstance(self.rule, Anchored | Nearest)

    def __repr__(self) -> str:
        return f"Kernel({self})"

    def __str__(self) -> str:
        """The text that `parse` turns back into this kernel; a learned one reads "entmax(alpha)"."""
        return _describe(self)


def encode(kernel: Kernel) -> tuple[float, str, float]:
    """(r, rule, its parameter): the kernel as plain numbers, for operator schemas. NaN marks a learned r."""
    rule = kernel.rule
    name = next(name for name, kind in RULES.items() if isinstance(rule, kind))
    value = rule.k if isinstance(rule, Nearest) else 0 if isinstance(rule, Normalising) else rule.b
    return kernel.profile.r, name, float(value)


def decode_rule(name: str, value: float) -> Rule:
    """The rule of a kernel's code."""
    rule = RULES[name]
    return rule(value) if fields(rule) else rule()  # type: ignore[call-arg, arg-type]


# -- the named members ---------------------------------------------------------------------------


def gaussian() -> Kernel:
    """Softmax: w_i = exp(s_i) / Σ exp(s) (paper Eq. 3)."""
    return Kernel(GAUSSIAN, Normalising())


def entmax(alpha: float | Tensor | None = None, *, r: float | None = None) -> Kernel:
    """α-entmax: w_i = [(α−1) s_i − τ]₊^{1/(α−1)} with Σ w = 1, for 1 ≤ α ≤ 2 (paper Eqs. 1 and 9); α = 1 is softmax.

    A tensor alpha, of shape () or (heads,), is learned: its gradient is exact, and at alpha = 1 that of alpha → 1⁺.
    The values are checked in eager mode on a CPU; elsewhere they are clamped to [1, 2].
    The order r = 1/(α−1) may be given in place of alpha.
    """
    if alpha is None or r is not None:
        if r is None or alpha is not None:
            raise TypeError("entmax takes alpha, or r = 1/(alpha − 1), and not both")
        return Kernel(Profile(r), Normalising())
    if isinstance(alpha, Tensor):
        return Kernel(Profile(math.nan, alpha), Normalising())
    if not isinstance(alpha, float | int):
        raise TypeError(f"alpha must be a number or a tensor, got {type(alpha).__name__}")
    if not 1 <= alpha <= 2:
        raise ValueError(f"alpha = {alpha!r} {_OUTSIDE}")
    return Kernel(Profile(math.inf if alpha == 1 else _tidy(1 / (alpha - 1))), Normalising())


def epanechnikov() -> Kernel:
    """Sparsemax: w_i = [s_i − τ]₊ with Σ w = 1 (paper Eq. 8)."""
    return Kernel(EPANECHNIKOV, Normalising())


def biweight() -> Kernel:
    """1.5-entmax: w_i = [s_i/2 − τ]₊² with Σ w = 1 (paper Eq. 9, r = 2)."""
    return Kernel(BIWEIGHT, Normalising())


def triweight() -> Kernel:
    """4/3-entmax: w_i = [s_i/3 − τ]₊³ with Σ w = 1 (paper Eq. 9, r = 3)."""
    return Kernel(TRIWEIGHT, Normalising())


def rectified(r: float = 1.0, b: float = 0.5) -> Kernel:
    """Fixed bandwidth: w_i ∝ [1 − ‖k_i − q‖²/h²]₊^r, h² = 2b/scale; uniform where nothing is in reach. r = 0 is `ball`."""
    return Kernel(Profile(r), Fixed(b))


def norm_relu() -> Kernel:
    """Normalised ReLU: w_i ∝ [2 s_i + 1 − 2·scale]₊; uniform where nothing is in reach (paper Eq. 6)."""
    return rectified(1.0)


def relumax(r: float = 1.0, b: float = 1.0) -> Kernel:
    """r-ReLUmax: w_i ∝ [b + s_i − max s]₊^r (paper Eq. 11), for r ≥ 1; r = 0 is the step, and so `margin`."""
    return Kernel(Profile(r), Anchored(b))


def topk_softmax(k: int) -> Kernel:
    """Gaussian kNN: softmax over the k nearest keys (paper Eqs. 4 and 10)."""
    return Kernel(GAUSSIAN, Nearest(k))


def topk_uniform(k: int) -> Kernel:
    """Uniform kNN: the mean of the k nearest values (paper Eq. 4)."""
    return Kernel(STEP, Nearest(k))


def topk_rectified(k: int, r: float = 1.0) -> Kernel:
    """Compact kNN, new: w_i ∝ [s_i − s_(k)]₊^r; the k-th neighbour is the edge and weighs nothing. r = 0 is `topk_uniform`."""
    return Kernel(Profile(r), Nearest(k))


def ball(b: float = 0.5) -> Kernel:
    """ε-ball average: the mean over ‖k_i − q‖ < h, h² = 2b/scale; uniform where nothing is in reach."""
    return Kernel(STEP, Fixed(b))


def margin(b: float = 1.0) -> Kernel:
    """Margin average, new: the mean over the keys with s_i > max s − b."""
    return Kernel(STEP, Anchored(b))


def truncated_gaussian(b: float = 1.0) -> Kernel:
    """Truncated Gaussian, new: softmax over the keys with s_i > max s − b."""
    return Kernel(GAUSSIAN, Anchored(b))


softmax, sparsemax, entmax15, entmax43 = gaussian, epanechnikov, biweight, triweight


def topk_epanechnikov(k: int) -> Kernel:
    """w_i ∝ [s_i − s_(k)]₊, new: see `topk_rectified`."""
    return topk_rectified(k, 1.0)


def topk_biweight(k: int) -> Kernel:
    """w_i ∝ [s_i − s_(k)]₊², new: see `topk_rectified`."""
    return topk_rectified(k, 2.0)


def topk_triweight(k: int) -> Kernel:
    """w_i ∝ [s_i − s_(k)]₊³, new: see `topk_rectified`."""
    return topk_rectified(k, 3.0)


@dataclass(frozen=True)
class Member:
    """One row of the family: how it is called, what it computes, and what the paper calls it."""

    name: str
    make: Callable[..., Kernel]
    parameters: str
    formula: str
    paper: str
    aliases: tuple[str, ...] = ()


FAMILY: tuple[Member, ...] = (
    Member("gaussian", gaussian, "", "exp(s) / Σ", "Gaussian, softmax (Eq. 3)", ("softmax",)),
    Member("epanechnikov", epanechnikov, "", "[s − τ]₊,  Σ = 1", "sparsemax (Eq. 8)", ("sparsemax",)),
    Member("biweight", biweight, "", "[s/2 − τ]₊²,  Σ = 1", "1.5-entmax (Prop. 1)", ("entmax15",)),
    Member("triweight", triweight, "", "[s/3 − τ]₊³,  Σ = 1", "4/3-entmax (Prop. 1)", ("entmax43",)),
    Member("entmax", entmax, "alpha | r=", "[s/r − τ]₊^r,  Σ = 1,  r = 1/(α−1)", "α-entmax (Eq. 1, Prop. 1)"),
    Member("norm_relu", norm_relu, "", "[2s + 1 − 2·scale]₊ / Σ", "normalised ReLU (Eq. 6)"),
    Member("rectified", rectified, "r=1, b=1/2", "[s − scale + b]₊^r / Σ", "rectified polynomial, fixed bandwidth"),
    Member("relumax", relumax, "r=1, b=1", "[s − max s + b]₊^r / Σ", "r-ReLUmax (Eq. 11)"),
    Member("topk_softmax", topk_softmax, "k", "exp(s) / Σ on the k nearest", "Gaussian kNN (Eq. 10)"),
    Member("topk_uniform", topk_uniform, "k", "1/k on the k nearest", "uniform kNN (Eq. 4)"),
    Member("topk_epanechnikov", topk_epanechnikov, "k", "[s − s₍ₖ₎]₊ / Σ", "– (new)"),
    Member("topk_biweight", topk_biweight, "k", "[s − s₍ₖ₎]₊² / Σ", "– (new)"),
    Member("topk_triweight", topk_triweight, "k", "[s − s₍ₖ₎]₊³ / Σ", "– (new)"),
    Member("topk_rectified", topk_rectified, "k, r=1", "[s − s₍ₖ₎]₊^r / Σ", "– (new)"),
    Member("ball", ball, "b=1/2", "1 / Σ where s > scale − b", "– (ε-ball average)"),
    Member("margin", margin, "b=1", "1 / Σ where s > max s − b", "– (new)"),
    Member("truncated_gaussian", truncated_gaussian, "b=1", "exp(s) / Σ where s > max s − b", "– (new)"),
)
NAMES: dict[str, Member] = {name: member for member in FAMILY for name in (member.name, *member.aliases)}

# what the paper and the reports write, and the text it stands for
SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"([\d./]+)-entmax", r"entmax(\1)"),
    (r"([\d./]+)-relumax", r"relumax(\1)"),
    (r"normrelu\^([\d./]+)", r"rectified(\1)"),
    (r"normrelu|normali[sz]ed relu", "norm_relu"),
    (r"gaussian knn,? k=(\d+)", r"topk_softmax(\1)"),
    (r"uniform knn,? k=(\d+)", r"topk_uniform(\1)"),
)
LONGEST_NUMBER = 60  # characters of a number
_TEXT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*")


@torch.compiler.assume_constant_result
def parse(text: str) -> Kernel:
    """The kernel that a text names: "sparsemax", "entmax(1.5)", "relumax(r=2, b=1)", "topk_softmax(32)".

    Numbers may be fractions, as in "entmax(4/3)". The paper's names, such as "4/3-entmax" and "2-ReLUmax", do as well.
    """
    if not isinstance(text, str):
        made = next((m for m in FAMILY if m.make is text), None)
        what = f"the function {made.name}: call it, as in {made.name}({made.parameters})" if made else type(text).__name__
        raise TypeError(f"a kernel is a Kernel or its text, such as biweight() or 'relumax(r=2)'; got {what}")
    match = _TEXT.fullmatch(_respell(text))
    if match is None:
        raise ValueError(f"kernel {text!r} does not read as name or name(arguments), such as 'entmax(1.5)'. {_known()}")
    if match[1].lower() not in NAMES:
        raise ValueError(f"unknown kernel {text!r}{_meant(match[1].lower())} {_known()}")
    member = NAMES[match[1].lower()]
    arguments: list[float] = []
    keywords: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, equals, value = (piece.strip() for piece in part.rpartition("="))
        if key in keywords:
            raise ValueError(f"kernel {text!r} gives {key} twice")
        if equals:
            keywords[key] = _number(value, text)
        else:
            arguments.append(_number(value, text))
    try:
        return member.make(*arguments, **keywords)
    except TypeError:
        raise ValueError(f"kernel {text!r}: {member.name} takes ({member.parameters})") from None


def split_names(text: str) -> list[str]:
    """Names separated by commas, but not by those inside brackets; each once."""
    return list(dict.fromkeys(name.strip() for name in re.split(r",(?![^()]*\))", text) if name.strip()))


def _respell(text: str) -> str:
    """The text in the names of the family, if it is spelt otherwise."""
    found = ((re.fullmatch(pattern, text.strip(), re.IGNORECASE), means) for pattern, means in SPELLINGS)
    return next((match.expand(means) for match, means in found if match), text)


def _number(text: str, whole: str) -> float:
    written = text.strip().replace(" ", "")
    try:
        if len(written) > LONGEST_NUMBER or re.search(r"[eE][+-]?\d{4}", written):  # Fraction would write it out
            raise ValueError
        value = Fraction(written)
        number = int(value) if value.denominator == 1 and abs(value) < 1e15 else float(value)
        if bool(number) != bool(value):  # too small for a float: 0 would be another kernel
            raise ValueError
        return number
    except (ValueError, ZeroDivisionError, OverflowError):
        shown = written if len(written) <= LONGEST_NUMBER else f"{written[:LONGEST_NUMBER]}…"
        raise ValueError(f"kernel {whole[:200]!r}: {shown!r} is not a number in range") from None


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


def _known() -> str:
    return f"Known kernels: {', '.join(NAMES)}"


def _tidy(r: float) -> float:
    """r without the rounding of 1/(α−1): entmax(4/3) is the triweight, not t₊^3.0000000000000004."""
    return float(round(r)) if abs(r - round(r)) < 1e-15 * r * r else r


_TEXTS = {
    ("normalising", "power"): "entmax({alpha})",
    ("fixed", "step"): "ball(b={value})",
    ("fixed", "power"): "rectified(r={r}, b={value})",
    ("anchored", "step"): "margin(b={value})",
    ("anchored", "power"): "relumax(r={r}, b={value})",
    ("anchored", "exp"): "truncated_gaussian(b={value})",
    ("nearest", "step"): "topk_uniform({value})",
    ("nearest", "power"): "topk_rectified({value}, r={r})",
    ("nearest", "exp"): "topk_softmax({value})",
}


def _describe(kernel: Kernel) -> str:
    r, rule, value = encode(kernel)
    if math.isnan(r):
        return "entmax(alpha)"
    for member in FAMILY:
        if not member.parameters and member.make() == kernel:
            return member.name
    if rule == "normalising" and (1 + 1 / r == 1 or entmax(1 + 1 / r).r != r):
        return f"entmax(r={_short(r)})"  # alpha would lose the last bits of r
    shape = "step" if r == 0 else "exp" if math.isinf(r) else "power"
    return _TEXTS[rule, shape].format(alpha=_short(1 + 1 / r) if r else "", r=_short(r), value=_short(value))


def _short(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
