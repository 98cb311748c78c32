"""Trains LeNet on two ranks from Python, continues the run, and reads its metrics.

    python examples/train_from_python.py runs/python

The same code works in a notebook. `tutti.train` returns the content of summary.json.
"""

import csv
import sys
from pathlib import Path

import tutti

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/python")

# Keyword arguments are values of the recipe, named as the flags of `tutti train`.
summary = tutti.train(
    "lenet", ranks=2, out=out, pixels=8, epochs=4, ema=0.9, keep_best="accuracy", patience=3
)
print(f"step {summary['steps']}: test accuracy {summary['test_accuracy']:.3f}")
print(f"best checkpoint: step {summary['best']['step']}")

# The run continues with another layout, for two more epochs.
summary = tutti.train(resume=True, out=out, layout="shard2", epochs=6)
print(f"step {summary['steps']}: layout {summary['layout']}")

with (out / "metrics.csv").open() as file:
    losses = [float(row["loss"]) for row in csv.DictReader(file)]
print(f"{len(losses)} losses, the last is {losses[-1]:.3f}")
