"""Measurement: load, results, statistics, tuning and reports."""
