"""One look for a variant in every figure and table: colour says the profile, dashes and marker the support rule and its k.

An architecture without a kernel has a colour and a marker of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from compactattn.kernels import Anchored, Fixed, Kernel, Nearest, Normalising, Rule
from compactattn.report.gallery import INK
from compactattn.report.paper import Variant

TEXT, MUTED, FAINT, SHADE = "#1a1a1a", "#6e6e6e", "#d5d5d5", "#eef1f4"
_OTHER, _TRANSFORMER = "#6b5b95", "#767676"
_RECURRENT = {  # colour, what stands for it on a dark page, and marker
    "retnet": ("#8a6d00", "#d9b84a", "v"),
    "h3": ("#b03a2e", "#f08a7e", "P"),
    "gla": ("#1b7f8c", "#5cc6d4", "X"),
    "s4d": ("#4a5a9e", "#9db0f5", "*"),
    "mamba": ("#7a4b2a", "#cf9f78", "p"),
}
DARK = {  # each colour, and what stands for it on a dark page
    TEXT: "#ececec",
    MUTED: "#a5a5a5",
    FAINT: "#3d4146",
    SHADE: "#22282f",
    _OTHER: "#b9a9e8",
    _TRANSFORMER: "#b0b0b0",
    INK[0.0].lower(): "#ec8fca",
    INK[1.0].lower(): "#62b6f2",
    INK[2.0].lower(): "#ff9d5c",
    INK[3.0].lower(): "#50d0a9",
    **{colour: shown for colour, shown, _ in _RECURRENT.values()},
}
_SAID: dict[type[Rule], str] = {
    Normalising: "a solid line normalises itself",
    Anchored: "a dashed line is anchored at the best key",
    Fixed: "a dotted line has a fixed bandwidth",
    Nearest: "a dash-dotted line keeps the k nearest keys",
}
_RULES: dict[type[Rule], tuple[Any, str]] = {
    Normalising: ("-", "o"),
    Anchored: ((0, (4, 1.6)), "s"),
    Fixed: ((0, (1.3, 1.3)), "^"),
    Nearest: ((0, (5, 1.4, 1.2, 1.4)), "<"),
}
_OTHER_OUTPUT = (0, (0.8, 2.4))
_LARGER = {16: ((0, (5, 1.4, *(1.2, 1.4) * 2)), "D"), 32: ((0, (5, 1.4, *(1.2, 1.4) * 3)), ">")}  # by the k that is exceeded


class Look(NamedTuple):
    """How a variant is drawn."""

    colour: str
    dashes: Any
    marker: str
    hollow: bool  # the marker of a variant with positions


def look_of(variant: Variant) -> Look:
    if variant.kernel is None:
        colour, _, marker = _RECURRENT.get(variant.architecture, (_OTHER, "", "h"))
        return Look(colour, (0, (7, 1.2)), marker, variant.positions != "none")
    colour = _TRANSFORMER if variant.architecture == "transformer" else colour_of(variant.kernel)
    dashes, marker = _dash(variant.kernel.rule)
    return Look(colour, _OTHER_OUTPUT if variant.output else dashes, marker, variant.positions != "none")


def _dash(rule: Rule) -> tuple[Any, str]:
    larger = [look for k, look in _LARGER.items() if isinstance(rule, Nearest) and rule.k > k]
    return larger[-1] if larger else _RULES[type(rule)]


def describe_looks(variants: Iterable[Variant]) -> str:
    """What colours, dashes and markers mean, as far as they occur."""
    variants = list(variants)
    rules = {variant.kernel.rule for variant in variants if variant.kernel is not None}
    said = [text for kind, text in _SAID.items() if any(isinstance(rule, kind) for rule in rules)]
    said += ["with more dots for a larger k"] if len({_dash(rule) for rule in rules if isinstance(rule, Nearest)}) > 1 else []
    said += ["sparse dots stand for another output layer"] if any(variant.output for variant in variants) else []
    text = f" Colour is the kernel's profile; {', '.join(said)}." if said else ""
    without = any(variant.kernel is None for variant in variants)
    return text + (" Long dashes with a colour and a marker of their own: architectures without a kernel." if without else "")


def colour_of(kernel: Kernel) -> str:
    r = kernel.r
    return _OTHER if math.isnan(r) else INK.get(r, _OTHER).lower()


def css_colour(colour: str) -> str:
    """The colour as a CSS variable that changes with the page's theme."""
    return f"var(--c{colour[1:]})" if colour in DARK else colour


def css_variables() -> str:
    """The definitions behind `css_colour`, for both themes."""
    light = "".join(f"--c{colour[1:]}:{colour};" for colour in DARK)
    dark = "".join(f"--c{colour[1:]}:{shown};" for colour, shown in DARK.items())
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
