"""A training step: tokens per second of a Memory Mosaic with each kernel, beside a GPT-2 transformer of the same size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from compactattn.bench.attention import explain
from compactattn.bench.clock import require_gpu, spread, time_call
from compactattn.bench.contestants import name_kernels
from compactattn.bench.results import append, describe_run, read_numbers
from compactattn.data.batches import Batch
from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build
from compactattn.models.zoo import ZOO
from compactattn.training.config import Compile, RunConfig, RunError, TrainingConfig
from compactattn.training.distributed import Group
from compactattn.training.graph import WARM
from compactattn.training.loop import Loop, Start
from compactattn.training.optimiser import build_optimiser

LENGTH, BATCH = 512, 32
SIZE = ZOO["stories-8"]
Timer = Callable[[Callable[[], object]], list[float]]
time_steps = partial(time_call, warm_ms=200, measured_ms=1000)


def run(
    kernels: str = "all",
    layers: str = "8,1",
    compile: str = "parts",
    graph: bool = True,
    transformer: bool = True,
    minutes: float = 10.0,
    out: Path = Path("benchmarks/results/training.csv"),
) -> None:
    """Time a training step on this GPU: width 768, 12 heads, length 512, batch 32, bf16 autocast.

    A Memory Mosaic with each kernel, and beside it a GPT-2 transformer of the same size. An update is the one that
    `compactattn train` makes: forward, backward, clipping and AdamW.

    compactattn bench training --kernels sparsemax,biweight --layers 8

    Args:
        kernels: Names separated by commas, any of `compactattn kernels`; all stands for the nine of the table.
        layers: Depths, separated by commas.
        compile: none, parts (what surrounds attention, one graph for every kernel) or whole (slow to compile).
        graph: Replay updates as a CUDA graph.
        transformer: Time the transformer too.
        minutes: No new measurement is begun after these.
        out: The CSV file.
    """
    configs = plan(name_kernels(kernels), read_numbers("layers", layers), compile, graph)
    device = require_gpu()
    facts, end = describe_run(device), time.monotonic() + 60 * minutes
    configs = [config for config in configs if transformer or config.model.architecture == "mosaic"]
    for done, config in enumerate(configs):
        if time.monotonic() > end:
            left = len(configs) - done
            print(f"{left} of {len(configs)} models were left out after {minutes:g} minutes; give more with --minutes")
            break
        row = measure(config, device)
        append(out, [{**row, **facts}])
        print(format_line(row), flush=True)


def plan(kernels: list[str], layers: list[int], compile: str, graph: bool) -> list[RunConfig]:
    """For each depth the transformer, then a mosaic with each kernel."""
    peer: dict[str, object] = {"architecture": "transformer", "positions": "learned", "longest": LENGTH}
    mosaics: list[dict[str, object]] = [{"kernel": kernel} for kernel in kernels]
    try:
        return [
            configure(SIZE.configure(layers=depth, **model), compile, graph) for depth in layers for model in (peer, *mosaics)
        ]
    except ValueError as error:
        raise RunError(str(error)) from error


def configure(model: ModelConfig, compile: str, graph: bool) -> RunConfig:
    chosen = cast(Compile, compile)  # checked by the config
    training = TrainingConfig(steps=1, batch=BATCH, precision="bf16", compile=chosen, graph=graph, rate=1e-4)
    return RunConfig("bench", seed=0, model=model, training=training)


def measure(config: RunConfig, device: torch.device, timer: Timer = time_steps) -> dict[str, object]:
    """The row of a config; without times where it fails."""
    model, training = config.model, config.training
    row: dict[str, object] = {
        "architecture": model.architecture, "kernel": model.kernel, "layers": model.layers, "width": model.width,
        "heads": model.heads, "length": LENGTH, "batch": training.batch, "precision": training.precision,
        "compile": training.compile, "graph": training.graph, "status": "ok",
        "median_ms": "", "p20_ms": "", "p80_ms": "", "tokens_per_second": "", "memory_mib": "", "loss": "",
    }  # fmt: skip
    try:
        row |= take_times(config, device, timer)
    except Exception as error:  # one model that fails is a row of its own
        row["status"] = explain(error, device)
    gc.collect()  # the loop and its recorded graph hold each other
    return row


def take_times(config: RunConfig, device: torch.device, timer: Timer) -> dict[str, object]:
    if config.training.compile == "whole":
        torch.compiler.reset()  # else, after a few models, PyTorch would give up and run the rest uncompiled
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # what earlier models have left
    step = make_step(config, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = float(step()[0])
    for _ in range(WARM):
        step()
    times = spread(timer(step))
    tokens = config.training.batch * LENGTH
    peak = round((torch.cuda.max_memory_allocated() - before) / 2**20) if device.type == "cuda" else ""
    per_second = round(1e3 * tokens / times["median_ms"])
    return {**times, "tokens_per_second": per_second, "memory_mib": peak, "loss": round(loss, 4)}


def make_step(config: RunConfig, device: torch.device) -> Callable[[], torch.Tensor]:
    """One update of the weights as the training loop makes it, always on the same batch."""
    model = build(config.model).to(device).train()
    unused = cast(Any, None)
    optimiser = build_optimiser(model, config.training)
    loop = Loop(config, model, optimiser, unused, Path(), Group(device), None, None, unused, unused, None, Start())
    generator = torch.Generator(device).manual_seed(config.seed)
    tokens = torch.randint(config.model.vocab, (config.training.batch, LENGTH + 1), generator=generator, device=device)
    counted = torch.ones(config.training.batch, LENGTH, dtype=torch.bool, device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), counted, counted)
    replay = loop.replay
    return (lambda: loop.compute([(None, batch)])) if replay is None else (lambda: replay(batch))


def format_line(row: Mapping[str, Any]) -> str:
    name = "transformer" if row["architecture"] == "transformer" else f"mosaic {row['kernel']}"
    place = f"{row['layers']} layers  {name:<24} compile {row['compile']:<5} graph {'yes' if row['graph'] else 'no':<3}"
    if row["status"] != "ok":
        return f"{place} {row['status']}"
    thousands = row["tokens_per_second"] / 1e3
    return (
        f"{place} {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}–{row['p80_ms']:.2f})  {thousands:7,.0f} k tokens/s  "
        f"{row['memory_mib']} MiB"
    )
