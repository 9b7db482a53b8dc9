"""Every prefix cache against a plain dictionary from prefix to block."""

import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from axes import name_of, policies
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve.prefix_cache import hash_chain
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.radix import Radix

PREFIX_CACHES = policies("prefix_cache")
SHARING = [cache for cache in PREFIX_CACHES if cache.shares]
per_cache = pytest.mark.parametrize("cache", PREFIX_CACHES, ids=name_of)
per_sharing = pytest.mark.parametrize("cache", SHARING, ids=name_of)

NUM_BLOCKS = 9
SALTS = ("", "a", "\x00" * 8)


@dataclass
class Table:
    """A sequence that lives: its tokens and the blocks it holds."""

    salt: str
    tokens: list
    block_ids: list


@dataclass
class Pool:
    """Blocks 1 to 9, held by tables or cached, over an index and a model of it.

    `model` says which block is found for (salt, tokens); `written` what was last computed in a
    block. Blocks are only taken when nobody holds them and they are not indexed, as in the real
    pool. `exact`: what the index finds is what the model says, not only sound. `covered` collects
    what happened.
    """

    index: object
    block_size: int
    covered: set
    exact: bool = True
    has_leaf_order: bool = False
    tables: list = field(default_factory=list)
    model: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)
    seen: set = field(default_factory=set)

    def prefix(self, salt, tokens, num_blocks):
        return (salt, tuple(tokens[: num_blocks * self.block_size]))

    def followers(self, prefix):
        salt, tokens = prefix
        return [p for p in self.model if p[0] == salt and p[1][: -self.block_size] == tokens]

    def held(self):
        return {block_id for table in self.tables for block_id in table.block_ids}

    def evictable(self):
        ids = sorted(set(self.model.values()) - self.held())
        return [block_id for block_id in ids if self.index.may_evict(block_id)]

    def evict(self, choice):
        """Remove a block that nobody holds; the block before it may become evictable by that."""
        may_evict = self.evictable()
        if not may_evict:
            return False
        block_id = may_evict[choice % len(may_evict)]
        (prefix,) = [p for p, b in self.model.items() if b == block_id]
        before = {b for b in self.model.values() if self.index.may_evict(b)}
        leaf = self.index.remove(block_id)
        del self.model[prefix]
        after = {b for b in self.model.values() if self.index.may_evict(b)}
        assert after - before == ({leaf} - {None})
        assert before - after == {block_id}
        if self.followers(prefix):
            self.covered.add("evicted before its followers")
        return True

    def take(self):
        """A block that is free, evicting one if need be; None if all are held."""
        ids = range(1, NUM_BLOCKS + 1)
        free = [b for b in ids if b not in self.held() and b not in self.index]
        if free:
            return free[-1]
        return self.take() if self.evict(0) else None

    def begin(self, salt, tokens, *, share):
        """A sequence enters; `share` uses what is found, as the pool does after a match."""
        hits = self.index.match(tokens, salt=salt, num_blocks=len(tokens)) if share else []
        table = Table(salt, list(tokens), list(hits))
        if hits:
            self.covered.add("shared" if set(hits) & self.held() else "hit on an evictable block")
        self.tables.append(table)
        self.extend(table)

    def extend(self, table):
        """Compute and publish the full blocks that the table lacks."""
        start = len(table.block_ids)
        for number in range(start, len(table.tokens) // self.block_size):
            block_id = self.take()
            if block_id is None:
                break
            table.block_ids.append(block_id)
            self.written[block_id] = self.prefix(table.salt, table.tokens, number + 1)
        self.publish(table, start)

    def publish(self, table, start):
        tokens, block_ids = list(table.tokens), list(table.block_ids)
        published = self.index.insert(tokens, block_ids, salt=table.salt, start=start)
        tokens[:] = [7] * len(tokens)  # what the caller does with its lists is its own affair
        block_ids[:] = [99] * len(block_ids)
        places = [table.block_ids.index(block_id) for block_id in published]
        assert places == sorted(set(places))
        for number in places:
            prefix = self.prefix(table.salt, table.tokens, number + 1)
            assert prefix not in self.model
            self.model[prefix] = table.block_ids[number]
            if number < start:
                self.covered.add("took the place of a twin that is gone")
            if self.followers(prefix):
                self.covered.add("made followers reachable again")
        if self.exact:
            for number in range(start, len(table.block_ids)):
                prefix = self.prefix(table.salt, table.tokens, number + 1)
                is_own = self.model.get(prefix) == table.block_ids[number]
                if self.has_leaf_order and (number == start and not self.is_indexed(table, start)):
                    break
                assert prefix in self.model
                if self.has_leaf_order and not is_own:
                    break
        for number, block_id in enumerate(table.block_ids):
            prefix = self.prefix(table.salt, table.tokens, number + 1)
            if self.model.get(prefix, block_id) != block_id:
                self.covered.add("twin")
            self.seen.add(prefix)

    def is_indexed(self, table, start):
        return start == 0 or table.block_ids[start - 1] in self.index

    def expected(self, salt, tokens, num_blocks):
        """What a match must find, by the definition of it."""
        found = []
        for number in range(min(num_blocks, len(tokens) // self.block_size)):
            block_id = self.model.get(self.prefix(salt, tokens, number + 1))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def check(self):
        assert len(self.index) == len(self.model) == len(set(self.model.values()))
        assert {b for b in range(NUM_BLOCKS + 1) if b in self.index} == set(self.model.values())
        for (_, tokens), block_id in self.model.items():
            assert self.index.depth(block_id) == len(tokens) // self.block_size - 1
        for salt, tokens in self.seen:
            for num_blocks in (0, 1, len(tokens)):
                found = self.index.match(tokens, salt=salt, num_blocks=num_blocks)
                expected = self.expected(salt, tokens, num_blocks)
                assert found == expected[: len(found)]
                assert len(found) == len(expected) or not self.exact
                for number, block_id in enumerate(found):
                    assert self.written[block_id] == self.prefix(salt, tokens, number + 1)
        for prefix, block_id in self.model.items():
            if not self.followers(prefix):
                assert self.index.may_evict(block_id)


TOKENS = st.lists(st.integers(0, 1), max_size=9) | st.integers(1, 4).map(lambda n: [0] * n)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "twin", "grow", "grow", "end", "evict", "evict"]),
        st.integers(0, 7),
        st.sampled_from(["", *SALTS]),
        TOKENS,
    ),
    min_size=15,
    max_size=40,
)


