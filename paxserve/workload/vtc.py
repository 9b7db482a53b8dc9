"""A trace of many clients: the Chatbot Arena requests on which fair sharing was judged.

Columns arrived_at_s, client, num_prefill_tokens, num_decode_tokens.

Source: the artifact of VTC (Sheng et al., OSDI 2024), section 5.
"""

from dataclasses import dataclass

from paxserve.traces.counts import VTC, read_counts
from paxserve.traces.settings import check_file
from paxserve.workload import Source, Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.content import Content
from paxserve.workload.sources.composed import with_content


@dataclass(frozen=True, slots=True)
class Vtc:
    """Attributes:

    path: the file, relative to the working directory.
    limit: read at most this many requests; 0 reads all.
    arrivals, content: choices of the axes of those names; trace takes the file's times.
    """

    path: str
    limit: int
    arrivals: Arrivals
    content: Content

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check path and limit."""
        check_file(self.path, self.limit)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        requests = read_counts(self.path, VTC, limit=self.limit)
        return with_content(requests, self.arrivals, self.content, seed=seed, vocabulary=vocabulary)
