"""The real executor carries out whole plans: rows that write nothing, copies, swaps.

Plans are made by hand, on the model `tiny` with a KV pool full of NaN; every expected token comes
from the same sequence alone, untouched by any of this.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_llama import logits
from real_builders import kv_pointers, loaded, make_real, poison, random_ids

from paxserve.device.block_moves import Move, MoveShape
from paxserve.device.compiles import CompileCounter
from paxserve.device.forward import StepShape
from paxserve.device.kv_blocks import KvLayout
from paxserve.pack import Variant
from paxserve.step import BlockCopy, RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

PROMPT = tuple(random_ids(19))  # one whole block of 16, and 3 tokens of the next
OTHER = tuple(random_ids(18, seed=1))
GREEDY = RowSampling()


def tiny():
    return loaded("tiny")


def bytes_of_a_block():
    return KvLayout(tiny().config, 16, "xla", jnp.dtype("float32")).bytes_per_block


def run(real, plan):
    real.submit(plan)
    return real.collect()


def tokens_of(result):
    return [output.tokens[0] for output in result.outputs]


def enter(sequence_id, row, ids, sampling, blocks):
    """What a plan says when a sequence with this prompt enters a row."""
    return {
        "entries": (RowEntry(sequence_id, row, len(ids), sampling),),
        "table_writes": (TableWrite(row, 0, blocks),),
    }


def alone(real, ids, num_tokens, sampling=GREEDY):
    """Tokens of a sequence that nobody shares with, copies or swaps, in blocks 20 and 21."""
    blocks = tuple(range(20, 20 + -(-(len(ids) + num_tokens) // 16)))
    plan = StepPlan(
        1, (RowPlan(99, 3, 0, len(ids), 1, ids),), **enter(99, 3, ids, sampling, blocks)
    )
    tokens = tokens_of(run(real, plan))
    for i in range(num_tokens - 1):
        plan = StepPlan(2 + i, (RowPlan(99, 3, len(ids) + i, 1, 1, ()),))
        tokens += tokens_of(run(real, plan))
    return tokens


def copies(*pairs):
    return tuple(BlockCopy(*pair) for pair in pairs)


# Samples of one prompt.


def forked(num_samples=4, num_decodes=15):
    """All samples start in the prompt's last step; then all but the first copy block 2, and each
    goes on into a block of its own.
    """
    rows = range(num_samples)
    sampling = [RowSampling(temperature=1.0, top_p=0.9, seed=70 + j) for j in rows]
    yield StepPlan(
        step_id=1,
        rows=(
            RowPlan(0, 0, 0, 19, 1, PROMPT),
            *[RowPlan(j, j, 18, 1, 1, PROMPT[18:]) for j in rows if j],
        ),
        entries=tuple(RowEntry(j, j, 19, sampling[j]) for j in rows),
        table_writes=tuple(TableWrite(j, 0, (1, 2)) for j in rows),
        unwritten=tuple(rows)[1:],
    )
    for i in range(num_decodes):
        writes, copied = (), ()
        if i == 0:
            writes = tuple(TableWrite(j, 1, (3 + j,)) for j in rows if j)
            copied = copies(*[(2, 3 + j) for j in rows if j])
        if 19 + i == 32:
            writes = tuple(TableWrite(j, 2, (8 + j,)) for j in rows)
        yield StepPlan(
            step_id=2 + i,
            rows=tuple(RowPlan(j, j, 19 + i, 1, 1, ()) for j in rows),
            table_writes=writes,
            copies=copied,
        )


def test_each_sample_of_a_fork_has_the_tokens_it_has_alone():
    real = make_real(tiny(), copies=True)
    pointers = kv_pointers(real)
    results = [run(real, plan) for plan in forked()]
    found = np.array([tokens_of(result) for result in results]).T.tolist()
    assert kv_pointers(real) == pointers
    assert {result.swap_bytes for result in results} == {0}
    for j in range(4):
        sampling = RowSampling(temperature=1.0, top_p=0.9, seed=70 + j)
        assert found[j] == alone(real, PROMPT, 16, sampling)
    assert len({tuple(tokens) for tokens in found}) == 4


def test_unwritten_rows_write_nothing():
    """Their input is another token here, so that a write would show in the prompt's slots."""
    real, single = make_real(tiny()), make_real(tiny())
    prompt = next(forked())
    first, *others = prompt.rows
    run(single, prompt._replace(rows=(first,), unwritten=()))
    run(real, prompt._replace(rows=(first, *[row._replace(tokens=(5,)) for row in others])))
    for kv, expected in zip(real.kv_blocks, single.kv_blocks, strict=True):
        np.testing.assert_allclose(kv, expected, atol=1e-5, rtol=0)
        assert np.isnan(np.asarray(kv)[3:]).all()
        assert np.isnan(np.asarray(kv)[2, :, :, 3:]).all()


