"""`tutti report`: one self-contained HTML page from runs, scaling results and result files."""
