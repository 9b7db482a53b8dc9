"""Sweeps that are killed: at the nth change of the disk, or after a while.

Everything is forked from a process that has imported paxserve, so that a sweep of a few cells takes
a second: the sweep itself by `multiprocessing`'s fork server, its cells by `Forked`.
"""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import time
from types import SimpleNamespace

from paxserve import files
from paxserve.hydra_config import compose_config
from paxserve.sweep import child, processes
from paxserve.sweep.cell import Cell
from paxserve.sweep.run import sweep

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["paxserve.cli", "paxserve.sweep.run", "pandas", "killed_sweeps"])
SETTINGS = (
    "executor=scripted", "limits.max_model_len=32", "limits.num_blocks_override=9",
    "workload=synthetic", "workload.num_requests=2", "workload.lengths.input_tokens=4",
    "workload.lengths.output_tokens=3",
)  # fmt: skip
WHOLE_SWEEP, ITS_CELL = "the whole sweep", "its cell"


def cells_of(kinds):
    """A cell per letter, with seeds 0, 1, ...: o ends well, f fails by itself."""
    made = []
    for seed, kind in enumerate(kinds):
        wrong = ("limits.block_size=0",) if kind == "f" else ()
        overrides = (*SETTINGS, f"seed={seed}", *wrong)
        plain, choices, _ = compose_config(overrides)
        keys = ("limits.block_size", "seed")
        made.append(Cell(overrides=overrides, keys=keys, config={"choices": choices, **plain}))
    return made


class Forked:
    """As much of `subprocess.Popen` as a sweep uses, without starting Python anew."""

    def __init__(self, command, *, stdout, **_):
        read_end, self._write_end = os.pipe()
        self.stdin, self.returncode = self, None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, descriptor in enumerate((read_end, stdout.fileno(), stdout.fileno())):
                os.dup2(descriptor, number)
            os.close(self._write_end)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._run(command[len(processes.COMMAND) :])
        os.close(read_end)

    @staticmethod
    def _run(arguments):
        try:
            code = child.main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            code = 1
        os._exit(code)

    def poll(self):
        return self._collect(os.WNOHANG)

    def wait(self, timeout=None):
        return self._collect(0)

    def _collect(self, flags):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    kill = terminate

    def close(self):
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None


def _counted(log, at, victim, sweeps_pid):
    """A boundary that writes down where it is; the one with number `at` kills."""

    def boundary(what, path):
        with log.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            number = len(file.readlines())
            file.write(f"{what} {path.name.split('.')[0][:5]} {path.name}\n")
        if number == at and (victim == WHOLE_SWEEP or os.getpid() != sweeps_pid):
            if victim == WHOLE_SWEEP and os.getpid() != sweeps_pid:
                os.kill(sweeps_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    return boundary


def _sweep(path, kinds, resume, num_jobs, at, victim):
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    files.boundary = _counted(path.with_name("boundaries"), at, victim, os.getpid())
    os._exit(sweep(path, cells_of(kinds), resume=resume, runner=processes.processes(num_jobs)))


def run_sweep(
    path, kinds, *, resume="missing", num_jobs=1, at=None, victim=WHOLE_SWEEP, after_s=None
):
    """Sweep, perhaps not to the end.

    Returns its exit code, and the boundaries that it and its cells came by.
    """
    log = path.with_name("boundaries")
    log.write_text("")
    process = CONTEXT.Process(target=_sweep, args=(path, kinds, resume, num_jobs, at, victim))
    process.start()
    if after_s is not None:
        time.sleep(after_s)
        process.kill()
    process.join(120)
    assert process.exitcode is not None, "the sweep hangs"
    return process.exitcode, log.read_text().splitlines()
