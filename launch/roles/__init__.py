"""The processes of a run from inside: learn, serve, sample, and the command lines that start them."""
