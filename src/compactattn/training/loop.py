"""The training loop. There is one, for every experiment.

An update sums loss and gradient over the micro-batches of all processes and divides by the number of counted positions
in the whole batch, so neither accumulation nor the number of processes changes what is learned.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compactattn.attention import ScaleError
from compactattn.data.batches import Batch, Stream
from compactattn.training import checkpoint as checkpoints
from compactattn.training.checkpoint import Checkpoint
from compactattn.training.checks import check_folder, check_machine
from compactattn.training.config import FREE, RunConfig, RunError, differences
from compactattn.training.distributed import Group, join
from compactattn.training.divergence import Diverged, blame
from compactattn.training.feed import Feed, Span, seed_of, spans
from compactattn.training.files import replace_durably
from compactattn.training.graph import Replay
from compactattn.training.interrupt import Interrupt, Interrupted
from compactattn.training.optimiser import build_optimiser, rate_at, set_rate
from compactattn.training.progress import Display, open_display, open_tensorboard
from compactattn.training.readings import Reading, lag, send
from compactattn.training.records import Records, read_metrics, record_environment
from compactattn.training.selection import BEST, Selection

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Validate = Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Summary:
    """What a finished run came to."""

    folder: Path
    step: int
    loss: float  # of the last step
    validation: dict[str, float]  # of the last validation
    best_step: int  # of the lowest validation loss, whose weights are in best/; 0 where it is not kept
    seconds: float  # since this process started or resumed the run
    tokens_per_second: float


def train(
    config: RunConfig,
    model: nn.Module,
    stream: Stream,
    folder: Path,
    *,
    resume: bool = False,
    validate: Validate | None = None,
    show_progress: bool = True,
    tensorboard: bool = False,
) -> Summary:
    """Trains the model, in place, and leaves config, environment, metrics and a checkpoint in the folder.

    `model.loss(inputs, targets, counted)` returns the sum of the losses over the counted positions, and their number.
    `validate` is given the model in evaluation mode, in every process, every `validate_every` steps and at the end.
    Where it returns a "loss", the checkpoint with the lowest one is kept in the subfolder best, unless `keep` is "last".
    Raises Diverged where the loss is not finite, Interrupted after Ctrl-C, RunError where a person has to act.
    """
    folder, vocab = Path(folder), config.model.vocab
    if vocab < stream.vocab:
        raise ValueError(f"model.vocab = {vocab} is less than the {stream.vocab} tokens of the data; set it to {stream.vocab}")
    with join(config.training.device) as group:
        check_machine(config.training, group, tensorboard)
        if group.device.type == "cuda":  # a process may have had another run before
            torch.cuda.reset_peak_memory_stats(group.device)
        model.to(group.device).train()
        optimiser = build_optimiser(model, config.training)
        start = _open_run(config, model, optimiser, folder, resume, group)
        with contextlib.ExitStack() as stack:
            display = open_display(config.training.steps, start.step, show_progress and group.leads)
            stack.callback(display.close)
            records = board = None
            if group.leads:
                records = Records(folder, start.step, start.metrics_bytes)
                stack.callback(records.close)
            if tensorboard and group.leads:
                board = open_tensorboard(folder, start.step)
                stack.callback(board.close)
            interrupt = stack.enter_context(Interrupt(show_progress and group.leads))
            loop = Loop(config, model, optimiser, stream, folder, group, records, board, display, interrupt, validate, start)
            return loop.run()


@dataclass(frozen=True)
class Start:
    step: int = 0
    metrics_bytes: int = 0
    exhausted: bool = False  # whether the run has already stopped for want of a better validation


def _open_run(
    config: RunConfig, model: nn.Module, optimiser: torch.optim.Optimizer, folder: Path, resume: bool, group: Group
) -> Start:
    """Creates the run folder or goes back to its checkpoint; all processes then hold the state of the leading one."""
    torch.manual_seed(config.seed)
    start, trouble = Start(), None
    if group.leads:
        try:
            start = _prepare(config, model, optimiser, folder, resume, group)
        except RunError as error:
            start, trouble = Start(-1), error
    position = torch.tensor([start.step, start.metrics_bytes, start.exhausted], device=group.device)
    group.share_([position])
    if position[0] < 0:  # the others must not wait for a process that has given up
        raise trouble or RunError("the leading process has refused the run")
    group.share_(list(model.state_dict(keep_vars=True).values()))
    if group.size > 1 and position[0] > 0:
        _share_optimiser(optimiser, group)
    step, length, exhausted = position.tolist()
    return Start(step, length, bool(exhausted))


def _prepare(
    config: RunConfig, model: nn.Module, optimiser: torch.optim.Optimizer, folder: Path, resume: bool, group: Group
) -> Start:
    """What the leading process does first: the folder, the state to go on from, the environment."""
    start = Start()
    if not resume:
        _create(config, folder)
    elif saved := _resume(config, folder):
        checkpoints.restore(saved, model, optimiser, group.device)
        selection = Selection.of(read_metrics(folder), config.training.patience, saved.step)
        start = Start(saved.step, saved.metrics_bytes, selection.exhausted)
    _writing(folder, lambda: record_environment(folder, group.device, group.size, start.step))
    return start


def _share_optimiser(optimiser: torch.optim.Optimizer, group: Group) -> None:
    """Gives every process the optimiser state of the leading one, whose keys all of them must have for that."""
    for parameters in optimiser.param_groups:
        for parameter in parameters["params"]:
            state = optimiser.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            group.share_([state[key] for key in ("step", "exp_avg", "exp_avg_sq")])


def _create(config: RunConfig, folder: Path) -> None:
    check_folder(config, folder)
    _writing(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
    _writing(folder, lambda: replace_durably(folder / "config.json", config.to_json().encode()))


def _writing(folder: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror or error}") from error


def _resume(config: RunConfig, folder: Path) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run was stopped before its first."""
    saved = checkpoints.load(folder) if checkpoints.exists(folder) else None
    for old in [checkpoints.load_config(folder), *([saved.config] if saved else [])]:
        if changed := differences(old, config, ignore=FREE):
            raise RunError(f"{folder} was trained with another config ({'; '.join(changed)}); resume with the same one")
    return saved


