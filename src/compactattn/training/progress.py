"""What a person sees of a run: a bar in a terminal, lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from compactattn.training.config import RunError

SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    def update(self, step: int, loss: float, speed: float) -> None:
        """Shows the loss of a step and the speed in tokens a second."""

    def tell(self, text: str) -> None:
        """Says something now."""

    def close(self) -> None: ...


def open_display(steps: int, start: int, show: bool) -> Display:
    """A bar where standard error is a terminal and rich is installed, lines where not, nothing unless `show`."""
    if not show:
        return Silence()
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return Bar(steps, start)
    return Lines(steps, start)


class Silence:
    def update(self, step: int, loss: float, speed: float) -> None: ...

    def tell(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line after the first step, then every ten seconds, and one at the end."""

    def __init__(self, steps: int, start: int) -> None:
        self._steps, self._start = steps, start
        self._began = time.monotonic()
        self._due = self._began

    def update(self, step: int, loss: float, speed: float) -> None:
        now = time.monotonic()
        if now < self._due and step < self._steps:
            return
        self._due = now + SECONDS_BETWEEN_LINES
        left = (now - self._began) / (step - self._start) * (self._steps - step)
        self.tell(f"step {step:,} of {self._steps:,}  loss {loss:.4f}  {speed:,.0f} tokens/s  {_span(left)} left")

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class Bar:
    """rich's progress bar, at the foot of the terminal."""

    def __init__(self, steps: int, start: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=steps, completed=start, loss="–", speed="–")
        self._progress.start()

    def update(self, step: int, loss: float, speed: float) -> None:
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")

    def tell(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def require_tensorboard() -> None:
    if not importlib.util.find_spec("tensorboard"):
        raise RunError("TensorBoard is asked for but not installed; run pip install 'compactattn[track]', or do without")


def open_tensorboard(folder: Path, step: int) -> Any:
    """A writer into folder/tensorboard; what an interrupted run wrote there after `step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
