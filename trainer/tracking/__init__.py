"""Records of a run: metrics.jsonl, the console line, MLflow, alarms, provenance."""
