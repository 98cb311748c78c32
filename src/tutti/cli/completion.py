"""Shell completion of commands, flags and choices, read from the help of each command.

`tutti --print-completion SHELL` prints a script that calls `tutti --complete WORD...` at every Tab.
New commands and flags are completed without a new installation of the script.
"""

import contextlib
import io
import re
from collections.abc import Callable
from importlib import import_module

from tutti.world.errors import UsageError

SUBCOMMANDS = {
    "bench": ("collectives", "bandwidth", "symmetric", "pairs", "compare", "tune"),
    "submit": ("slurm", "mpi"),
}
_SCRIPTS = {
    "bash": """\
# Add to ~/.bashrc: eval "$(tutti --print-completion bash)"
_tutti() {
    local words
    words=$(tutti --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _tutti tutti
""",
    "zsh": """\
#compdef tutti
# Add to ~/.zshrc, after compinit: eval "$(tutti --print-completion zsh)"
_tutti() {
    local -a found
    found=(${(f)"$(tutti --complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    compadd -a found || _files
}
compdef _tutti tutti
""",
    "fish": """\
# Save as ~/.config/fish/completions/tutti.fish
complete -c tutti -a '(tutti --complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    if shell not in _SCRIPTS:
        raise UsageError(f"--print-completion {shell}: choose from {', '.join(_SCRIPTS)}")
    return _SCRIPTS[shell]


def candidates(words: list[str], modules: dict[str, str]) -> list[str]:
    """Return the completions of the last of `words`, which may be empty.

    `modules` maps commands to their modules.
    """
    *before, last = words or [""]
    if not before:
        found = [*modules, "--help", "--version", "--print-completion"]
    elif before == ["--print-completion"]:
        found = list(_SCRIPTS)
    elif before[0] not in modules:
        found = []
    elif len(before) == 1 and before[0] in SUBCOMMANDS:
        found = [*SUBCOMMANDS[before[0]], "--help"]
    else:
        module = import_module(modules[before[0]])
        choices = _flag_choices(module.main, before[1:2] if before[0] in SUBCOMMANDS else [])
        found = choices.get(before[-1]) or (list(choices) if last.startswith("-") else [])
    return [word for word in found if word.startswith(last)]


def _flag_choices(main: Callable[[list[str]], int], subcommand: list[str]) -> dict[str, list[str]]:
    """Return {flag: choices} of a command, read from its help."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit, UsageError):
        main([*subcommand, "--help"])
    flags: dict[str, list[str]] = {}
    # A line of the help:   -n, --ranks INT         Number of ranks …
    for line in re.findall(r"(?m)^  (-.*?)(?:  |$)", page.getvalue()):
        choices = re.search(r"\{([\w.,-]+)\}", line)
        for flag in re.findall(r"(?:^|, )(--?[a-z][\w-]*)", line):
            flags[flag] = choices[1].split(",") if choices else []
    return flags