def log_softmax(ids):
    last = logits(tiny().config, tiny().parameters, list(ids))[-1].astype(np.float64)
    return last - last.max() - math.log(np.exp(last - last.max()).sum())


def best_beams(candidates, width):
    return sorted(candidates, key=lambda beam: -beam[0])[:width]


def beams_by_numpy(width, num_tokens):
    """(score, tokens) of the best beams, from the whole distribution."""
    beams = [(0.0, ())]
    for _ in range(num_tokens):
        candidates = []
        for score, tokens in beams:
            scores = log_softmax(PROMPT + tokens)
            candidates += [(score + scores[t], (*tokens, int(t))) for t in range(len(scores))]
        beams = best_beams(candidates, width)
    return beams


def beams_by_plans(real, width, num_tokens):
    """The same from the best `2 * width` of each row alone; a beam's partial block is copied to a
    block of its next owner in every step, from whichever row it was forked.
    """
    sampling = RowSampling(num_logprobs=2 * width)
    plan = StepPlan(1, (RowPlan(0, 0, 0, 19, 1, PROMPT),), **enter(0, 0, PROMPT, sampling, (1, 2)))
    beams, owned = [(0.0, ())], [2]
    for i in range(num_tokens):
        candidates = []
        for parent, (beam, output) in enumerate(zip(beams, run(real, plan).outputs, strict=True)):
            (logprobs,) = output.logprobs
            assert len(set(logprobs.top_ids)) == 2 * width
            for token, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                candidates.append((beam[0] + logprob, (*beam[1], token), parent))
        chosen = best_beams(candidates, width)
        beams = [beam[:2] for beam in chosen]
        parents, fresh = (
            [owned[beam[2]] for beam in chosen],
            [3 + width * (i % 2) + j for j in range(width)],
        )
        owned = fresh
        plan = StepPlan(
            step_id=2 + i,
            rows=tuple(RowPlan(j, j, 19 + i, 1, 1, beams[j][1][-1:]) for j in range(width)),
            entries=tuple(RowEntry(j, j, 19, sampling) for j in range(width)),
            table_writes=tuple(TableWrite(j, 0, (1, fresh[j])) for j in range(width)),
            copies=copies(*zip(parents, fresh, strict=True)),
        )
    return beams


@pytest.mark.parametrize("width", [2, 4])
def test_beams_found_from_the_best_2_width_ids_are_those_of_the_whole_distribution(width):
    expected = beams_by_numpy(width, 6)
    found = beams_by_plans(make_real(tiny(), copies=True), width, 6)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([b[0] for b in found], [b[0] for b in expected], atol=1e-4)
    assert len({tokens[0] for _, tokens in expected}) < width  # so beams did fork and die


# Swaps.


def test_a_step_may_do_nothing_but_swap_out():
    real = make_real(tiny(), num_host_blocks=1)
    before = [np.asarray(kv[1]) for kv in real.kv_blocks]
    result = run(real, StepPlan(1, (), swap_out=copies((1, 0))))
    assert (result.outputs, result.padded_rows, result.padded_tokens) == ((), 0, 0)
    assert (result.swap_bytes, result.num_compiles) == (bytes_of_a_block(), 1)
    for kv, host in zip(before, real._moves._host, strict=True):
        np.testing.assert_array_equal(host[0], kv)


