"""The 48 chat prompts written for this project, with arrivals over about 40 seconds.

Short questions to half-page texts, in `demo.jsonl` beside this file; the package carries it.
"""

from dataclasses import dataclass
from importlib import resources

from paxserve.workload import Source, Vocabulary
from paxserve.workload.jsonl import Jsonl


@dataclass(frozen=True, slots=True)
class Demo:
    """Attributes: as of `Jsonl`."""

    limit: int = 0
    arrival_scale: float = 1.0

    forces_lengths = False

    def __post_init__(self) -> None:
        """Check the settings."""
        self._file("demo.jsonl")

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        with resources.as_file(resources.files("paxserve.workload") / "demo.jsonl") as path:
            return self._file(str(path)).open(seed=seed, vocabulary=vocabulary)

    def _file(self, path: str) -> Jsonl:
        return Jsonl(path=path, limit=self.limit, arrival_scale=self.arrival_scale)
