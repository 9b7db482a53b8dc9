"""Splitwise's table of steps: prompts by their tokens, decodes by their rows.

The table varies one of prompt size, batch and output length at a time around 512 tokens, one row
and 128 tokens. `prompt_time` follows prompt size times batch, however that comes about;
`token_time` follows the batch, and with one row shows neither contexts nor lengths, so it knows no
context. A step of both takes what its tokens take as one prompt, or what its decodes take,
whichever is longer. There are no sizes in the file: that `entry` (MODEL/HARDWARE) is what is
simulated, it cannot check.

Source: Patel et al., "Splitwise", ISCA 2024, and `perf_model.csv` of its simulator (milliseconds).
"""

from paxserve.cost_model import Costs, Target
from paxserve.numbers import MOST_TOKENS, real_text, whole_text
from paxserve.profiles import Files, Format, terms_of
from paxserve.profiles.curve import Curve
from paxserve.step_shape import StepShape
from paxserve.traces.csv_file import read_csv

TERMS = ("decodes", "prompts")
_MS = 1e-3
_MOST_MS = 1e7
_COLUMNS = (
    "model",
    "hardware",
    "tensor_parallel",
    "prompt_size",
    "batch_size",
    "prompt_time",
    "token_time",
)


def read(path: str, entry: str, num_devices: int) -> tuple[Curve, Curve]:
    """Seconds of prompts over their tokens, and of decodes over their rows.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of Splitwise's, or has nothing of the entry on such a group.
    """
    prompts, decodes, found = [], [], set()
    for place, (model, hardware, size, prompt, batch, prompt_ms, token_ms) in read_csv(
        path, _COLUMNS, what="profile"
    ):
        found.add(f"{model}/{hardware} on {size}")
        if f"{model}/{hardware} on {size}" != f"{entry} on {num_devices}":
            continue
        num_rows = whole_text(f"{place} batch_size", batch, low=1, high=MOST_TOKENS)
        num_tokens = whole_text(f"{place} prompt_size", prompt, low=1, high=MOST_TOKENS)
        prompt_s = _MS * real_text(f"{place} prompt_time", prompt_ms, high=_MOST_MS)
        token_s = _MS * real_text(f"{place} token_time", token_ms, high=_MOST_MS)
        prompts.append((num_rows * num_tokens, prompt_s))
        decodes.append((num_rows, token_s))
    if not prompts:
        raise ValueError(
            f"{path} has no {entry} on {num_devices} devices; it has {', '.join(sorted(found))}"
        )
    where = f"{path} {entry} on {num_devices}"
    return Curve(f"{where}, prompt tokens", prompts), Curve(f"{where}, rows of decodes", decodes)


def open_profile(files: Files, target: Target, rest: Costs) -> Costs:
    """See `Format.open`."""
    assert files.entry is not None
    prompts, decodes = read(files.path, files.entry, target.num_devices)
    others = terms_of(rest, "moves", "host")

    def of(shape: StepShape) -> tuple[float, ...]:
        decodes_s = decodes.at(shape.num_decodes) if shape.num_decodes else 0.0
        prompts_s = 0.0
        if shape.num_chunks:
            prompts_s = max(0.0, prompts.at(shape.num_tokens) - decodes_s)
        return (decodes_s, prompts_s, *others(rest.of(shape)))

    return Costs((*TERMS, "moves", "host"), of)


FORMAT = Format(needs=("entry",), takes=(), open=open_profile)
