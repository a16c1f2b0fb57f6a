"""Processes, signals, environment, logging, redaction, files and names. Nothing in this package depends on models."""
