"""Shared by every command that measures: units, statistics, timing, terminal output, files."""
