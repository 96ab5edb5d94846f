"""Names and blocks of verl, ROLL, TRL, slime and OpenRLHF, read as Tandem's."""
