"""Notebooks as paired scripts: `python experiments/notebooks/pair.py` rewrites every .ipynb.

The .py files are the source (cells begin with `# %%`, text cells with `# %% [markdown]`); the
.ipynb beside each is made from it, without outputs, and is not edited by hand.
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARKER = "# %%"


def scripts() -> list[Path]:
    """The scripts that have a notebook."""
    return sorted(path for path in HERE.glob("*.py") if path != Path(__file__))


def notebook(script: str) -> dict[str, Any]:
    """A notebook, in format 4.5, from a script in cells."""
    cells = [_cell(number, text) for number, text in enumerate(script.split(f"{MARKER}")[1:])]
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, text: str) -> dict[str, Any]:
    heading, _, body = text.partition("\n")
    lines = body.strip("\n").split("\n")
    is_text = heading.strip() == "[markdown]"
    if is_text:
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    source = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
    cell = {"id": f"cell-{number}", "metadata": {}, "source": source}
    if is_text:
        return {"cell_type": "markdown", **cell}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **cell}


def text(script: Path) -> str:
    """The notebook file of a script."""
    return json.dumps(notebook(script.read_text(encoding="utf-8")), indent=1) + "\n"


def main() -> int:
    """Write the notebooks."""
    for script in scripts():
        script.with_suffix(".ipynb").write_text(text(script), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
