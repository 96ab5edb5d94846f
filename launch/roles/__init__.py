"""The processes of a run from inside: learn, serve and sample, and the command lines that start them."""
