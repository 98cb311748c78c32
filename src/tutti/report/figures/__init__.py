"""Figures of the report: functions that yield the figures of one source."""