def drive(pool, operations):
    for operation, choice, salt, tokens in operations:
        table = pool.tables[choice % len(pool.tables)] if pool.tables else None
        if operation == "begin":
            pool.begin(salt, tokens, share=True)
        elif operation == "evict":
            pool.evict(choice)
        elif table is None:
            pool.begin(salt, tokens, share=False)
        elif operation == "twin":
            pool.begin(table.salt, table.tokens, share=False)
        elif operation == "end":
            pool.tables.remove(table)
        else:
            table.tokens += tokens
            pool.extend(table)
        pool.check()


@per_sharing
def test_what_is_found_is_what_a_dictionary_of_prefixes_says(cache):
    covered = set()

    @given(block_size=st.integers(1, 3), operations=OPERATIONS)
    @settings(max_examples=120)
    def run(block_size, operations):
        ordered = isinstance(cache, Radix)
        pool = Pool(cache.open(block_size), block_size, covered, has_leaf_order=ordered)
        drive(pool, operations)

    run()
    assert covered >= {
        "shared",
        "hit on an evictable block",
        "twin",
    }
    assert isinstance(cache, Radix) or "took the place of a twin that is gone" in covered
    if isinstance(cache, HashChain):
        assert covered >= {"evicted before its followers", "made followers reachable again"}


@given(block_size=st.integers(1, 3), operations=OPERATIONS, bits=st.integers(0, 4))
@settings(max_examples=120)
def test_prefixes_whose_digests_collide_are_never_taken_for_each_other(
    block_size, operations, bits
):
    real, mask = hash_chain.chain_digest, (1 << bits) - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hash_chain, "chain_digest", lambda parent, key: bytes([real(parent, key)[0] & mask])
        )
        drive(Pool(HashChain().open(block_size), block_size, set(), exact=False), operations)


