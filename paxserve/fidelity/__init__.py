"""How near the simulated engine comes to the real one: the same workload through both.

bench.py      one real executor and one workload; engines that are real, simulated, or retold
retold.py     what a simulated engine is told of a finished run: its tokens, its step times
comparing.py  decisions row by row, figures one by one
command.py    `paxserve fidelity`
"""
