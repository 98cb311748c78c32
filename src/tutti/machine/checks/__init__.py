"""Checks of a machine's health and configuration. Every check names a cure."""
