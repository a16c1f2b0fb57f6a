"""The ground floor: processes, signals, environment, logging, redaction, files, names. Nothing here knows a model."""
