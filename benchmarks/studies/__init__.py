"""Studies: grids of ordinary ``tandem train`` runs, resumable cell by cell, with their tables and figures."""
