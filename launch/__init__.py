"""The ``tandem`` command, processes and roles: the only place that wires everything."""
