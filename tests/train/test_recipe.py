"""Recipe files: round trip through TOML, and errors that suggest the nearest key."""

from pathlib import Path

import pytest

from tutti.train.recipe import RECIPES, read_recipe, with_values, write_recipe
from tutti.world.errors import UsageError


@pytest.mark.parametrize("name", RECIPES)
def test_a_written_recipe_reads_back_the_same(name: str, tmp_path: Path) -> None:
    changed = with_values(
        RECIPES[name],
        {
            "data": {"dataset": 'my.module:a"b\\c', "data_dir": Path("/some where")},
            "model": "my.module:model",
            "optimization": {"clip": None, "betas": (0.8, 0.9)},
            "length": {"steps": None, "evaluate": False},
        },
    )
    path = tmp_path / "recipe.toml"
    path.write_text(write_recipe(changed, name))
    assert read_recipe(str(path)) == changed


def test_a_file_changes_only_the_given_keys_of_its_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "gpt"\n[optimization]\nlr = 1\n[architecture]\nlayers = 2\n')
    mine = read_recipe(str(path))
    assert mine.optimization.lr == 1.0 and isinstance(mine.optimization.lr, float)
    assert mine == with_values(
        RECIPES["gpt"], {"optimization": {"lr": 1.0}, "architecture": {"layers": 2}}
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            'base = "gpt"\n[optimization]\nlearning_rate = 1',
            "no key optimization.learning_rate: did you mean optimization.lr",
        ),
        ('base = "gpt"\nlr = 1', "no key lr: did you mean optimization.lr"),
        ('base = "gpt"\n[length]\nlearning_rate = 1', "did you mean optimization.lr"),
        ('base = "gpt"\n[data]\nxyzzy = 1', "no key data.xyzzy: choose from dataset"),
        ("[optimization]\nlr = 1", "there is no base. Begin the file with base = one of"),
        ('base = "gpt"\nranks = "two"', "ranks must be a int, got 'two'"),
        ('base = "gpt"\nranks = 0', "ranks must be at least 1, got 0"),
        ('base = "gpt"\n[optimisation]\nlr = 1', "no key optimisation: did you mean optimization"),
        ('base = "gpt"\n[architecture]\nlayer = 1', "did you mean architecture.layers"),
        (
            'base = "gpt"\n[optimization]\nlr = "high"',
            "optimization.lr must be a float, got 'high'",
        ),
        (
            'base = "gpt"\n[optimization]\nschedule = "zigzag"',
            "must be one of constant, cosine, linear, got 'zigzag'",
        ),
        ('base = "gpt"\n[architecture]\nheads = 3', "128 / 3 .*dim 132"),
        ('base = "gpt"\noptimization = 1', "is a section"),
        ('base = "gtp"', "one of .*gpt"),
        ("lr = = 2", "Invalid"),
    ],
)
def test_an_error_in_a_file_names_the_key(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_recipe(str(path))


def test_an_unknown_recipe_suggests_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="no recipe 'lennet': did you mean lenet"):
        read_recipe("lennet")
    with pytest.raises(UsageError, match="No such file"):
        read_recipe("nowhere.toml")
