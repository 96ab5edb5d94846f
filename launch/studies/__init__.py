"""Studies: ``mismatch`` and ``verify-sync`` start engines to measure or prove something; ``replay`` needs none."""
