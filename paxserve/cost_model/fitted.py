"""Steps take what was measured: coefficients for tokens, rows and context, per padded shape.

`paxserve calibrate` measures the device that it runs on; a file for another device can be written
by hand. Copies and swaps of blocks were not measured, and are refused.

Source: Agrawal et al., "Vidur", MLSys 2024 (profile, then predict); linear in batch, context and
prompt as the latency model of Zhong et al., "DistServe", OSDI 2024.
"""

from dataclasses import dataclass
from pathlib import Path

from paxserve.cost_model import Costs, Target
from paxserve.step_profile import read_profile


@dataclass(frozen=True, slots=True)
class Fitted:
    """Attributes:

    path: the profile, relative to the working directory.
    """

    path: str

    def __post_init__(self) -> None:
        """Check that it can be a path."""
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"cost_model.path must be the path of a file, got {self.path!r}")

    def open(self, target: Target) -> Costs:
        """See `CostModel.open`.

        Raises:
            FileNotFoundError: there is no such profile.
            ValueError: it is malformed, or of something else.
        """
        profile = read_profile(Path(self.path))
        profile.check(target)
        return profile.costs()
