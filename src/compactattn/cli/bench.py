"""Commands that measure speed on this GPU."""

from __future__ import annotations

from tyro.extras import SubcommandApp

from compactattn.bench import attention, decode, training
from compactattn.cli.app import app

bench = SubcommandApp()
app.command(bench, name="bench", help="Time attention, training or decoding on this GPU: compactattn bench attention --help")
bench.command(name="attention")(attention.run)
bench.command(name="training")(training.run)
bench.command(name="decode")(decode.run)