def test_swapped_sequences_go_on_as_if_they_had_stayed():
    """7 is swapped out and 8 takes its blocks in that very step; then they change places in one
    step, so that each block is read by one swap and written by the other.
    """
    real = make_real(tiny(), num_host_blocks=4)
    expected = {7: alone(real, PROMPT, 6), 8: alone(real, OTHER, 5)}
    poison(real, range(25))
    results, found = [], {7: [], 8: []}

    def step(sequence_id, ids, *, enters=True, **moves):
        done = len(found[sequence_id])
        known = (*ids, *found[sequence_id])
        first = 0 if not done else len(known) - 1
        tokens = known[first:] if enters else ()
        changes = enter(sequence_id, 1, ids, GREEDY, (3, 5)) if enters else {}
        row = RowPlan(sequence_id, 1, first, len(known) - first, 1, tokens)
        pointers = kv_pointers(real)
        results.append(run(real, StepPlan(len(results), (row,), **changes, **moves)))
        assert kv_pointers(real) == pointers
        found[sequence_id] += tokens_of(results[-1])

    step(7, PROMPT)
    step(7, PROMPT, enters=False)
    step(8, OTHER, swap_out=copies((3, 0), (5, 2)))
    step(8, OTHER, enters=False)
    poison(real, [b for b in range(25) if b not in (3, 5)])
    step(7, PROMPT, swap_out=copies((3, 3), (5, 1)), swap_in=copies((0, 3), (2, 5)))
    step(7, PROMPT, enters=False)
    step(8, OTHER, swap_out=copies((5, 2), (3, 0)), swap_in=copies((1, 5), (3, 3)))
    poison(real, [b for b in range(25) if b not in (3, 5)])
    step(8, OTHER, enters=False)
    step(8, OTHER, enters=False)
    poison(real, range(25))
    step(7, PROMPT, swap_in=copies((0, 3), (2, 5)))
    step(7, PROMPT, enters=False)
    assert found == expected
    size = bytes_of_a_block()
    assert [r.swap_bytes // size for r in results] == [0, 0, 2, 0, 4, 0, 4, 0, 0, 2, 0]
    assert {r.swap_bytes % size for r in results} == {0}


def test_what_is_not_swapped_back_is_noticed():
    """Else the poison above would show nothing."""
    real = make_real(tiny(), num_host_blocks=2)
    run(real, StepPlan(1, (RowPlan(7, 1, 0, 19, 1, PROMPT),),
                       **enter(7, 1, PROMPT, GREEDY, (3, 5))))  # fmt: skip
    decode = StepPlan(2, (RowPlan(7, 1, 19, 1, 1, ()),))
    run(real, decode._replace(swap_out=copies((3, 0), (5, 1))))
    poison(real, [3, 5])
    assert tokens_of(run(real, decode._replace(swap_in=copies((0, 3))))) == [-1]
    assert tokens_of(run(real, decode._replace(swap_in=copies((0, 3), (1, 5))))) != [-1]


@pytest.mark.parametrize("num_moved", [64, 70])
def test_swaps_of_more_blocks_than_one_program_takes(num_moved):
    real = make_real(tiny(), num_blocks=160, num_host_blocks=80)
    rng = np.random.default_rng(5)
    filled = tuple(
        kv.at[:].set(rng.normal(size=kv.shape).astype(np.float32)) for kv in real.kv_blocks
    )
    real._set_kv(filled)
    before = [np.array(kv) for kv in filled]
    host = rng.permutation(80)[:num_moved].tolist()
    sources, targets = (rng.permutation(np.arange(2, 160))[:num_moved].tolist() for _ in range(2))
    row = (RowPlan(7, 1, 0, 3, 1, PROMPT[:3]),)
    there = StepPlan(1, row, **enter(7, 1, PROMPT[:3], GREEDY, (1,)))
    run(real, there._replace(swap_out=copies(*zip(sources, host, strict=True))))
    poison(real, range(2, 160))
    result = run(real, there._replace(swap_in=copies(*zip(host, targets, strict=True))))
    assert result.swap_bytes == num_moved * bytes_of_a_block()
    for old, kv in zip(before, real.kv_blocks, strict=True):
        new = np.asarray(kv)
        np.testing.assert_array_equal(new[targets], old[sources])
        rest = [b for b in range(2, 160) if b not in set(targets)]
        assert np.isnan(new[rest]).all()


# What is compiled.


def test_moves_reuse_the_pool_and_keep_their_memory_bound():
    real = make_real(tiny(), num_host_blocks=4, copies=True)
    real.warm_up([])
    kv_bytes = sum(kv.nbytes for kv in real.kv_blocks)
    assert len(real.executables) == 3 * 4
    for shape, executable in real.executables.items():
        memory = executable.memory_analysis()
        assert memory.alias_size_in_bytes == (0 if shape.move is Move.SWAP_OUT else kv_bytes)
        assert memory.temp_size_in_bytes <= shape.num_blocks * bytes_of_a_block() + 4096


def test_nothing_compiles_after_warm_up():
    real = make_real(tiny(), num_host_blocks=30, copies=True, strict=True)
    assert real.num_missing([Variant.GREEDY]) == 3 + 3 * 4
    seen = []
    real.warm_up([Variant.GREEDY], lambda done, total: seen.append((done, total)))
    assert seen[-1] == (15, 15)
    assert all(np.isnan(np.asarray(kv)).all() for kv in real.kv_blocks)
    executables, counter = set(real.executables), CompileCounter()
    run(real, StepPlan(1, (RowPlan(7, 1, 0, 19, 1, PROMPT),),
                       **enter(7, 1, PROMPT, GREEDY, (1, 2))))  # fmt: skip
    for i, count in enumerate([1, 2, 4, 5, 9, 11]):
        plan = StepPlan(
            step_id=2 + i,
            rows=(RowPlan(7, 1, 19 + i, 1, 1, ()),),
            swap_out=copies(*[(3 + j, j) for j in range(count)]),
            swap_in=copies(*[(j, 3 + j) for j in range(count)]),
            copies=copies(*[(3 + j, 14 + j) for j in range(count)]),
        )
        result = run(real, plan)
        assert (result.num_compiles, result.compile_s) == (0, 0.0)
        assert tokens_of(result) != [-1]
    assert (counter.num_compiles, counter.num_cached) == (0, 0)
    assert set(real.executables) == executables


def copying_step(step_id=2):
    return StepPlan(step_id, (RowPlan(7, 1, 3, 1, 1, (5,)),), copies=copies((1, 2)))


def prompted(**options):
    real = make_real(tiny(), **options)
    real.warm_up([Variant.GREEDY])
    run(real, StepPlan(1, (RowPlan(7, 1, 0, 3, 1, PROMPT[:3]),),
                       **enter(7, 1, PROMPT[:3], GREEDY, (1,))))  # fmt: skip
    return real


def test_a_copy_nobody_announced_is_an_error_when_strict():
    real = prompted(strict=True)
    with pytest.raises(RuntimeError, match="copy of 1 blocks was not compiled at warm-up: make"):
        real.submit(copying_step())
    assert MoveShape(Move.COPY, 1) not in real.executables


def test_otherwise_it_is_compiled_and_charged():
    real = prompted(strict=False)
    first, second = run(real, copying_step()), run(real, copying_step(3))
    assert (first.num_compiles, second.num_compiles, second.compile_s) == (1, 0, 0.0)
    assert first.duration_s > first.compile_s > 0
    assert MoveShape(Move.COPY, 1) in real.executables
    assert {type(shape) for shape in real.executables} == {StepShape, MoveShape}


# What a failure spoils.


def test_a_move_that_fails_after_it_took_the_pool_leaves_an_executor_that_serves(monkeypatch):
    real = make_real(tiny(), num_host_blocks=8)
    expected = alone(real, PROMPT, 3)

    def fail(kv_blocks, plan):
        jax.tree.map(lambda array: array.delete(), kv_blocks)
        raise MemoryError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(real._moves, "run", fail)
    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
        real.submit(copying_step()._replace(copies=(), swap_in=copies((0, 1))))
    monkeypatch.undo()
    real.reset()
    assert all(np.isnan(np.asarray(kv)).all() for kv in real.kv_blocks)
    assert alone(real, PROMPT, 3) == expected
