"""`python -m experiments.study.index`: the list of all studies, from their own READMEs.

Owns: `experiments/README.md`. In: each study's title and verdict. Out: a line per study.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.study.readme import table
from paxserve.files import write_text

EXPERIMENTS = Path(__file__).parents[1]
HEAD = """# Studies

A folder each: question, command, tables, picture, conclusion; what was published beside what is
measured, with the reason where they differ. The command writes the tables anew; `--fast` runs a
small sample and writes nothing; `--cells DIR` keeps finished runs there. Made by
`python -m experiments.study.index`.

"""


class Study(NamedTuple):
    """What its README says: the title, and the lines of its verdict."""

    name: str
    title: str
    lines: Sequence[str]

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """From a folder's README."""
        text = (folder / "README.md").read_text(encoding="utf-8")
        verdict = re.search(r"<!-- verdict -->\n(.*?)<!-- /verdict -->", text, re.DOTALL)
        lines = re.findall(r"^- \*\*(.+?)\.\*\*", verdict[1], re.MULTILINE) if verdict else []
        return cls(folder.name, text.splitlines()[0].removeprefix("# "), lines)


def studies() -> list[Study]:
    """All of them, by name."""
    found = sorted(path.parent for path in EXPERIMENTS.glob("*/README.md"))
    return [Study.read(folder) for folder in found]


def index() -> str:
    """The whole file."""
    rows = []
    for study in studies():
        held = study.lines.count("Holds")
        rows.append(
            [f"[{study.name}]({study.name}/README.md)", study.title, held, len(study.lines) - held]
        )
    return HEAD + table(["study", "question", "holds", "does not"], rows) + "\n"


if __name__ == "__main__":
    write_text(EXPERIMENTS / "README.md", index())
    sys.exit(0)
