"""Setups to plan: a small one whose numbers are worked by hand, and those of the configs."""

from dataclasses import dataclass, field
from typing import Any

from cost_builders import roofline, small_hardware, small_model

from paxserve.cost_model import Costs, Target
from paxserve.plan import Demand, Setup
from paxserve.plan.command import setup_of
from paxserve.settings import EngineSettings
from paxserve.step_shape import StepShape

SMALL_LIMITS = {
    "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 4,
}  # fmt: skip
SMALL_DEMAND = Demand(input_tokens=20, output_tokens=10, tpot_s=1e3)


def small_setup(**changed: Any) -> Setup:
    """The small model on one small device; `settings` are taken one by one."""
    given = {"model": small_model(), "hardware": small_hardware(), "cost_model": roofline()}
    settings = {name: changed.pop(name) for name in list(changed) if name in _SETTINGS}
    made = EngineSettings(**{**SMALL_LIMITS, **settings})
    return Setup(**{**given, **changed, "settings": made})


_SETTINGS = set(EngineSettings.__dataclass_fields__)


def configured(*overrides: str) -> Setup:
    """Of the configs."""
    return setup_of(overrides)[0]


@dataclass
class Asked:
    """A cost model that keeps the shapes it is asked for; every step takes a second per row and
    token.
    """

    shapes: list[StepShape] = field(default_factory=list)

    def open(self, target: Target) -> Costs:
        def of(shape: StepShape) -> tuple[float, ...]:
            self.shapes.append(shape)
            return (float(shape.num_rows), float(shape.num_tokens))

        return Costs(("rows", "tokens"), of)
