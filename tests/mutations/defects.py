"""Defects that the tests must notice: each one line of the core made wrong, and who sees it."""

from typing import NamedTuple


class Defect(NamedTuple):
    """In `file` of the package `old` becomes `new`; then `test`, under tests/, fails."""

    file: str
    old: str
    new: str
    test: str


POOL = "unit/kv/test_block_pool.py::"
TABLES = "unit/kv/test_block_table.py::"
FORKS = "unit/test_forks.py::"
BEAMS = "unit/test_beam_search.py::"
GROUPS = "unit/device/test_tensor_parallel.py::"
ADMITTING = "unit/test_admitting.py::"
PREEMPTING = "unit/test_preempting.py::"
PLANNING = "unit/test_planning.py::"
CORE_LAW = "property/test_core_law.py::"
SHARING_LAW = "property/test_sharing_law.py::"
LEDGER = "property/test_slot_oracle.py::"
ENGINE = "unit/test_engine.py::"
LIMITS = "unit/test_limits.py::"
GATES = "unit/test_gates.py::"
NOTICES = "unit/test_notices.py::"
CACHES = "conformance/test_prefix_cache.py::"
MEMO = POOL + "test_of_what_was_found_before_only_the_forgotten_is_looked_for_again"
DECLARED = "unit/test_intake.py::test_policies_are_told_what_a_server_would_be"

