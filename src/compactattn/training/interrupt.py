"""Ctrl-C and the terminate signal: the first asks the run to stop after its step, the second stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from compactattn.training.config import RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


_conditions: list[Callable[[], bool]] = []


def stop_when(told: Callable[[], bool]) -> None:
    """From now on every run of this process is asked to stop as soon as `told` says so, as well as by a signal."""
    _conditions[:] = [told]


class Interrupted(RunError):
    """The run was asked to stop; it has saved a checkpoint and can be resumed."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number or signal.SIGINT  # of the signal; another process may have had it, or none


class Interrupt:
    """`asked` tells whether the run is to stop, `number` by which signal. The handlers of before are put back at the end."""

    def __init__(self, announce: bool) -> None:
        self.number = 0
        self._announce = announce
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # what is ignored stays so
            self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @property
    def asked(self) -> bool:
        return self.number > 0 or any(told() for told in _conditions)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        if self._announce:  # past Python's buffers, which the signal may have caught in the middle of a line
            os.write(2, b"\nstopping after this step, then saving; once more stops at once without saving\n")
