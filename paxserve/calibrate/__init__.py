"""What steps take on the device that is here, measured and fitted.

probes.py     which steps are measured: designed ones to fit, drawn ones to hold the fit to
measuring.py  their times, step by step on the real executor, and those of served requests
profiling.py  from measurements to a `Profile`
command.py    `paxserve calibrate`
"""