DEFECTS = [
    # Reference counts and what is cached.
    Defect(
        "kv/block_pool.py",
        "            self._ref_counts[block_id] += 1\n            self._num_hits",
        "            self._ref_counts[block_id] = 1\n            self._num_hits",
        POOL + "test_a_shared_block_is_free_when_its_last_holder_lets_go",
    ),
    Defect(
        "kv/block_pool.py",
        "                self.num_extra_refs -= 1",
        "                pass",
        POOL + "test_a_shared_block_is_free_when_its_last_holder_lets_go",
    ),
    Defect(
        "kv/block_pool.py",
        "elif self._cached.pop(block_id, None) is None:",
        "elif self._cached.get(block_id) is None:",
        POOL + "test_a_released_block_that_can_be_found_is_cached_and_comes_back_when_shared",
    ),
    Defect(
        "kv/block_pool.py",
        "if self._cached.get(block_id) is not entry or not",
        "if block_id not in self._cached or not",
        POOL + "test_a_block_that_was_used_again_is_ranked_anew",
    ),
    Defect(
        "kv/block_pool.py",
        "            self._queue.push(self._cached[new_leaf])",
        "            pass",
        POOL + "test_in_a_tree_a_block_is_evicted_after_what_stands_behind_it",
    ),
    Defect(
        "kv/block_pool.py",
        "        if missing > len(self._cached):\n            return False",
        "        if missing > self.num_blocks:\n            return False",
        POOL + "test_cached_blocks_are_evicted_only_for_what_is_missing_and_never_in_vain",
    ),
    Defect(
        "kv/block_pool.py",
        "for block_id in reversed(block_ids):",
        "for block_id in block_ids:",
        POOL + "test_unpublishing_frees_what_nobody_holds_and_hides_what_is_held",
    ),
    Defect(
        "kv/block_pool.py",
        "            self._num_hits[block_id] = 0",
        "            pass",
        POOL + "test_what_was_hit_outlives_what_was_not_and_starts_anew_with_other_content",
    ),
    Defect(
        "kv/block_pool.py",
        "        self.free_space.give_back(self._cached)\n",
        "",
        POOL + "test_forgetting_everything_frees_the_cached_and_keeps_the_held",
    ),
    # Tables: copy on write.
    Defect(
        "kv/block_table.py",
        "- num_leaving[block_id] > 1 else None",
        "- num_leaving[block_id] > 2 else None",
        TABLES + "test_the_first_writers_copy_and_the_last_one_writes_in_place",
    ),
    Defect(
        "kv/block_table.py",
        "if self.pool.ref_count(block_id) - num_leaving[block_id] > 1",
        "if self.pool.ref_count(block_id) > 1",
        TABLES + "test_the_first_writers_copy_and_the_last_one_writes_in_place",
    ),
    Defect(
        "kv/block_table.py",
        "        for copy in copies:\n            self.pool.release([copy.source])\n",
        "",
        TABLES + "test_the_first_writers_copy_and_the_last_one_writes_in_place",
    ),
    Defect(
        "kv/block_table.py",
        "        sequence.num_sent_blocks = min(sequence.num_sent_blocks, column)\n",
        "",
        TABLES + "test_a_copied_column_is_sent_again",
    ),
    Defect(
        "kv/block_table.py",
        "        copy.sequence.block_table[copy.column] = copy.source\n",
        "",
        TABLES + "test_a_copy_that_is_forgotten_leaves_everything_as_it_was",
    ),
    Defect(
        "kv/block_table.py",
        "        self._num_leaving[copy.source] -= 1\n",
        "",
        TABLES + "test_a_placement_that_refuses_in_the_middle_undoes_what_came_before",
    ),
    Defect(
        "kv/block_table.py",
        "num_tokens = sequence.num_computed_tokens + reads_again(sequence)",
        "num_tokens = sequence.num_computed_tokens",
        TABLES + "test_samples_of_a_prompt_hold_its_blocks_together",
    ),
    Defect(
        "kv/block_table.py",
        "        sequence.num_published_blocks = 0\n",
        "",
        TABLES + "test_letting_go_gives_back_every_block",
    ),
    # Forks.
    Defect(
        "forks.py",
        "        return len(mine) - 1\n",
        "        return len(mine)\n",
        FORKS + "test_samples_without_output_share_all_but_the_last_token",
    ),
    Defect(
        "forks.py",
        "limit = min(len(mine), len(theirs)) - 1",
        "limit = min(len(mine), len(theirs))",
        FORKS + "test_the_last_token_of_either_is_never_shared_where_they_differ_in_length",
    ),
    Defect(
        "forks.py",
        "return num_equal // block_size * block_size",
        "return num_equal",
        FORKS + "test_samples_with_output_share_the_whole_blocks_before_they_part",
    ),
    Defect(
        "forks.py",
        "num_own = min(left, sequence.num_remaining_tokens - 1)",
        "num_own = min(left, sequence.num_remaining_tokens)",
        FORKS + "test_a_grant_of_all_lets_everyone_sample_and_less_lets_nobody",
    ),
    Defect(
        "forks.py",
        "num_tokens = min(num_tokens, remaining - len(request.live))",
        "num_tokens = min(num_tokens, remaining)",
        FORKS + "test_how_much_of_a_group_is_granted",
    ),
    # Admission: hits, gates, what comes back from the host.
    Defect(
        "batch.py",
        "num_blocks=(trunk.num_known_tokens - 1) // self.limits.block_size",
        "num_blocks=trunk.num_known_tokens // self.limits.block_size",
        ADMITTING + "test_a_hit_never_covers_the_last_token_since_it_must_be_computed_to_sample",
    ),
    Defect(
        "admitting.py",
        "num_free = pool.num_available - pool.num_unheld(demand.hits)",
        "num_free = pool.num_available",
        ADMITTING + "test_gates_see_the_memory_without_the_cached_blocks_that_the_request_takes",
    ),
    Defect(
        "admitting.py",
        "            self._close(request)\n",
        "            pass\n",
        ADMITTING + "test_what_a_gate_holds_back_is_as_if_it_had_not_been_looked_at",
    ),
    Defect(
        "admitting.py",
        "if host_id not in device_of:",
        "if host_id >= 0:",
        ADMITTING + "test_blocks_of_a_swapped_group_come_back_once_for_all_who_share_them",
    ),
    Defect(
        "batch.py",
        "end = min(sequence.num_computed_tokens, len(sequence.token_ids)) // block_size",
        "end = len(sequence.token_ids) // block_size",
        ADMITTING + "test_tokens_that_are_not_computed_yet_are_not_published",
    ),
    Defect(
        "scheduler.py",
        "        self.batch.pool.forget_all()\n",
        "",
        ADMITTING + "test_what_a_request_without_finite_logits_wrote_is_not_found",
    ),
    Defect(
        "batch.py",
        "self.finish(request, first.finish_reason or reason, stop_reason",
        "self.finish(request, reason, stop_reason",
        ADMITTING + "test_a_request_ends_as_its_first_sample_did",
    ),
    # Preemption.
    Defect(
        "preempting.py",
        "        self._batch.pool.unpublish(published)\n",
        "",
        PREEMPTING + "test_a_returned_grant_hides_the_blocks_it_was_to_fill",
    ),
    Defect(
        "preempting.py",
        "                    self._hold_back(reader)\n",
        "                    pass\n",
        PREEMPTING + "test_a_returned_grant_hides_the_blocks_it_was_to_fill",
    ),
    Defect(
        "preempting.py",
        "                draft.budget_left += row.num_tokens\n",
        "",
        PREEMPTING + "test_a_returned_grant_hides_the_blocks_it_was_to_fill",
    ),
    Defect(
        "preempting.py",
        "+= row.num_tokens - row.num_samples",
        "+= row.num_tokens",
        PREEMPTING + "test_a_returned_grant_leaves_a_running_request_as_it_was_before_the_step",
    ),
    Defect(
        "preempting.py",
        "            tables.forget_copies(sequence)\n",
        "",
        PREEMPTING + "test_a_returned_grant_leaves_a_running_request_as_it_was_before_the_step",
    ),
    Defect(
        "preempting.py",
        "num_lost_tokens=0 if is_swap else num_slots",
        "num_lost_tokens=num_slots",
        PREEMPTING + "test_a_swapped_request_comes_back_with_its_content",
    ),
    Defect(
        "preempting.py",
        "keeps_computed=is_swap,",
        "keeps_computed=False,",
        PREEMPTING + "test_a_swapped_request_comes_back_with_its_content",
    ),
    Defect(
        "preempting.py",
        "        self._batch.give_back_host_blocks(request)\n",
        "",
        PREEMPTING + "test_a_group_that_outgrows_the_pool_as_it_comes_back",
    ),
    Defect(
        "preempting.py",
        "if method is Method.SWAP and len(blocks) > num_free:",
        "if method is Method.SWAP and len(blocks) > num_free + 1:",
        PREEMPTING + "test_a_swap_that_the_host_cannot_hold_is_a_recompute_and_says_so",
    ),
    Defect(
        "draft.py",
        "            batch.give_back_host_blocks(request)\n",
        "",
        PREEMPTING + "test_a_swapped_request_comes_back_with_its_content",
    ),
    Defect(
        "batch.py",
        "            self._let_go_of_dead(request)\n",
        "            pass\n",
        PREEMPTING + "test_a_preempted_request_takes_its_ended_samples_along",
    ),
    Defect(
        "batching/__init__.py",
        "remaining = [request.live[0].num",
        "remaining = [request.sequences[0].num",
        "unit/batching/test_chunk_limits.py::test_whether_a_request_decodes_is_told_by",
    ),
    Defect(
        "scheduler.py",
        "        self._to_preempt.clear()\n        if every",
        "        if every",
        PREEMPTING + "test_asking_for_a_preemption_preempts_once",
    ),
    Defect(
        "scheduler.py",
        "if r.num_output_tokens > r.num_entry_output_tokens]",
        "if r.num_output_tokens >= r.num_entry_output_tokens]",
        PREEMPTING + "test_a_preemption_every_step_spares_who_has_not_sampled",
    ),
    # The step: rows, budget, what the executor is told.
    Defect(
        "batch.py",
        "sequence.row = heappop(self.free_rows)",
        "sequence.row = self.free_rows.pop()",
        PLANNING + "test_the_lowest_free_row_is_taken_and_kept",
    ),
    Defect(
        "planning.py",
        "num_budget = self._draft.budget_left - num_kept",
        "num_budget = self._draft.budget_left",
        PLANNING + "test_kept_budget_is_left_for_others",
    ),
    Defect(
        "planning.py",
        "on_device = num_tokens == 1 and first >= sequence.num_entry_tokens",
        "on_device = num_tokens == 1 and first >= sequence.num_entry_tokens - 1",
        CORE_LAW + "test_chunks_of_every_size_give_the_same_tokens",
    ),
    Defect(
        "draft.py",
        "            if len(table) > start:",
        "            if len(table) > start + 1:",
        CORE_LAW + "test_one_request_alone_is_what_the_law_compares_with",
    ),
    Defect(
        "planning.py",
        "                    draft.unwritten.add(sequence.sequence_id)\n",
        "                    pass\n",
        SHARING_LAW + "test_samples_have_their_own_streams",
    ),
    Defect(
        "draft.py",
        "request.sampling._replace(seed=sequence.seed)",
        "request.sampling",
        SHARING_LAW + "test_samples_have_their_own_streams",
    ),
    Defect(
        "intake.py",
        "seed=seed_of_sample(sampling.seed, index)",
        "seed=sampling.seed",
        SHARING_LAW + "test_samples_have_their_own_streams",
    ),
    # Beams.
    Defect(
        "beam_search.py",
        "(-c.cumulative_logprob, c.parent, c.token)",
        "(-c.cumulative_logprob, c.token)",
        BEAMS + "test_ties_go_to_the_earlier_parent_then_to_the_smaller_token",
    ),
    Defect(
        "beam_search.py",
        "going_on = [c for c in ranked if c.token not in stop_ids][:width]",
        "going_on = [c for c in ranked[:width] if c.token not in stop_ids]",
        BEAMS + "test_the_best_go_on_and_ends_take_nobody_s_place",
    ),
    Defect(
        "beam_search.py",
        "math.pow(length, length_penalty)",
        "(length * length_penalty)",
        BEAMS + "test_the_score_divides_by_the_length_to_a_power",
    ),
    Defect(
        "forking.py",
        "if num_output >= request.params.min_tokens",
        "if num_output > request.params.min_tokens",
        BEAMS + "test_beams_before_min_tokens_go_through_the_end_token",
    ),
    Defect(
        "forking.py",
        "        for place in dealt\n",
        "        for place in request.live\n",
        BEAMS + "test_a_search_is_the_plain_one",
    ),
    Defect(
        "forking.py",
        "        batch.pool.share(parents[going_on[i].parent][2], is_hit=False)\n",
        "        pass\n",
        BEAMS + "test_a_search_is_the_plain_one",
    ),
    Defect(
        "forking.py",
        "        sequence.num_entry_tokens = sequence.num_known_tokens  #",
        "        #",
        BEAMS + "test_beams_read_what_their_ancestors_wrote",
    ),
    Defect(
        "forking.py",
        "        sequence.block_table.extend(parents[parent][2])\n",
        "        sequence.block_table.extend(parents[place][2])\n",
        BEAMS + "test_beams_read_what_their_ancestors_wrote",
    ),
    # The ledger.
    Defect(
        "ledger.py",
        "for slots in covered.values() if slots])",
        "for slots in covered.values()])",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "computed = 0 if sequence.source else sequence.num_computed_tokens",
        "computed = sequence.num_computed_tokens - 1",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "is_shared_with_dead = pool.num_extra_refs > 0 and",
        "is_shared_with_dead = pool.num_extra_refs > 9**9 and",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "            held -= {b for r in batch.running for s in r.live for b in s.block_table}\n",
        "            pass\n",
        LEDGER,
    ),
    Defect(
        "slot_seconds.py",
        "        self._slot_s += columns * duration_s",
        "        self._slot_s = columns * duration_s",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "unused = max(0, promise.num_tokens - most_computed)",
        "unused = max(0, promise.num_tokens - most_computed - 1)",
        "unit/test_ledger.py::test_a_reservation_of_2048_of_which_300_are_used",
    ),
    Defect(
        "ledger.py",
        "batch.tables.num_blocks_needed(head, longest)",
        "batch.tables.num_blocks_needed(head, longest) * len(head.live)",
        "unit/test_ledger.py::test_unfit_is_asked_with_the_longest_table_of_a_group",
    ),
    Defect(
        "ledger.py",
        "and num_rows == plan.num_tokens",
        "",
        "unit/test_ledger.py::test_chunks_of_those_that_ran_before_are_not_taken_for_decodes",
    ),
    Defect(
        "ledger.py",
        "is_plain = not others and not self._may_promise_ahead",
        "is_plain = not others",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "others = batch.groups or plan.entries",
        "others = plan.entries",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "            columns[3] = -columns[1] % block_size\n            columns[2]",
        "            columns[2]",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "        ended += [batch.by_sequence[sequence.sequence_id] for sequence in batch.dead]\n",
        "",
        LEDGER,
    ),
    Defect(
        "ledger.py",
        "            request.held_slot_s += len(blocks) *",
        "            request.held_slot_s = len(blocks) *",
        LEDGER,
    ),
    # Matches remembered from step to step.
    Defect(
        "kv/block_pool.py",
        "        self._forgotten_at[block_id] = self._num_forgotten\n",
        "",
        MEMO,
    ),
    Defect(
        "kv/block_pool.py",
        "        self._forgotten_at = [self._num_forgotten] * self.num_blocks\n",
        "",
        MEMO,
    ),
    Defect(
        "kv/block_pool.py",
        "forgotten_at[block_id] > earlier.as_of]",
        "forgotten_at[block_id] > earlier.as_of + 1]",
        MEMO,
    ),
    Defect(
        "kv/block_pool.py",
        "known[: min(gone, default=len(known))]",
        "known[: max(gone, default=len(known))]",
        MEMO,
    ),
    Defect(
        "kv/block_pool.py",
        "default=len(known))][:num_blocks]",
        "default=len(known))]",
        MEMO,
    ),
    # Hash chain: the usual insertion.
    Defect(
        "prefix_cache/hash_chain.py",
        " or digest in self._by_digest:",
        ":",
        CACHES + "test_of_two_prefixes_with_one_digest_the_second_is_not_indexed",
    ),
    Defect(
        "prefix_cache/hash_chain.py",
        "if block_id in self._prefixes or digest",
        "if digest",
        CACHES + "test_a_hash_chain_refuses_an_indexed_block_in_the_place_of_another",
    ),
    Defect(
        "prefix_cache/hash_chain.py",
        " or parent.depth != number - 1:",
        ":",
        CACHES + "test_what_does_not_fit_together_is_refused_with_its_numbers",
    ),
    Defect(
        "prefix_cache/hash_chain.py",
        "parent is None or parent.block_id != before or",
        "parent is None or",
        CACHES + "test_in_a_hash_chain_a_sequences_own_blocks_take_the_place_of_twins",
    ),
    # Displacement.
    Defect(
        "planning.py",
        "                return displaced\n        return []",
        "                return displaced\n        return displaced",
        PLANNING + "test_the_last_in_rank_make_way_for_rows_and_nobody_in_vain",
    ),
    Defect(
        "planning.py",
        "if rank(r) > own]",
        "if rank(r) >= own]",
        PLANNING + "test_the_last_in_rank_make_way_for_rows_and_nobody_in_vain",
    ),
    Defect(
        "planning.py",
        "(rank(r), r.arrival_seq), reverse=True)",
        "(rank(r), r.arrival_seq))",
        PLANNING + "test_the_last_in_rank_make_way_for_rows_and_nobody_in_vain",
    ),
    Defect(
        "planning.py",
        "        num_budget += self._draft.budget_left - budget_before\n",
        "",
        PLANNING + "test_the_budget_of_those_who_make_way_is_the_newcomer",
    ),
    Defect(
        "admitting.py",
        "        num_budget += sum([row.num_tokens for row in rows if row is not None])\n",
        "",
        PLANNING + "test_the_budget_of_those_who_make_way_is_the_newcomer",
    ),
    Defect(
        "admitting.py",
        "        self._close(request)\n        return may",
        "        return may",
        PLANNING + "test_nobody_makes_way_for_more_blocks_than_all_would_free",
    ),
    Defect(
        "admitting.py",
        "may = not isinstance(demand, Refusal) and (",
        "may = not isinstance(demand, Refusal) or (",
        PLANNING + "test_the_budget_of_those_who_make_way_is_the_newcomer",
    ),
    Defect(
        "admitting.py",
        "num_free += len(self._batch.tables.held_only_by(without).difference(demand.hits))",
        "num_free += limits.num_usable_blocks",
        PLANNING + "test_nobody_makes_way_for_more_blocks_than_all_would_free",
    ),
    Defect(
        "admitting.py",
        "_all_but(without, self._batch.running)",
        "tuple(self._batch.running)",
        PLANNING + "test_gates_are_asked_of_the_memory_as_it_will_be",
    ),
    Defect(
        "admitting.py",
        "newcomers=frozenset(_all_but(without, self._draft.newcomers))",
        "newcomers=frozenset()",
        ADMITTING + "test_gates_see_who_runs_and_who_of_them_entered_in_this_step",
    ),
    # What an engine does while it decides.
    Defect(
        "engine.py",
        "        if self._is_deciding:\n            raise",
        "        if False:\n            raise",
        ENGINE + "test_nobody_is_aborted_while_a_step_is_decided",
    ),
    Defect(
        "engine.py",
        "        finally:\n            self._is_deciding = False",
        "        finally:\n            pass",
        ENGINE + "test_nobody_is_aborted_while_a_step_is_decided",
    ),
    Defect(
        "engine.py",
        "        with self._deciding():\n            progressed",
        "        if plan:\n            progressed",
        ENGINE + "test_nobody_is_aborted_while_a_step_is_decided",
    ),
    Defect(
        "engine.py",
        "        self._let_go.append(request)\n",
        "        self.discard(request)\n",
        ENGINE + "test_a_stream_that_is_collected_while_a_step_is_decided",
    ),
    Defect(
        "engine.py",
        "        while self._let_go:\n",
        "        while self._let_go and not self.has_work:\n",
        ENGINE + "test_a_stream_that_is_collected_while_a_step_is_decided",
    ),
    Defect(
        "engine.py",
        "            self.scheduler.batch.ended.remove(request)\n",
        "            pass\n",
        ENGINE + "test_a_stream_that_is_collected_while_a_step_is_decided",
    ),
    Defect(
        "scheduler.py",
        "is_sound = not has_ended or (",
        "is_sound = not has_ended or not (",
        ADMITTING + "test_what_a_request_without_finite_logits_wrote_is_not_found",
    ),
    # What is asked of policies, and told to them.
    Defect(
        "policies.py",
        "                if missing:\n",
        "                if not asked:\n",
        LIMITS + "test_a_policy_that_lacks_what_its_axis_asks_for",
    ),
    Defect(
        "policies.py",
        'policies = found[0] if axis == "gates" else found',
        'policies = found[0][:1] if axis == "gates" else found',
        LIMITS + "test_a_policy_that_lacks_what_its_axis_asks_for",
    ),
    Defect(
        "policies.py",
        "num_blocks = num_sequences * -(-promise",
        "num_blocks = -(-promise",
        LIMITS + "test_samples_that_share_nothing_must_all_fit",
    ),
    Defect(
        "policies.py",
        "            if num_blocks > limits.num_usable_blocks:",
        "            if num_blocks >= limits.num_usable_blocks:",
        LIMITS + "test_samples_that_share_nothing_must_all_fit",
    ),
    Defect(
        "policies.py",
        "if num_sequences > 1 and not self.shares:",
        "if num_sequences > 1:",
        LIMITS + "test_samples_that_share_nothing_must_all_fit",
    ),
    Defect(
        "intake.py",
        "return longest if is_forced else",
        "return",
        DECLARED,
    ),
    Defect(
        "intake.py",
        "return min(longest, origin.num_declared_output_tokens)",
        "return origin.num_declared_output_tokens",
        DECLARED,
    ),
    Defect(
        "gate/token_ratio.py",
        "request.num_declared_tokens - request",
        "request.max_known_tokens - len(request.prompt_token_ids) - request",
        GATES + "test_gates_do_not_see_forced_lengths",
    ),
    Defect(
        "gate/past_future.py",
        "most = request.num_declared_tokens",
        "most = request.max_known_tokens - len(request.prompt_token_ids)",
        GATES + "test_gates_do_not_see_forced_lengths",
    ),
    Defect(
        "prediction.py",
        "tokens = request.num_declared_tokens if",
        "tokens = request.max_known_tokens - len(request.prompt_token_ids) if",
        "unit/test_admission.py::test_an_order_by_declared_lengths_does_not_see_forced_ones",
    ),
    Defect(
        "gate/token_ratio.py",
        "(1 if running in memory.newcomers else state.value)",
        "state.value",
        GATES + "test_who_entered_in_this_step_counts_in_full",
    ),
    Defect(
        "waiting.py",
        "if any(part != part for part in place):",
        "if place[0] != place[0]:",
        "unit/test_waiting.py::test_a_key_without_an_order_is_an_error_of_the_policy",
    ),
    Defect(
        "batching/textbook.py",
        "num_kept = sum([len(request.live) for request in incumbents])",
        "num_kept = len(incumbents)",
        PLANNING + "test_textbook_keeps_a_token_for_each_sequence_of_a_running_group",
    ),
    # Notices.
    Defect(
        "notices.py",
        "(slots.free + slots.free_unfit + slots.cached)",
        "(slots.free + slots.free_unfit)",
        NOTICES + "test_blocks_that_only_the_prefix_cache_keeps_are_not_in_use",
    ),
    Defect(
        "notices.py",
        '_NO_SHORTAGE = ("forced", "displaced", "asked")',
        '_NO_SHORTAGE = ("asked",)',
        NOTICES + "test_only_preemptions_for_want_of_memory_are_warned_of",
    ),
    # A model split over devices.
    Defect(
        "device/layers.py",
        'f"{prefix}o", summed_over=axis)',
        'f"{prefix}o")',
        GROUPS + "test_devices_talk_for_two_sums_a_layer_the_embedding_and_the_logits",
    ),
    Defect(
        "device/layers.py",
        "jax.lax.axis_index(axis) * table.shape[0]",
        "jnp.int32(0) * table.shape[0]",
        GROUPS + "test_a_group_gives_the_tokens_of_one_device",
    ),
    Defect(
        "assemble.py",
        "bytes_per_whole_block = num_devices * size.bytes_per_block",
        "bytes_per_whole_block = size.bytes_per_block",
        GROUPS + "test_it_says_so_and_the_host_s_pool_holds_whole_blocks",
    ),
]
