"""`LLM`: the door for scripts and notebooks, shaped as vLLM's.

Owns: the mapping from constructor arguments to policies and settings, and the offline loop with a
progress bar. In: prompts or conversations. Out: `RequestOutput`s in their order. Must not know:
how a step is made.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from paxserve.assemble import real_engine
from paxserve.compose import load
from paxserve.device import compile_cache
from paxserve.engine import Engine
from paxserve.executor.real import Real
from paxserve.intake import InvalidRequest, Prompt, text_of
from paxserve.models.chat_template import Message
from paxserve.models.load import load_model
from paxserve.models.tokenizer import Tokenizer
from paxserve.outputs import (
    BeamSearchOutput,
    Delta,
    RequestOutput,
    beam_search_output,
    rejected_output,
)
from paxserve.pack import variant_of
from paxserve.policies import Policies
from paxserve.request import Request
from paxserve.sampling_params import BeamSearchParams, SamplingParams
from paxserve.serve import chat_prompt
from paxserve.settings import EngineSettings

type Conversation = Sequence[Message]


class LLM:
    """A model and an engine, ready to generate.

    Args:
        model: a name, path or hub id; see `paxserve.models.load`.
        dtype: of parameters and KV, float32 or bfloat16.
        seed: of random weights, and of requests that bring no seed.
        enable_chunked_prefill: True (the default) is batching chunked_prefill, False textbook.
        enable_prefix_caching: True is prefix_cache hash_chain, False (the default) none.
        admission, batching, reservation, placement, prefix_cache, eviction, victim, preemption: a
            policy's name, a `package.module:Class`, or a policy object.
        gate: the same, or a list of them; none by default.
        settings: any field of `EngineSettings`: `max_num_seqs`, `max_num_batched_tokens`,
            `max_model_len`, `block_size`, `memory_utilization`, `kv_cache_memory_bytes`,
            `tensor_parallel_size`, `num_blocks_override`, `swap_space_gib`, `kernel`, ...

    Raises:
        ValueError: settings that do not fit the model, the memory, or each other.
        TypeError: a setting that does not exist.
        FileNotFoundError, ModuleNotFoundError: no such model here; the message says what to do.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        seed: int = 0,
        enable_chunked_prefill: bool | None = None,
        enable_prefix_caching: bool | None = None,
        admission: str | Any = "fcfs",
        batching: str | Any = None,
        reservation: str | Any = "on_demand",
        placement: str | Any = "paged",
        prefix_cache: str | Any = None,
        eviction: str | Any = "lru",
        victim: str | Any = "newest",
        preemption: str | Any = "recompute",
        gate: str | Any | Sequence[str | Any] = (),
        **settings: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineSettings)}
        if unknown := sorted(set(settings) - known):
            raise TypeError(f"LLM has no setting {unknown}; it has {sorted(known)}")
        if batching is not None and enable_chunked_prefill is not None:
            raise ValueError("batching and enable_chunked_prefill both say how prompts are batched")
        if prefix_cache is not None and enable_prefix_caching is not None:
            raise ValueError("prefix_cache and enable_prefix_caching both say what is found again")
        if prefix_cache is None:
            prefix_cache = "hash_chain" if enable_prefix_caching else "none"
        gates = list(gate) if isinstance(gate, list | tuple) else [gate]
        if {"memory_utilization", "kv_cache_memory_bytes"} <= set(settings):
            raise ValueError("memory_utilization and kv_cache_memory_bytes both size the KV pool")
        if batching is None:
            batching = "textbook" if enable_chunked_prefill is False else "chunked_prefill"
        compile_cache.enable()
        policies = Policies(
            admission=_policy("admission", admission),
            batching=_policy("batching", batching),
            reservation=_policy("reservation", reservation),
            placement=_policy("placement", placement),
            victim=_policy("victim", victim),
            prefix_cache=_policy("prefix_cache", prefix_cache),
            eviction=_policy("eviction", eviction),
            preemption=_policy("preemption", preemption),
            gates=tuple([_policy("gate", one) for one in gates]),
        )
        if settings.get("swap_space_gib") and not policies.preemption.swaps:
            raise ValueError(
                f"swap_space_gib={settings['swap_space_gib']} is not used by preemption "
                f"{type(policies.preemption).__name__}: use swap or cheapest, or leave it out"
            )
        loaded = load_model(model, dtype=dtype, seed=seed)
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.engine: Engine = real_engine(
            loaded,
            settings=EngineSettings(**settings),
            policies=policies,
            forks=True,
            seed=seed,
            say=_say,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one or many; text, or `{"prompt_token_ids": [...]}`.
            sampling_params: for all, or one per prompt; default `SamplingParams()`.
            use_tqdm: show progress, where standard error is a terminal.

        Returns:
            One output per prompt, in order. In a list, a prompt that cannot be served comes back
            with finish reason "error" and `error`; the others are not affected.

        Raises:
            InvalidRequest: a single prompt cannot be served.
            ValueError: not as many `sampling_params` as prompts.
        """
        if isinstance(prompts, str | dict):
            prompt: Prompt = prompts
            return self._serve([lambda: prompt], sampling_params, use_tqdm, is_single=True)
        thunks = [partial(_identity, prompt) for prompt in prompts]
        outputs = self._serve(thunks, sampling_params, use_tqdm, is_single=False)
        return [
            replace(output, prompt=text_of(prompt))
            for output, prompt in zip(outputs, prompts, strict=True)
        ]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Args, returns and raises as `generate`; a malformed conversation is an invalid request.

        Raises:
            ValueError: the model has no tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so it cannot chat: use generate")
        is_single = bool(messages) and isinstance(messages[0], dict)
        many: Any = [messages] if is_single else messages
        thunks = [partial(chat_prompt, conversation, tokenizer) for conversation in many]
        return self._serve(thunks, sampling_params, use_tqdm, is_single=is_single)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest continuations of prompts.

        Args, returns and raises as `generate`; in a list, a prompt that cannot be served comes
        back without sequences.
        """
        outputs = self.generate(prompts, params.sampling_params, use_tqdm)
        decode = None if self.tokenizer is None else self.tokenizer.decode
        return [beam_search_output(output, decode) for output in outputs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Complete one prompt, yielding text as it becomes certain, in whole characters.

        With n > 1 each delta belongs to the sample `index`. Beams are certain only at their end.
        Leaving the loop early aborts the request.

        Raises:
            InvalidRequest: the prompt cannot be served.
        """
        params = sampling_params or SamplingParams()
        self._warm_up([params], use_tqdm=False)
        return self.engine.stream(self.engine.submit(prompt, params))

    def _serve(
        self,
        prompts: Sequence[Callable[[], Prompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        *,
        is_single: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        self._warm_up(params, use_tqdm=use_tqdm)
        served: list[Request | InvalidRequest] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                served.append(self._submit(prompt, own, must_succeed=is_single))
            requests = [request for request in served if isinstance(request, Request)]
            self._run(requests, use_tqdm=use_tqdm)
        except BaseException:
            for request in served:
                if isinstance(request, Request):
                    self.engine.discard(request)
            raise
        return [
            self.engine.output(one) if isinstance(one, Request) else rejected_output(None, str(one))
            for one in served
        ]

    def _submit(
        self, prompt: Callable[[], Prompt], params: SamplingParams, *, must_succeed: bool
    ) -> Request | InvalidRequest:
        try:
            return self.engine.submit(prompt(), params)
        except InvalidRequest as error:
            if must_succeed:
                raise
            return error

    def _warm_up(self, params: Sequence[SamplingParams], *, use_tqdm: bool) -> None:
        executor = self.engine.executor
        assert isinstance(executor, Real)
        variants = {variant_of(own) for own in params}
        missing = executor.num_missing(variants)
        if missing:
            _say(f"compiling {missing} shapes for {', '.join(sorted(variants))} sampling")
        with _bar("compiling", use_tqdm) as bar:
            executor.warm_up(variants, _progress(bar))

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool) -> None:
        unfinished = set(requests)
        with _bar("requests", use_tqdm) as bar:
            bar.total = len(requests)
            while unfinished:
                ended = {r for r in self.engine.step() if r.finish_reason is not None}
                bar.update(len(ended & unfinished))
                unfinished -= ended


def _identity(prompt: Prompt) -> Prompt:
    return prompt


def _policy(axis: str, choice: str | Any) -> Any:
    return load(axis, choice) if isinstance(choice, str) else choice


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts")
    return params


def _bar(what: str, use_tqdm: bool) -> tqdm:
    hidden = not use_tqdm or not sys.stderr.isatty()
    return tqdm(desc=what, disable=hidden, delay=1.0, dynamic_ncols=True)


def _progress(bar: tqdm) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def _say(message: str) -> None:
    tqdm.write(f"paxserve: {message}", file=sys.stderr)
