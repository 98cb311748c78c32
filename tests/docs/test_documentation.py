"""The site builds, its links and flags exist, and its code parses."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

_LIST_FLAGS = """
import importlib.util, json, sys
from tutti.train.recipe import RECIPES, Recipe
spec = importlib.util.spec_from_file_location("generated_pages", sys.argv[1])
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)
flags = {}
for words in pages.commands():
    page, about = pages.command_page(words)
    flags[" ".join(words)] = [row for row in page.splitlines() if row.startswith("| `")]
# Flags of a model depend on the recipe: the page of train shows those of the default.
for recipe in RECIPES.values():
    for title, section in pages.flag_sections(Recipe, recipe):
        flags["train"] += map(pages.flag_row, section)
print(json.dumps(flags))
"""


@pytest.fixture(scope="module")
def flag_rows() -> dict[str, list[str]]:
    """The rows of every command's table of flags, by the words of the command."""
    import json

    hook = ROOT / "docs/hooks/generated_pages.py"
    done = subprocess.run(
        [sys.executable, "-c", _LIST_FLAGS, str(hook)], capture_output=True, text=True, check=True
    )
    rows: dict[str, list[str]] = json.loads(done.stdout)
    return rows


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'tutti-torch[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "commands/train/index.html").is_file()


def test_every_flag_of_every_command_has_a_help_text(flag_rows: dict[str, list[str]]) -> None:
    assert {"train", "parity", "bench collectives", "submit slurm"} <= set(flag_rows)
    empty = [row for rows in flag_rows.values() for row in rows if row.endswith("|  |")]
    assert not empty


def test_readme_is_short_and_its_links_resolve() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
    files = re.findall(r"`(\w+\.json)`", text)
    assert files
    assert not [file for file in files if not (ROOT / "benchmarks" / file).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_a_page_parses_and_its_flags_exist(
    page: Path, flag_rows: dict[str, list[str]]
) -> None:
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language == "python":
            ast.parse(code)
        elif language == "toml":
            tomllib.loads(code)
        elif not language:
            for line in code.splitlines():
                if re.match(r"tutti [a-z]", line):
                    _check_flags(line, flag_rows)


def _check_flags(line: str, flag_rows: dict[str, list[str]]) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index("--")] if "--" in words else words
    command = " ".join(words[:2]) if " ".join(words[:2]) in flag_rows else words[0]
    assert command in flag_rows, line
    known = flag_rows[command] + (
        flag_rows["train"] if command in ("scale", "parity", "plan", "tune") else []
    )
    names = {name for row in known for name in re.findall(r"--[a-z][a-z-]*", row.split("|")[1])}
    for word in words[len(command.split()) :]:
        if re.match(r"--[a-z]", word) and word != "--help":
            flag = word.partition("=")[0]
            assert flag in names or flag.replace("--no-", "--", 1) in names, f"{flag} in: {line}"
