"""The speed bars, as ratios within one process: medians of interleaved pairs.

Question: what do paging, scheduling and sampling cost above the arithmetic that must be done?
Expected: the bars below, each printed beside what was measured.
Command: make bench   (about 6 minutes on two CPU cores; ARGS="decode mixed" for some parts)

| part | ours / base | must | goal |
|---|---|---|---|
| `host` | plan, pack, ledger and apply a step of 256 decodes / sum(range(256)) | 300 | |
| `waiting` | a scheduler's step with 100,000 requests waiting / with 100 | 1.3 | |
| `sim` | a simulated step of up to 256 rows with all around it / sum(range(256)) | 1000 | |
| `decode` | greedy decode step of 64 rows of 256 tokens / floor | 1.8 | 1.4 |
| | the same with 1,024 tokens | 2.2 | 1.6 |
| `sampling` | that of 64 x 256 with top-p and top-k / greedy | 1.1 | |
| `mixed` | 8 decodes at 1,024 beside a chunk of 256 / the two alone | 1.5 | |
| `skewed` | decode of one row of 4,096 among 63 of 64 / 64 rows of 127 | 2 | |
| `paging` | the attention kernel over blocks / over one block per row | as measured | |

Floor: the step's matrix products for the same number of tokens, chained, on the same weights, and
one max() over a contiguous array as large as the K and V of the real contexts.
"""
