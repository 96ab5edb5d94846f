"""``python -m rollout.servers.start_router KEY_FILE ARGUMENT...``: sglang-router, which takes its key from
its command line only.

Every user of a host can read command lines. This one names the key's file; the key itself is added inside the
process.
"""

import sys
from pathlib import Path

from rollout.run_key import run_key


def main(key_file: str, *arguments: str) -> None:
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args([*arguments, "--api-key", run_key(Path(key_file)).secret]))


if __name__ == "__main__":
    main(*sys.argv[1:])
