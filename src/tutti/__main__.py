"""`python -m tutti` is the same program as `tutti`."""

from tutti.cli import main

if __name__ == "__main__":
    main()
