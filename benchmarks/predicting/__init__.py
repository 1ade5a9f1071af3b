"""Predictions of published measurements, one module for each kind of rows."""
