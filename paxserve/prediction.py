"""How long an order expects a request's output to be.

Owns: the three knobs of such orders, and the error of a predictor. In: a request, whose origin may
know its true length or a predictor's. Out: tokens. Must not know: the order.

A predictor that errs is modelled as the length times exp(error * z), z standard normal and fixed
by the request's id, so that a run can be repeated and policies can be compared on the same errors.
"""

import hashlib
import math
from statistics import NormalDist
from typing import Literal

from paxserve.numbers import MOST_TOKENS, real, whole
from paxserve.request import Request

type Known = Literal["oracle", "predicted"]

MOST_ERROR = 10.0


def check_knobs(*, length: object, error: object, default_tokens: object) -> None:
    """Raises ValueError for values that mean nothing."""
    if length not in ("oracle", "predicted"):
        raise ValueError(f"length must be oracle or predicted, got {length!r}")
    real("error", error, high=MOST_ERROR)
    if default_tokens is not None:
        whole("default_tokens", default_tokens, low=1, high=MOST_TOKENS)


def expected_output_tokens(
    request: Request, *, length: Known, error: float, default_tokens: int | None
) -> float:
    """The length of the whole output as far as it can be told.

    Args:
        request: any.
        length: what its origin says: its true length (oracle), or what a predictor said.
        error: sigma of the predictor's error; 0 for none.
        default_tokens: where the origin says nothing; None: as many as its client declared.
    """
    origin = request.origin
    is_oracle = length == "oracle"
    tokens = origin.num_true_output_tokens if is_oracle else origin.num_predicted_output_tokens
    if tokens is None:
        tokens = request.num_declared_tokens if default_tokens is None else default_tokens
    if not error:
        return tokens
    return tokens * math.exp(error * NormalDist().inv_cdf(draw(request.request_id)))


def draw(request_id: str) -> float:
    """A number in (0, 1), evenly spread over ids and always the same for one."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48
