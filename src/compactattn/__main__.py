"""`python -m compactattn` is the command line."""

from compactattn.cli import main

if __name__ == "__main__":
    main()