def test_of_two_prefixes_with_one_digest_the_second_is_not_indexed(monkeypatch):
    monkeypatch.setattr(hash_chain, "chain_digest", lambda parent, key: b"same")
    index = HashChain().open(2)
    assert index.insert([1, 2], [5], salt="", start=0) == [5]
    assert index.insert([3, 4], [6], salt="", start=0) == []
    assert index.insert([1, 2, 3, 4], [5, 7], salt="", start=1) == []
    assert index.match([3, 4], salt="", num_blocks=1) == []
    assert index.match([1, 2, 3, 4], salt="", num_blocks=2) == [5]
    index.remove(5)
    assert index.insert([3, 4], [6], salt="", start=0) == [6]


def test_a_digest_that_becomes_free_lets_a_table_in_from_its_first_block(monkeypatch):
    monkeypatch.setattr(hash_chain, "chain_digest", lambda parent, key: key[:1])
    index = HashChain().open(1)
    index.insert([1], [5], salt="", start=0)
    assert index.insert([257, 2], [6, 7], salt="", start=0) == []  # 257 and 1 end alike
    index.remove(5)
    assert index.insert([257, 2, 3], [6, 7, 8], salt="", start=2) == [6, 7, 8]
    assert index.match([257, 2, 3], salt="", num_blocks=3) == [6, 7, 8]


@per_cache
def test_an_empty_index_finds_nothing(cache):
    index = cache.open(4)
    assert len(index) == 0
    assert 0 not in index
    assert 1 not in index
    assert index.match(range(8), salt="", num_blocks=2) == []


@per_cache
@pytest.mark.parametrize("call", ["depth", "may_evict", "remove"])
def test_a_block_that_is_not_indexed_is_refused_by_number(cache, call):
    with pytest.raises(RuntimeError, match="block 3 is not indexed"):
        getattr(cache.open(4), call)(3)


def test_without_a_cache_what_is_inserted_is_not_found():
    (cache,) = [cache for cache in PREFIX_CACHES if not cache.shares]
    index = cache.open(2)
    assert index.insert([1, 2], [1], salt="", start=0) == []
    assert index.match([1, 2], salt="", num_blocks=1) == []
    assert 1 not in index


@per_sharing
def test_only_whole_blocks_are_found_and_no_more_than_asked_for(cache):
    index = cache.open(2)
    index.insert([1, 2, 3, 4, 5, 6], [7, 8, 9], salt="", start=0)
    assert index.match([1, 2, 3], salt="", num_blocks=9) == [7]
    assert index.match([1, 2, 3, 4, 5, 6], salt="", num_blocks=2) == [7, 8]
    assert index.match([1, 2, 3, 4, 0, 6], salt="", num_blocks=3) == [7, 8]


@per_sharing
def test_a_salt_shares_with_no_other_salt(cache):
    """Also not where the salt's bytes are the tokens' bytes."""
    index = cache.open(2)
    zero = "\x00" * 8
    assert index.insert([0, 0], [1], salt="", start=0) == [1]
    assert index.insert([0, 0], [2], salt=zero, start=0) == [2]
    assert index.insert([0, 0], [3], salt="\ud800", start=0) == [3]
    assert index.match([0], salt=zero, num_blocks=1) == []
    found = [index.match([0, 0], salt=s, num_blocks=1) for s in ("", zero, "\ud800", "other")]
    assert found == [[1], [2], [3], []]


@per_sharing
def test_lists_tuples_and_arrays_of_tokens_are_the_same(cache):
    index = cache.open(2)
    assert index.insert(np.array([1, 2, 3, 4], np.int32), [5, 6], salt="", start=0) == [5, 6]
    for tokens in ([1, 2, 3, 4], (1, 2, 3, 4), np.array([1, 2, 3, 4])):
        assert index.match(tokens, salt="", num_blocks=2) == [5, 6]


