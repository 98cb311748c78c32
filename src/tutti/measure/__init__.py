"""Code that all measuring commands share: units, statistics, timing, terminal output, files."""
