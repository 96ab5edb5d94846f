"""What both engines compute alike: operations whose every row has the same bits in every batch, and the grids to which
weights are rounded. It imports only torch."""
