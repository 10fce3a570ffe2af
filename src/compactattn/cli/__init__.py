"""Attention as Nadaraya-Watson regression with compact kernels.

Examples:
  compactattn demo                     train three small models and see which ones extrapolate (minutes on a laptop)
  compactattn train length-gen --task mqmtar --kernel sparsemax --preset cpu-quick
  compactattn sweep length-gen --kernels gaussian,sparsemax,relumax --seeds 3
  compactattn train regbench --model mosaic --kernel biweight --examples 1000
  compactattn data demo-stories        stories to learn, with no download; also: data text FILES, data babistories
  compactattn train lm --kernel triweight --layers 8 --data DIR
  compactattn evaluate RUN --data other-text.txt --by-position
  compactattn generate RUN --prompt "Once upon a time" --tokens 200
  compactattn evaluate RUN --lengths 64,128,256 --mode free-running
  compactattn report RUN ... --out report
  compactattn resume RUN               go on after Ctrl-C
  compactattn generate RUN             let a model answer a prompt, or tell a story
  compactattn inspect RUN              which words each head used, and how sparse each layer is; --save for the report
  compactattn bench attention          time every kernel on this GPU, beside its peers
  compactattn models                   named sizes with their parameters
  compactattn kernels                  every kernel: how to call it, what it computes
  compactattn show                     the family on six keys, and its pictures
  compactattn gallery --out figures    the pictures alone
  compactattn --version

In Python:
  from compactattn import attend
  out = attend(q, k, v, kernel="biweight")    # (batch, heads, time, head_dim)
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import compactattn
from compactattn.cli import bench, data, family, inspection, laboratory  # noqa: F401  registers the commands
from compactattn.cli.app import Stopped, UnknownChoice, UsageError, app, reading
from compactattn.training.config import RunError
from compactattn.training.distributed import leads
from compactattn.training.interrupt import Interrupted


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. A mistake in its arguments or in a run is told on stderr, with exit status 2.

    A signal gives 128 and its number, as a shell would: 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the output cannot write τ, a question mark will do
    if arguments == ["--version"]:
        print(f"compactattn {compactattn.__version__}")
        return
    try:
        app.cli(prog="compactattn", description=__doc__, args=arguments or ["--help"], registry=reading)
    except (UsageError, Stopped, RunError) as error:
        if leads():  # one process of several speaks for all
            told = error.name_option(arguments) if isinstance(error, UnknownChoice) else error
            print(f"compactattn: {told}", file=sys.stderr)
        sys.exit(128 + error.number if isinstance(error, Stopped | Interrupted) else 2)
    except KeyboardInterrupt:
        print("compactattn: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # as in `compactattn show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
