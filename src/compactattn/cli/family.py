"""Commands that show the family: what each kernel computes, and what that looks like."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from compactattn.attention import Readout, attend
from compactattn.cli.app import FREE_WIDTH, app, console, parse_kernel, prepare_folder
from compactattn.kernels import FAMILY, Kernel, Member

# -- commands ------------------------------------------------------------------------------------


@app.command
def kernels(markdown: bool = False) -> None:
    """List the family: how each kernel is called, what it computes, and what the paper calls it.

    Args:
        markdown: Print a Markdown table, as in: compactattn kernels --markdown > kernels.md
    """
    rows = [_describe(member) for member in FAMILY]
    if markdown:
        print(_format_markdown(rows))
        return
    terminal = console()
    wide = _tabulate(rows)
    natural = terminal.measure(wide, options=terminal.options.update(max_width=FREE_WIDTH)).maximum
    terminal.print(wide if natural <= terminal.width else _tabulate_narrow(rows))
    terminal.print(f"\n{LEGEND}", markup=False)


@app.command
def gallery(out: Path = Path("gallery")) -> None:
    """Draw the kernels and the transformations they give, as .svg and .png.

    Args:
        out: Directory for the pictures, made if need be, as in: compactattn gallery --out figures
    """
    for path in _draw(out):
        print(path)


KernelTexts = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="KERNEL [KERNEL ...]", help_behavior_hint="(default: the whole family)")
]


@app.command
def show(out: Path = Path("gallery"), kernels: KernelTexts = ()) -> None:
    """Show the family at work: the weights that each kernel gives six keys, and the gallery.

    Args:
        out: Directory for the pictures, made if need be, as in: compactattn show --out gallery
        kernels: What to show, as in: compactattn show --kernels softmax "relumax(r=2, b=1)" "entmax(4/3)"
    """
    examples = {text: parse_kernel(text) for text in kernels} or _name_examples()
    prepare_folder(out)
    terminal = console()
    terminal.print(f"One query, six unit keys, scale = {SCALE:g}. A key farther than h weighs nothing.\n")
    terminal.print(_tabulate_weights(examples))
    terminal.print(
        '\n· is an exact zero, "<.01" a small weight. keys = how many weigh something,'
        "\nh = effective bandwidth (for softmax, which reaches every key, 1/√scale)."
        "\n\nDrawing the gallery …"
    )
    for path in _draw(out):
        print(f"  {path}")
    print(
        f"\nNext: look at {out / 'overview.png'}, list the family with `compactattn kernels`,"
        '\nor use it: attend(q, k, v, kernel="biweight").'
    )


# -- the family as a table -----------------------------------------------------------------------


class Description(NamedTuple):
    """One row of the table of kernels."""

    call: str
    aliases: str
    profile: str
    rule: str
    formula: str
    paper: str


HEADINGS = Description("kernel", "also", "profile", "rule", "weights", "in the paper")
LEGEND = (
    "s = scale·q·k are the scores of a row, max s the best, s₍ₖ₎ the k-th largest;"
    "\n[x]₊ is x where positive, else 0; / Σ divides by the sum over the row;"
    "\nr is at least 1, or 0 for the step: relumax(r=0) is margin, rectified(r=0) is ball."
)
EXAMPLES = {"k": 4, "alpha": 1.25}  # for the arguments that have no default


def _describe(member: Member) -> Description:
    kernel = _make(member)
    return Description(
        call=f"{member.name}({member.parameters})" if member.parameters else member.name,
        aliases=", ".join(member.aliases),
        profile="t₊^r" if "r=" in member.parameters else str(kernel.profile),
        rule=type(kernel.rule).__name__.lower(),
        formula=member.formula,
        paper=member.paper,
    )


def _make(member: Member) -> Kernel:
    """An example of the member."""
    return member.make(*_example_arguments(member))


def _example_arguments(member: Member) -> list[float]:
    first = re.match(r"\w*", member.parameters)
    return [EXAMPLES[first[0]]] if first and first[0] in EXAMPLES else []


def _tabulate(rows: Iterable[Description]) -> Table:
    """One line for each kernel."""
    table = Table(*HEADINGS, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        call, *others = map(Text, row)
        call.stylize("bold")
        table.add_row(call, *others)
    return table


def _tabulate_narrow(rows: Iterable[Description]) -> Table:
    """Two lines for each kernel, for a terminal of 80 columns."""
    headings = "kernel\n  also", "profile\nrule", "weights\nin the paper"
    table = Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1)
    for row in rows:
        call = Text.assemble((row.call, "bold"), f"\n  {row.aliases}" if row.aliases else "")
        table.add_row(call, Text(f"{row.profile}\n{row.rule}"), Text.assemble(row.formula, "\n", (row.paper, "dim")))
    return table


def _format_markdown(rows: Iterable[Description]) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    body = [line(cell.replace("|", r"\|") for cell in (f"`{row.call}`", *row[1:])) for row in rows]
    return "\n".join([line(HEADINGS), line("---" for _ in HEADINGS), *body])


# -- the family at work --------------------------------------------------------------------------

SCALE = 8.0
ANGLES = (10, 20, 30, 45, 70, 120)  # degrees between the query and each key


def _name_examples() -> dict[str, Kernel]:
    """The family with example arguments, each kernel once, under the name it is called by."""
    named: dict[Kernel, str] = {}
    for member in FAMILY:
        arguments = ", ".join(f"{value:g}" for value in _example_arguments(member))
        named.setdefault(_make(member), f"{member.name}({arguments})" if arguments else member.name)
    return {name: kernel for kernel, name in named.items()}


def _weigh(kernel: Kernel) -> tuple[list[float], Readout]:
    """Weights of the six keys and the readout: with one-hot values the estimate is the weights."""
    angles = torch.tensor(ANGLES, dtype=torch.float64).deg2rad()
    q = torch.tensor([1.0, 0.0], dtype=torch.float64)[None, None, None]  # (1, 1, 1, 2)
    k = torch.stack([angles.cos(), angles.sin()], -1)[None, None]  # (1, 1, 6, 2)
    v = torch.eye(len(ANGLES), dtype=torch.float64)[None, None]
    out, readout = attend(q, k, v, kernel, scale=SCALE, return_readout=True)
    return out.flatten().tolist(), readout


def _tabulate_weights(examples: dict[str, Kernel]) -> Table:
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for key in range(len(ANGLES)):
        table.add_column(f"key {key + 1}", justify="right")
    table.add_column("keys", justify="right")
    table.add_column("h", justify="right")
    cosines = torch.tensor(ANGLES).deg2rad().cos()
    table.add_row("distance to the query", *(f"{x:.2f}" for x in (2 - 2 * cosines).sqrt().tolist()))
    table.add_row("score", *(f"{x:.2f}" for x in (SCALE * cosines).tolist()), end_section=True)
    for name, kernel in examples.items():
        w, readout = _weigh(kernel)
        table.add_row(
            Text(name, "bold"), *map(_format_weight, w), str(readout.support.item()), f"{readout.bandwidth.item():.2f}"
        )
    return table


def _format_weight(w: float) -> Text:
    """A weight in four characters, an exact zero as a dot."""
    return Text("·", "dim") if w == 0 else Text("<.01" if w < 0.005 else f"{w:.2f}")


def _draw(out: Path) -> list[Path]:
    prepare_folder(out)
    from compactattn.report.gallery import write_gallery  # matplotlib takes a second: only commands that draw wait for it

    return write_gallery(out)
