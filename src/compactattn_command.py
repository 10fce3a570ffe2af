"""The command `compactattn`. It stands outside the package, whose import takes seconds, so that Ctrl-C is heard meanwhile."""

import sys


def main() -> None:
    try:
        from compactattn import cli
    except KeyboardInterrupt:
        print("compactattn: stopped", file=sys.stderr)
        sys.exit(130)
    cli.main()
