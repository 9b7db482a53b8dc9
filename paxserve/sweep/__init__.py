"""Sweeps: many runs, each in a process of its own, each found again by what it was asked.

    overrides -> cells (`cell.py`) -> processes (`processes.py`, `child.py`) -> table (`table.py`)
                        \\-> what is on disk (`directory.py`) decides which of them run

A cell is one run. Its name is a hash of its resolved config, its directory SWEEP/<name>/ holds the
files of that run or `error.txt`, and comes into being by one rename when the run has ended. So a
sweep that was ended anywhere goes on where it was: nothing but directories is remembered.
"""
