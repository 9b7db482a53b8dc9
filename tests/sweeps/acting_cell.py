"""Stands in for `paxserve.sweep.child` where a test is about the sweep: starts at once, and does
what its first override says."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(directory, act, *overrides):
    path = Path(directory)
    with (path.parent / "started.txt").open("a") as file:
        file.write(f"{act} {os.getpid()}\n")
    print(f"doing {act}", flush=True)
    what, _, number = act.removeprefix("act=").partition("-")
    if what == "fail" and not (path.parent / "mended").exists():
        (path / "error.txt").write_text(f"number {number} is wrong\n\nTraceback ...")
        return 1
    if what == "kill" and not (path.parent / "mended").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        return int(number)
    if what == "sleep":
        time.sleep(600)
    if what == "wait":  # until as many cells have begun
        while len((path.parent / "started.txt").read_text().splitlines()) < int(number):
            time.sleep(0.01)
    (path / "summary.json").write_text(json.dumps({"duration": 1.5}))
    (path / "complete").write_text("")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
