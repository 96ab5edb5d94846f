"""``python -m launch`` is ``tandem``."""

from launch.cli import main

main()