def test_in_a_hash_chain_a_sequence_whose_block_lost_to_a_twin_goes_on_behind_the_twin():
    index = HashChain().open(1)
    assert index.insert([1, 2], [1, 2], salt="", start=0) == [1, 2]
    assert index.insert([1, 2], [3, 4], salt="", start=0) == []
    assert index.insert([1, 2, 9], [3, 4, 5], salt="", start=2) == [5]
    assert index.match([1, 2, 9], salt="", num_blocks=3) == [1, 2, 5]
    assert (3 in index, 4 in index, index.depth(5)) == (False, False, 2)


def test_in_a_radix_tree_a_table_is_indexed_only_behind_its_own_blocks():
    """Else a block that is held could keep one that nobody holds from being evicted."""
    index = Radix().open(1)
    assert index.insert([1, 2], [1, 2], salt="", start=0) == [1, 2]
    assert index.insert([1, 2, 9], [3, 4, 5], salt="", start=0) == []
    assert index.insert([1, 2, 9], [3, 4, 5], salt="", start=2) == []
    assert index.insert([1, 2, 9], [1, 4, 5], salt="", start=1) == []
    assert index.insert([1, 2, 9], [1, 2, 5], salt="", start=2) == [5]
    assert [index.may_evict(block_id) for block_id in (1, 2, 5)] == [False, False, True]


def test_in_a_hash_chain_a_sequences_own_blocks_take_the_place_of_twins_that_are_gone():
    index = HashChain().open(1)
    index.insert([1, 2, 3], [1, 2, 3], salt="", start=0)
    index.insert([1, 2, 3], [4, 5, 6], salt="", start=0)
    index.remove(3)
    index.remove(2)
    assert index.insert([1, 2, 3, 9], [4, 5, 6, 7], salt="", start=3) == [5, 6, 7]
    assert index.match([1, 2, 3, 9], salt="", num_blocks=4) == [1, 5, 6, 7]


@per_sharing
def test_what_does_not_fit_together_is_refused_with_its_numbers(cache):
    index = cache.open(2)
    index.insert([1, 2, 3, 4], [1, 2], salt="", start=0)
    with pytest.raises(RuntimeError, match="block 2 is indexed under another prefix, as number 1"):
        index.insert([5, 6], [2], salt="", start=0)
    with pytest.raises(RuntimeError, match="2 blocks of 2 slots cannot be full of 3 tokens"):
        index.insert([1, 2, 3], [1, 2], salt="", start=1)
    with pytest.raises(RuntimeError, match=r"number 1 of .* is now number 0"):
        index.insert([1, 2, 3, 4], [2, 5], salt="", start=1)


@pytest.mark.parametrize("cls", [HashChain, Radix])
@pytest.mark.parametrize("publish", ["", "never", None, True])
def test_an_unknown_time_of_publication_is_refused(cls, publish):
    with pytest.raises(ValueError, match=f"publish must be one of planning, after_step.*{publish}"):
        cls(publish=publish)


def test_a_hash_chain_refuses_an_indexed_block_in_the_place_of_another():
    index = HashChain().open(2)
    index.insert([1, 2, 3, 4], [1, 2], salt="", start=0)
    with pytest.raises(RuntimeError, match="block 2 is indexed under another prefix, as number 1"):
        index.insert([1, 2], [2], salt="", start=0)
    index.insert([9, 9], [3], salt="", start=0)
    with pytest.raises(RuntimeError, match="block 2 is indexed under another prefix, as number 1"):
        index.insert([9, 9, 1, 1], [3, 2], salt="", start=1)
    assert index.match([9, 9, 1, 1], salt="", num_blocks=2) == [3]


def test_behind_an_evicted_block_a_hash_chain_finds_again_what_it_kept():
    index = HashChain().open(1)
    index.insert([1, 2, 3], [1, 2, 3], salt="", start=0)
    assert index.remove(2) is None
    assert index.match([1, 2, 3], salt="", num_blocks=3) == [1]
    assert 3 in index
    assert index.insert([1, 2], [1, 8], salt="", start=1) == [8]
    assert index.match([1, 2, 3], salt="", num_blocks=3) == [1, 8, 3]


