"""Names of other systems' fields, and correction blocks of verl and ROLL, read as Tandem's."""
