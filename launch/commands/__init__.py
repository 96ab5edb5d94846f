"""One module per command of ``tandem`` (several small ones share ``train``). Arguments are parsed in
``launch/cli/``.
"""