def test_a_hash_chain_forgets_prefixes_that_nothing_needs():
    index = HashChain().open(1)
    for salt in range(100):
        index.insert([1, 2, 3], [1, 2, 3], salt=str(salt), start=0)
        for block_id in (2, 1, 3):
            index.remove(block_id)
    assert len(index._by_digest) == 0


def runs(index):
    """Block ids of every edge of a radix tree, in order."""
    edges, found = [index._root], []
    while edges:
        edge = edges.pop()
        edges += edge.followers.values()
        found.append(edge.block_ids)
    return sorted(found[1:])


def test_an_edge_is_split_where_prefixes_part_and_nowhere_else():
    index = Radix().open(1)
    index.insert([1, 2, 3, 4], [1, 2, 3, 4], salt="", start=0)
    index.insert([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], salt="", start=4)
    assert runs(index) == [[1, 2, 3, 4, 5]]
    index.insert([1, 2, 9], [1, 2, 6], salt="", start=2)
    assert runs(index) == [[1, 2], [3, 4, 5], [6]]
    index.insert([1, 2, 8], [1, 2, 7], salt="", start=2)
    assert runs(index) == [[1, 2], [3, 4, 5], [6], [7]]
    index.insert([1, 7], [1, 8], salt="", start=1)
    assert runs(index) == [[1], [2], [3, 4, 5], [6], [7], [8]]
    index.insert([1, 7], [9, 10], salt="a", start=0)
    assert runs(index) == [[1], [2], [3, 4, 5], [6], [7], [8], [9, 10]]


def test_a_radix_tree_lets_go_of_leaves_only():
    index = Radix().open(1)
    index.insert([1, 2, 3], [1, 2, 3], salt="", start=0)
    index.insert([1, 2, 9], [1, 2, 4], salt="", start=2)
    assert [b for b in (1, 2, 3, 4) if index.may_evict(b)] == [3, 4]
    with pytest.raises(RuntimeError, match="block 2, number 1 of its prefix, has followers"):
        index.remove(2)
    assert [index.remove(b) for b in (3, 4, 2, 1)] == [None, 2, 1, None]
    assert (len(index), runs(index)) == (0, [])


class Counted(list):
    """A list that counts what is read of it."""

    num_read = 0

    def __getitem__(self, item):
        found = super().__getitem__(item)
        self.num_read += len(found) if isinstance(item, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def cost_of_insert(index, number, block_size):
    """Tokens and ids read, and calls made, to insert one more block of a long sequence."""
    tokens = Counted(range((number + 1) * block_size))
    block_ids = Counted(range(1, number + 2))
    num_calls = 0

    def count(frame, what, argument):
        nonlocal num_calls
        num_calls += what in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        published = index.insert(tokens, block_ids, salt="", start=number)
    finally:
        sys.setprofile(previous)
    assert published == [number + 1]
    return tokens.num_read, block_ids.num_read, num_calls


@per_sharing
def test_one_more_block_costs_the_same_at_any_length(cache):
    index = cache.open(16)
    costs = [cost_of_insert(index, number, 16) for number in range(1001)]
    assert costs[1000][:2] == costs[10][:2]
    assert costs[1000][0] == 16
    assert costs[1000][2] <= 1.5 * costs[10][2]


def test_a_twin_in_a_hash_chain_does_not_hash_from_the_start(monkeypatch):
    hashed = []
    real = hash_chain.chain_digest
    index = HashChain().open(1)
    tokens = list(range(100))
    index.insert(tokens, range(1, 101), salt="", start=0)
    index.insert(tokens[:99], range(101, 200), salt="", start=0)
    monkeypatch.setattr(
        hash_chain, "chain_digest", lambda *parts: hashed.append(parts) or real(*parts)
    )
    assert index.insert(tokens, range(101, 201), salt="", start=99) == []
    assert len(hashed) == 1
