"""Functions that yield the figures of the report, for a run or a result file."""
