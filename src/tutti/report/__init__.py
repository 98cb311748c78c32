"""One self-contained HTML page from runs, scalings and result files."""
