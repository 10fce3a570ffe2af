"""`python -m compactattn.bench attention …` is `compactattn bench attention …` where tyro is not installed."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from compactattn.bench import attention, decode, training
from compactattn.training.config import RunError

COMMANDS: dict[str, Callable[..., None]] = {"attention": attention.run, "training": training.run, "decode": decode.run}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m compactattn.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        plain = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, description=inspect.getdoc(function), formatter_class=plain)
        for option, parameter in inspect.signature(function).parameters.items():
            flag, default = f"--{option.replace('_', '-')}", parameter.default
            if isinstance(default, bool):
                command.add_argument(flag, default=default, action=argparse.BooleanOptionalAction)
            else:
                command.add_argument(flag, default=default, type=Path if isinstance(default, Path) else type(default))
    given = vars(parser.parse_args(arguments))
    try:
        COMMANDS[given.pop("command")](**given)
    except RunError as error:
        print(f"compactattn: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
