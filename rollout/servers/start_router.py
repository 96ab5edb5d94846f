"""``python -m rollout.servers.start_router KEY_FILE ARGUMENT...``: sglang-router with the key of KEY_FILE.

sglang-router takes its key only from its command line, which every user of a host can read. Here the key is
added inside the process.
"""

import sys
from pathlib import Path

from rollout.run_key import run_key


def main(key_file: str, *arguments: str) -> None:
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args([*arguments, "--api-key", run_key(Path(key_file)).secret]))


if __name__ == "__main__":
    main(*sys.argv[1:])