@dataclass
class Loop:
    """The moving parts of a run."""

    config: RunConfig
    model: nn.Module
    optimiser: torch.optim.Optimizer
    stream: Stream
    folder: Path
    group: Group
    records: Records | None  # of the leading process
    board: Any
    display: Display
    interrupt: Interrupt
    validate: Validate | None
    begin: Start

    def __post_init__(self) -> None:
        self.start = self.begin.step  # steps done before
        self.exhausted = self.begin.exhausted
        self.keeps_best = self.config.training.keep == "best"
        lines = read_metrics(self.folder) if self.records is not None else []
        self.selection = Selection.of(lines, self.config.training.patience, self.start)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.eager: Loss = cast(Any, self.model).loss
        self.loss: Loss = torch.compile(self.eager, dynamic=False) if self.config.training.compile == "whole" else self.eager
        if self.config.training.compile == "parts":
            cast(Any, self.model).compile_parts()
        self.bad = torch.zeros((), device=self.group.device)
        self.replay = Replay(lambda batch: self.compute([(None, batch)])) if self.config.training.graph else None
        self.waiting: list[Reading] = []
        self.stop = False
        self.saved = self.logged = self.start
        self.clock = time.monotonic()  # of the last logged step
        self.positions = 0  # in a sample

    def run(self) -> Summary:
        training, step, began = self.config.training, self.start, self.clock
        steps = range(step + 1, 1 + (step if self.exhausted else training.steps))
        if self.keeps_best and self.selection.step == step > 0:
            self.save_best()  # if the run was killed before it could
        order = (span for number in steps for span in spans(training, number, self.group.rank, self.group.size))
        with Feed(self.stream, order, self.group.device) as feed:
            for step in steps:
                try:
                    self.waiting.append(self.update(step, feed))
                    self.settle(keep=lag(self.group.device))
                    self.keep(step)
                except ScaleError as error:  # scales are learned: the weights have run away
                    self.settle()
                    raise self.fail(step, "a scale of attention is 0 or not finite") from error
                if self.group.size == 1:  # there is no other process that must stop at the same step
                    self.stop = self.stop or self.interrupt.asked
                if self.stop or self.exhausted:
                    break
        self.settle()
        self.save(step)
        if self.stop:
            done = self.exhausted or step == training.steps
            rest = "the run is complete" if done else f"`compactattn resume {shlex.quote(str(self.folder))}` goes on from there"
            raise Interrupted(f"stopped after step {step} of {training.steps} and saved; {rest}", self.interrupt.number)
        return self.summarise(step, time.monotonic() - began)

    def update(self, step: int, feed: Feed) -> Reading:
        """One step of the optimiser. Nothing here waits for the device."""
        training = self.config.training
        parts = [next(feed) for _ in range(training.accumulation)]
        self.positions = parts[0][1].inputs.shape[1]
        set_rate(self.optimiser, rate_at(step, training))
        if self.replay is None:
            return send(step, self.compute(parts))
        (span, batch), *_ = parts
        torch.manual_seed(seed_of(self.config.seed, span))
        return send(step, self.replay(batch))

    def compute(self, parts: Sequence[tuple[Span | None, Batch]]) -> Tensor:
        """Loss, gradient norm and wish to stop (3,), after the weights have been moved. All of it happens on the device."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.group.device)  # loss, counted positions, wish to stop
        for span, batch in parts:
            loss, count = self.forward(self.loss, span, batch)
            loss.backward()
            totals[0] += loss.detach()
            totals[1] += count
        if self.group.size > 1:  # as late as may be
            totals[2].fill_(float(self.interrupt.asked))
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.group.sum_([totals])
        self.group.sum_(gradients)
        count = totals[1].clamp(min=1)
        torch._foreach_div_(gradients, count.to(gradients[0].dtype))
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.training.clip or math.inf)
        # from the first bad step on no update is applied: the weights stay those that gave the bad loss
        torch.maximum(self.bad, (~(totals[0].isfinite() & norm.isfinite())).float(), out=self.bad)
        self.optimiser.found_inf = self.bad  # type: ignore[attr-defined]
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return torch.stack([totals[0] / count, norm.double(), totals[2]])

    def forward(self, loss: Loss, span: Span | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the losses and number of counted positions of one micro-batch; the same whenever it is asked for."""
        if span is not None:
            torch.manual_seed(seed_of(self.config.seed, span))
        bf16, plain = self.config.training.precision == "bf16", self.replay is None
        with torch.autocast(self.group.device.type, torch.bfloat16, enabled=bf16, cache_enabled=plain):
            return loss(batch.inputs, batch.targets, batch.counted)

    def settle(self, keep: int = 0) -> None:
        """Reads the results of all steps but the last `keep`, which the device may still be working on."""
        while len(self.waiting) > keep:
            reading = self.waiting.pop(0)
            loss, norm, stop = reading.read()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                gradient = f" and gradient norm {norm:.5g}" if math.isfinite(loss) else ""
                raise self.fail(reading.step, f"loss {loss:.5g}{gradient}")
            self.stop = self.stop or stop > 0
            self.log(reading.step, loss, norm)

    def log(self, step: int, loss: float, norm: float) -> None:
        training = self.config.training
        elapsed = time.monotonic() - self.clock
        speed = (step - self.logged) * training.batch * self.positions / max(elapsed, 1e-9)
        self.display.update(step, loss, speed)
        if self.records is None or (step % training.log_every and step < training.steps):
            return
        samples = step * training.batch
        line = {"step": step, "loss": loss, "rate": rate_at(step, training), "norm": norm}
        self.records.metric({**line, "samples": samples, "tokens": samples * self.positions})
        timing = {"step": step, "time": time.time(), "seconds": elapsed, "tokens_per_second": speed}
        if self.group.device.type == "cuda":
            timing["peak_bytes"] = torch.cuda.max_memory_allocated(self.group.device)
        self.records.timing(timing)
        if self.board is not None:
            for name in ("loss", "rate", "norm"):
                self.board.add_scalar(name, line[name], step)
        self.clock, self.logged = time.monotonic(), step

    def keep(self, step: int) -> None:
        """Validation and checkpoint, where they are due."""
        training = self.config.training
        every = training.validate_every if self.validate else 0
        if every and (step % every == 0 or step == training.steps):
            self.settle()
            self.run_validation(step)
        if step % training.checkpoint_every == 0:
            self.settle()
            self.save(step)

    def run_validation(self, step: int) -> None:
        assert self.validate is not None
        began = time.monotonic()
        self.model.eval()
        bf16 = self.config.training.precision == "bf16" and self.group.device.type == "cuda"  # as an evaluation computes
        # batches of another size: to compile for them would take longer than to do without
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            results = {name: float(value) for name, value in self.validate(self.model).items()}
        self.model.train()
        if self.records is not None:
            self.records.metric({"step": step, "validation": results})
        self.select(step, results.get("loss"))
        self.clock += time.monotonic() - began  # the speed is that of training
        if self.board is not None:
            for name, value in results.items():
                self.board.add_scalar(f"validation/{name}", value, step)

    def select(self, step: int, loss: float | None) -> None:
        """Keeps the weights if this validation is the best so far; the leading process decides for all when to stop."""
        if loss is None:
            return
        if self.records is not None and self.selection.add(step, loss) and self.keeps_best:
            self.save(step)  # first: a run that is killed between the two finds the best where it resumes
            self.save_best()
        exhausted = torch.tensor(float(self.selection.exhausted), device=self.group.device)
        self.group.share_([exhausted])
        self.exhausted = bool(exhausted)

    def save(self, step: int) -> None:
        """A checkpoint of this step. Only ever called after `settle`, so that no diverged state is kept."""
        if self.records is not None:
            self._write(self.folder, step)
            self.saved = step

    def save_best(self) -> None:
        """The same for the step of the best validation, which must be the present one."""
        _writing(self.folder, lambda: (self.folder / BEST).mkdir(exist_ok=True))
        self._write(self.folder / BEST, self.selection.step)

    def _write(self, folder: Path, step: int) -> None:
        assert self.records is not None
        state = checkpoints.capture(step, self.config, self.records.sync(), self.model, self.optimiser, self.group.device)
        checkpoints.save(folder, state)

    def fail(self, step: int, how: str) -> Diverged:
        """Ends the metrics with what went wrong, in words: JSON has no NaN."""
        if self.records is not None:
            self.records.metric({"step": step, "failed": f"diverged at step {step:,}, {how}"})
        return self.explain(step)

    def explain(self, step: int) -> Diverged:
        """Does the step again, for the samples of every process, to find the layer; the weights are still those before it."""
        self.model.zero_grad(set_to_none=True)
        training, size = self.config.training, self.group.size
        shares = [span for rank in range(size) for span in spans(training, step, rank, size)]

        def again(span: Span) -> Tensor:
            batch = self.stream.batch(*span).to(self.group.device)
            with torch.compiler.set_stance("force_eager"):  # hooks do not see into compiled parts
                return self.forward(self.eager, span, batch)[0]

        culprit = blame(self.model, (lambda span=span: again(span) for span in shares))  # type: ignore[misc]
        kept = f"the checkpoint of step {self.saved} is intact" if self.saved else "no checkpoint had been written yet"
        return Diverged(
            f"step {step} is not finite, first in {culprit}; {kept} in {self.folder}; a lower rate or a longer warm-up may help"
        )

    def summarise(self, step: int, seconds: float) -> Summary:
        tokens = (step - self.start) * self.config.training.batch * self.positions
        lines = read_metrics(self.folder) if self.group.leads else []
        losses = [line["loss"] for line in lines if "loss" in line]
        validations = [line["validation"] for line in lines if "validation" in line]
        loss, validation = (losses or [math.nan])[-1], (validations or [{}])[-1]
        best = self.selection.step if self.keeps_best else 0
        return Summary(self.folder, step, loss, validation, best, seconds, tokens / max(seconds, 1e-9))
