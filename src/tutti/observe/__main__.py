"""`python -m tutti.observe SCRIPT …` runs a script with the recorder, under any launcher."""

import os
import runpy
import sys

from tutti.observe import recorder


def main() -> None:
    """Run the script in this process, as `python SCRIPT` would."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m tutti.observe SCRIPT [arguments]", file=sys.stderr)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not os.path.isfile(script):
        print(f"python -m tutti.observe: script {script!r} does not exist", file=sys.stderr)
        raise SystemExit(2)
    os.environ[recorder.VARIABLE] = "1"
    import torch  # noqa: F401  # starts the recorder if tutti is installed

    recorder.autoload()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
