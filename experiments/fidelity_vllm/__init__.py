"""Measured vLLM runs against the simulated engine; see README.md.

served.py   what is known of a run, measured or simulated: request times, running over time
score.py    how far a simulated run is from the measured one
fit.py      the three factors that bring it nearest, on half of the requests
run.py      the study
"""
