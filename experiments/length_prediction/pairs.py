"""A workload of true lengths and what a predictor said of them: `workload=...pairs:PredictedPairs`.

Source: the pairs of SSJF (Qiu et al., 2024): Vicuna-13B's answers on LMSYS-Chat-1M and the class
that a BERT model predicts. A class counts as the mean true length of its members.
"""

from dataclasses import dataclass

import numpy as np

from paxserve.draws import Stream, stream, token_ids
from paxserve.numbers import MOST_REQUESTS, real, whole
from paxserve.request import Origin
from paxserve.traces.csv_file import read_csv
from paxserve.workload import Arrival, Source, Vocabulary
from paxserve.workload.sources.listed import Listed

_MEAN_PROMPT, _SIGMA = 92.2, 1.0  # LMSYS: mean 92, median 28 of nanoflow/lmsys.csv


@dataclass(frozen=True, slots=True)
class PredictedPairs:
    """Attributes:

    path: a CSV file with columns output_tokens and predicted.
    num_requests: drawn from it, with replacement.
    rate: of a Poisson process, requests/s; 0: all at once.
    """

    path: str
    num_requests: int
    rate: float

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        whole("num_requests", self.num_requests, low=1, high=MOST_REQUESTS)
        real("rate", self.rate, high=1e6)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        rows = [[int(text) for text in texts]
                for _, texts in read_csv(self.path, ["output_tokens", "predicted"])]  # fmt: skip
        pairs = np.array(rows)
        rng = stream(seed, Stream.LENGTHS)
        drawn = pairs[rng.integers(len(pairs), size=self.num_requests)]
        expected = {k: float(pairs[pairs[:, 1] == k, 0].mean()) for k in np.unique(pairs[:, 1])}
        mean = np.log(_MEAN_PROMPT) - _SIGMA**2 / 2
        prompts = np.clip(rng.lognormal(mean, _SIGMA, self.num_requests), 1, 2000).astype(int)
        gaps = stream(seed, Stream.ARRIVALS).exponential(size=self.num_requests)
        times = np.cumsum(gaps) / self.rate if self.rate else np.zeros(self.num_requests)
        return Listed(
            [
                Arrival(
                    request_id=str(number),
                    arrival_s=float(times[number]),
                    prompt_token_ids=token_ids(
                        int(prompts[number]),
                        vocabulary.size,
                        seed=seed,
                        kind=Stream.CONTENT,
                        number=number,
                    ),
                    max_tokens=max(1, int(length)),
                    ignore_eos=True,
                    origin=Origin(
                        num_true_output_tokens=max(1, int(length)),
                        num_predicted_output_tokens=max(1, round(expected[kind])),
                    ),
                )
                for number, (length, kind) in enumerate(drawn.tolist())
            ]
        )
