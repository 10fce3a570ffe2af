"""attend() on a CPU beside PyTorch's softmax attention: error against float64, then time, forward and forward + backward.

python -m benchmarks.attention
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import append, environment, newest, read, source, spread, time_in_turns
from compactattn import Causal, attend
from compactattn.bench.regimes import Inputs, Problem, draw
from compactattn.bench.results import Row, format_markdown

TOKENS, HEADS = 8192, 8  # batch · length, and heads
LENGTHS, HEAD_DIMS, REGIMES = (512, 2048, 8192), (16, 64), ("mild", "local")
NEAREST = ("topk_softmax(32)",)  # finds the k best first
UNEVEN = ("entmax(1.2)", "entmax(1.75)", "relumax(2.5)")  # whose powers are logarithms
KERNELS = ("gaussian", "sparsemax", "biweight", "triweight", "relumax", "norm_relu", *NEAREST, *UNEVEN)
PEER = "scaled_dot_product_attention"
CHECKED = 512  # tokens of a sample on which errors are measured
Call = Callable[[Inputs], Tensor]


def attend_by(kernel: str, backend: str = "native") -> Call:
    return lambda inputs: attend(inputs.q, inputs.k, inputs.v, kernel, mask=Causal(), backend=backend)


def attend_by_peer(inputs: Inputs) -> Tensor:
    return scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)


def both_ways(call: Call, inputs: Inputs) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = call(Inputs(q, k, v, inputs.do))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.do)]


def forward(call: Call, inputs: Inputs) -> None:
    with torch.no_grad():
        call(inputs)


def error(call: Call, kernel: str, problem: Problem) -> float:
    """The largest of the relative errors of the output and the gradients against float64, on a shorter sample."""
    inputs = draw(replace(problem, batch=1, length=min(problem.length, CHECKED)), "cpu", torch.float32)
    found = both_ways(call, inputs)
    truth = both_ways(attend_by(kernel, "reference"), Inputs(*(x.double() for x in inputs)))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


def measure(problem: Problem) -> list[dict[str, object]]:
    """A row for the peer and one for each kernel, which take turns."""
    contestants = {("gaussian", PEER): attend_by_peer} | {(kernel, "attend"): attend_by(kernel) for kernel in KERNELS}
    inputs = draw(problem, "cpu", torch.float32)

    def time_all(run: Callable[[Call, Inputs], object]) -> dict[str, list[float]]:
        calls = {" ".join(names): partial(run, call, inputs) for names, call in contestants.items()}
        return time_in_turns(calls, seconds=1.0, least=3)

    times = {"forward": time_all(forward), "both": time_all(both_ways)}
    length, dim = problem.length, problem.head_dim
    shape = {"scores": problem.regime, "batch": problem.batch, "heads": HEADS, "length": length, "dim": dim}
    return [
        {"kernel": kernel, "contestant": who}
        | shape
        | {f"{what}_{key}": value for what, taken in times.items() for key, value in spread(taken[f"{kernel} {who}"]).items()}
        | {"error": f"{error(call, kernel, problem):.1e}"}
        for (kernel, who), call in contestants.items()
    ]


def newest_rows() -> list[Row]:
    """The rows of the newest code."""
    rows = read("cpu_attention")
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def summary() -> str:
    """How long attend takes beside PyTorch, in a sentence; empty before the first run."""
    rows = newest_rows()
    if not rows:
        return ""
    peers = {_place(row): float(row["both_median_ms"]) for row in rows if row["contestant"] == PEER}
    ours = [row for row in rows if row["contestant"] != PEER]
    shares = [(row["kernel"], float(row["both_median_ms"]) / peers[_place(row)]) for row in ours]
    usual = [kernel for kernel in KERNELS if kernel not in (*NEAREST, *UNEVEN)]
    groups = ([share for kernel, share in shares if kernel in group] for group in (usual, NEAREST, UNEVEN))
    ranges = [f"{min(found):.2f} to {max(found):.2f}" if found else "" for found in groups]
    others = {"top-k": ranges[1], "entmax and ReLUmax of other orders than r = 1, 2, 3": ranges[2]}
    rest = ", ".join(f"{name} {found}" for name, found in others.items() if found)
    rest = f";\n{rest}" if rest else ""
    return (
        f"attend() on a CPU, fp32, causal, forward + backward, takes {ranges[0]} of the time of PyTorch's own softmax\n"
        f"(`scaled_dot_product_attention`), over {len(usual)} kernels, lengths of 512 to 8,192 and head dims of 16 and 64"
        f"{rest}."
    )


def _place(row: Row) -> tuple[str, str, str]:
    return row["scores"], row["dim"], row["length"]


def section() -> str:
    """A table for each regime and head dim; empty before the first run."""
    rows = newest_rows()
    if not rows:
        return ""
    tokens, most = int(rows[0]["batch"]) * int(rows[0]["length"]), max(float(row["error"]) for row in rows)
    parts = [
        "## Attention on a CPU\n\nattend() in C beside PyTorch's own softmax, `scaled_dot_product_attention`: causal, "
        f"fp32, {rows[0]['heads']} heads,\nbatch · length = {tokens:,}; milliseconds forward / forward + backward, and the "
        f"latter as a share of PyTorch's. Errors against\nfloat64 are at most {most:.0e} of the size of the output and of each "
        "gradient."
    ]
    for scores, dim in dict.fromkeys((row["scores"], row["dim"]) for row in rows):
        here = [row for row in rows if (row["scores"], row["dim"]) == (scores, dim)]
        parts.append(f"On {scores} scores at head dim {dim}:\n\n{_tabulate(newest(here, 'kernel', 'contestant', 'length'))}")
    return "\n\n".join([*parts, source("cpu_attention")]) + "\n\n"


def _tabulate(rows: list[Row]) -> str:
    peers = {row["length"]: float(row["both_median_ms"]) for row in rows if row["contestant"] == PEER}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["kernel"], row["contestant"]), dict.fromkeys(peers, "–"))
        forward, both = (float(row[f"{what}_median_ms"]) for what in ("forward", "both"))
        share = "" if row["contestant"] == PEER else f" ({both / peers[row['length']]:.2f})"
        line[row["length"]] = f"{forward:.0f} / {both:.0f}{share}"
    header = ["kernel", "by", *(f"n = {int(length):,}" for length in peers)]
    body = [[f"`{kernel}`", "PyTorch" if who == PEER else "attend", *cells.values()] for (kernel, who), cells in lines.items()]
    return format_markdown(header, body)


def main() -> None:
    rows = []
    for regime in REGIMES:
        for dim in HEAD_DIMS:
            for length in LENGTHS:
                found = measure(Problem(regime, TOKENS // length, HEADS, length, dim))
                print(
                    regime,
                    dim,
                    length,
                    {f"{row['kernel']} {row['contestant']}": row["both_median_ms"] for row in found},
                    flush=True,
                )
                rows += [row | environment() for row in found]
    print("rows added to", append("cpu_attention", rows))


if __name__ == "__main__":
    main()
