"""What all commands share: the application, its errors, the console and the checks at the edge."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin

from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
from tyro.extras import SubcommandApp

from compactattn.kernels import Kernel, parse

app = SubcommandApp()  # a command is a function under @app.command: its arguments are the options, its docstring the help
train, sweep = SubcommandApp(), SubcommandApp()  # each experiment adds its own command to both
app.command(train, name="train", help="Train one model: compactattn train length-gen --help")
app.command(sweep, name="sweep", help="Train, evaluate and report several: compactattn sweep length-gen --help")
FREE_WIDTH = 1000  # more columns than any table needs


class UsageError(Exception):
    """What the user can put right: told in one sentence, with no traceback."""


class UnknownChoice(UsageError):
    """A word that is none of those an option may be."""

    def __init__(self, word: str, known: Sequence[str]) -> None:
        super().__init__(f"{word!r} is unknown; choose one of {', '.join(filter(None, known))}")
        self.word = word

    def name_option(self, arguments: Sequence[str]) -> str:
        """The sentence, begun with the option that the word was given to where only one has it."""
        pairs = [*pairwise(arguments), *(argument.partition("=")[::2] for argument in arguments)]
        found = {option for option, word in pairs if option.startswith("--") and word == self.word}
        return f"{found.pop()} {self}" if len(found) == 1 else str(self)


class Stopped(Exception):
    """A signal has ended the command in good order: told in one sentence."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number  # of the signal


reading = ConstructorRegistry()  # of arguments, where tyro's own way would not do


@reading.primitive_rule
def _read_choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """One of a Literal's words: any other is refused as all mistakes are, and not in a box of the parser's."""
    if get_origin(info.type) is not Literal:
        return None
    known = get_args(info.type)

    def read(given: list[str]) -> str:
        if given[0] not in known:
            raise UnknownChoice(given[0], known)
        return given[0]

    metavar = f"{{{','.join(filter(None, known))}}}"
    return PrimitiveConstructorSpec(1, metavar, read, lambda word: word in known, lambda word: [word])


def console() -> Console:
    """A console that does not wrap what goes to a file: one row stays one line."""
    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=FREE_WIDTH if free else None)


def parse_kernel(text: str) -> Kernel:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_kernel(text: str) -> str:
    """The text of a kernel as it names a run: in small letters. One that names no kernel is refused."""
    parse_kernel(text)
    return text.strip().lower()


def require_counts(**counts: tuple[int, int]) -> None:
    """Refuses the first number that is below its least, given as name=(number, least)."""
    for name, (number, least) in counts.items():
        if number < least:
            raise UsageError(f"{name} = {number} must be at least {least}")


def require_text(option: str, text: str) -> None:
    """Refuses what is no UTF-8: Python keeps such bytes of a command as characters that nothing can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise UsageError(
            f"{option} is not UTF-8 text: byte 0x{ord(text[error.start]) & 0xFF:02x} in line {line};"
            f' convert it, as in: {option} "$(iconv -f latin1 -t utf-8 FILE)"'
        ) from None


def prepare_folder(out: Path) -> None:
    """Makes the directory and checks that it takes files, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise UsageError(f"cannot write to {str(out)!r} ({reason}); choose another directory with --out") from error
