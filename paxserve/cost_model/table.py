"""Steps take what somebody measured, or fitted to what they measured.

The formats lie in `paxserve/profiles/`, each with what it has and what it lacks. Settings that a
format has no use for must stay null.

Source: the profiles published with DistServe (OSDI 2024), Splitwise (ISCA 2024) and Vidur (MLSys
2024).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paxserve.cost_model import Costs, Target
from paxserve.cost_model.roofline import Roofline
from paxserve.profiles import Files, Format, distserve, splitwise, vidur

_FORMATS: Mapping[str, Format] = {
    "distserve": distserve.FORMAT,
    "splitwise": splitwise.FORMAT,
    "vidur": vidur.FORMAT,
}
_HOST_LINK_EFFICIENCY = 0.8  # copies over PCIe 4 reach about 25 of 32 GB/s
_OPTIONAL = ("entry", "links_path", "compute_efficiency", "bandwidth_efficiency")


@dataclass(frozen=True, slots=True)
class Table:
    """Attributes:

    path: the profile.
    format: distserve, splitwise or vidur.
    entry: which of several in the file, as facebook/opt-13b or llama2-70b/a100-80gb.
    links_path: of sums over a group; vidur, over several devices.
    compute_efficiency, bandwidth_efficiency: as of `roofline`, of what is not in the profile;
        vidur.
    host_s_per_step: beside what was measured.
    """

    path: str
    format: str
    entry: str | None
    links_path: str | None
    compute_efficiency: float | None
    bandwidth_efficiency: float | None
    host_s_per_step: float

    def __post_init__(self) -> None:
        """Check that the format gets what it needs, and nothing that it does not read."""
        if not isinstance(self.path, str):
            raise ValueError(f"cost_model.path must be the name of a file, got {self.path!r}")
        if not isinstance(self.format, str) or self.format not in _FORMATS:
            raise ValueError(
                f"cost_model.format must be one of {', '.join(_FORMATS)}, got {self.format!r}"
            )
        for name in ("entry", "links_path"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(
                    f"cost_model.{name} must be a name or null, got {getattr(self, name)!r}"
                )
        kind = _FORMATS[self.format]
        for name in _OPTIONAL:
            is_set = getattr(self, name) is not None
            if is_set and name not in (*kind.needs, *kind.takes):
                raise ValueError(
                    f"cost_model.{name} was set, but format={self.format} does not read it: "
                    "leave it null"
                )
            if not is_set and name in kind.needs:
                raise ValueError(f"format={self.format} needs cost_model.{name}: set it")
        self._rest()

    def open(self, target: Target) -> Costs:
        """See `CostModel.open`."""
        files = Files(self.path, self.entry, self.links_path)
        return _FORMATS[self.format].open(files, target, self._rest().open(target))

    def _rest(self) -> Roofline:
        """For what no profile has; where a profile has it, the efficiencies are not looked at."""
        return Roofline(
            compute_efficiency=_or_one(self.compute_efficiency),
            bandwidth_efficiency=_or_one(self.bandwidth_efficiency),
            link_efficiency=_HOST_LINK_EFFICIENCY,
            host_s_per_step=self.host_s_per_step,
            host_s_per_row=0.0,
        )


def _or_one(share: float | None) -> float:
    return 1.0 if share is None else share
