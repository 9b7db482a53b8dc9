"""What studies have in common: cells that are kept, published curves, tables, pictures, a door.

A study is a folder with a README.md (question, command, tables, figures, conclusion) and a `run.py`
that writes what stands between markers in it.
"""
