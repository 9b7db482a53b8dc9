# %% [markdown]
# # A new policy in one cell
#
# In which order should waiting requests enter? First come, first served is fair but lets a short
# prompt wait behind long ones; shortest first starves the long ones. A policy in between: every
# prompt token counts as some seconds of later arrival.

# %%
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import paxserve

# %% [markdown]
# ## The policy
#
# Any frozen dataclass with the methods of its axis will do; `paxserve/admission/__init__.py` says
# which. It only ranks: the scheduler owns the queue.


# %%
@dataclass(frozen=True)
class LengthAware:
    """A prompt token counts as `s_per_token` of later arrival: 0 is first come, first served."""

    s_per_token: float = 0.0
    displaces_running = False

    def key(self, state, request):
        return (request.arrival_s + self.s_per_token * request.num_prompt_tokens,)


# %% [markdown]
# ## A workload that tells them apart
#
# Mostly short prompts, some long ones, more than the batch can take at once. No model is needed:
# the scripted executor takes a second of virtual time per step.

# %%
rng = random.Random(1)
requests, arrival_s = [], 0.0
for number in range(120):
    arrival_s += rng.expovariate(1.2)
    num_tokens = rng.randint(60, 100) if rng.random() < 0.25 else rng.randint(4, 12)
    requests.append(
        {
            "id": f"r{number}",
            "arrival_s": round(arrival_s, 3),
            "prompt_token_ids": [rng.randrange(1, 500) for _ in range(num_tokens)],
            "max_tokens": rng.randint(2, 12),
        }
    )
workload = Path(tempfile.mkdtemp()) / "requests.jsonl"
workload.write_text("".join(json.dumps(request) + "\n" for request in requests))

common = [
    "executor=scripted",
    "workload=jsonl",
    f"workload.path={workload}",
    "limits.max_num_seqs=6",
    "limits.max_model_len=128",
    "limits.max_num_batched_tokens=64",
    "limits.num_blocks_override=65",
]

# %% [markdown]
# ## Running it
#
# A policy object takes the place of an axis's choice.

# %%
runs = {
    f"{knob:g} s per token": paxserve.run(
        common, policies={"admission": LengthAware(s_per_token=knob)}
    )
    for knob in (0.0, 0.1, 0.3, 1.0, 10.0)
}
found = paxserve.compare({"fcfs": [*common, "admission=fcfs"], **runs})
table = found.table[["mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "duration"]]
table

# %% [markdown]
# As the knob grows, the median falls and the tail rises.

# %%
found.plot_latency()

# %% [markdown]
# Who pays: mean time to first token of short and of long prompts.

# %%
by_length = found.requests.assign(is_long=found.requests["num_prompt_tokens"] >= 60)
ttft_s = by_length.groupby(["run", "is_long"], sort=False)["ttft_s"].mean().unstack()
ttft_s

# %% [markdown]
# To keep the policy: put the class into `paxserve/admission/length_aware.py`, its fields into
# `configs/admission/length_aware.yaml`, and the conformance tests cover it; or leave it in a module
# of your own and say `admission=my_module:LengthAware` on the command line.
