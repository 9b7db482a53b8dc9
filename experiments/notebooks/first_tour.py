# %% [markdown]
# # A first tour
#
# The same requests, served twice: static batching over contiguous maximum reservations, then
# continuous batching over paged blocks. No model: the scripted executor makes tokens out of the KV
# slots they depend on, and every step takes a second of virtual time, so that this page takes
# seconds and its numbers are the same everywhere. Drop `executor=scripted` and the three sizes, and
# the same runs on a model.

# %%
import json
import random
import tempfile
from pathlib import Path

import paxserve

# %% [markdown]
# ## Requests
#
# A workload is where requests come from. Here it is a file of our own: 60 prompts of 4 to 60
# tokens, outputs of 1 to 40, arriving over about a minute and a half.

# %%
rng = random.Random(0)
requests, arrival_s = [], 0.0
for number in range(60):
    arrival_s += rng.expovariate(0.6)
    requests.append(
        {
            "id": f"r{number}",
            "arrival_s": round(arrival_s, 3),
            "prompt_token_ids": [rng.randrange(1, 500) for _ in range(rng.randint(4, 60))],
            "max_tokens": rng.randint(1, 40),
        }
    )
workload = Path(tempfile.mkdtemp()) / "requests.jsonl"
workload.write_text("".join(json.dumps(request) + "\n" for request in requests))

common = [
    "executor=scripted",
    "workload=jsonl",
    f"workload.path={workload}",
    "limits.max_num_seqs=16",
    "limits.max_model_len=128",
    "limits.max_num_batched_tokens=128",
    "limits.num_blocks_override=49",  # 48 blocks of 16 tokens, and the null block
]

# %% [markdown]
# ## One run
#
# Overrides are those of the command line, `paxserve run ...`. The result has every figure, and the
# tables behind them as data frames.

# %%
result = paxserve.run(common, name="continuous")
result.summary[["completed", "duration", "mean_ttft_ms", "p99_ttft_ms", "num_preemptions"]]

# %%
result.requests[["request_id", "num_prompt_tokens", "num_output_tokens", "ttft_s", "e2e_s"]].head()

# %% [markdown]
# Who was in which row of the batch, and what KV memory held meanwhile:

# %%
result.plot_timeline()

# %%
result.plot_kv()

# %% [markdown]
# ## Every slot is accounted for
#
# The ledger has a row per step. Its classes sum to the pool, at every step.

# %%
classes = result.ledger.drop(columns=["step_id", "start_s", "duration_s"])
classes.sum(axis=1).unique()

# %% [markdown]
# ## Why did somebody wait?
#
# The decision log says what changed in each step, and why the head of the queue did not enter.

# %%
held_back = result.decisions[result.decisions["kind"] == "held_back"]
held_back["detail"].value_counts()

# %% [markdown]
# ## Static batching beside it
#
# A batch is fixed when it starts and dissolves when its longest request ends; each request is
# promised memory for the longest there can be.

# %%
both = paxserve.compare(
    {
        "static": [*common, "batching=static", "reservation=max", "placement=first_fit"],
        "continuous": result,
    }
)
both.table[["duration", "request_throughput", "mean_ttft_ms", "mean_running_requests"]]

# %%
both.plot_timeline()

# %%
both.plot_memory()

# %%
both.plot_latency()

# %% [markdown]
# The policies differ in everything but the tokens: each request's are the same in both runs.

# %%
outputs = both.requests.groupby("request_id")["output_token_ids"]
num_different = int((outputs.agg(lambda ids: len({tuple(one) for one in ids})) > 1).sum())
num_different

# %% [markdown]
# ## Looking closer
#
# `result.write_trace()` writes a timeline for <https://ui.perfetto.dev>: requests, rows, steps,
# preemptions, compilations and counters. `run_dir=DIR` among the overrides keeps a run's files, and
# `paxserve.Result.read(DIR)` reads them again.

# %%
trace = result.write_trace()
trace.name
