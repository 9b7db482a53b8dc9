"""`LLM`: the door for scripts and notebooks, shaped as vLLM's.

Owns: the mapping from constructor arguments to policies and settings, and the offline loop with a
progress bar. In: prompts or conversations. Out: `RequestOutput`s in their order. Must not know:
how a step is made.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from paxserve.assemble import real_engine
from paxserve.compose import load
from paxserve.device import compile_cache
from paxserve.engine import Engine
from paxserve.executor.real import Real
from paxserve.intake import InvalidRequest, Prompt
from paxserve.models.chat_template import Message
from paxserve.models.load import load_model
from paxserve.models.tokenizer import Tokenizer
from paxserve.notices import Notices
from paxserve.outputs import Delta, RequestOutput, rejected_output
from paxserve.pack import variant_of
from paxserve.policies import Policies
from paxserve.request import Request
from paxserve.sampling_params import SamplingParams
from paxserve.settings import EngineSettings

type Conversation = Sequence[Message]


class LLM:
    """A model and an engine, ready to generate.

    Args:
        model: a name, path or hub id; see `paxserve.models.load`.
        dtype: of parameters and KV, float32 or bfloat16.
        seed: of random weights, and of requests that bring no seed.
        enable_chunked_prefill: True is batching chunked_prefill, False textbook; `batching` wins.
        admission, batching, reservation, placement, victim, preemption: a policy's name, a
            `package.module:Class`, or a policy object.
        settings: any field of `EngineSettings`: `max_num_seqs`, `max_num_batched_tokens`,
            `max_model_len`, `block_size`, `memory_utilization`, `kv_cache_memory_bytes`,
            `num_blocks_override`, `kernel`, ...

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
        enable_chunked_prefill: bool = True,
        admission: str | Any = "fcfs",
        batching: str | Any = None,
        reservation: str | Any = "on_demand",
        placement: str | Any = "paged",
        victim: str | Any = "newest",
        preemption: str | Any = "recompute",
        **settings: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineSettings)}
        if unknown := sorted(set(settings) - known):
            raise TypeError(f"LLM has no setting {unknown}; it has {sorted(known)}")
        compile_cache.enable()
        policies = Policies(
            admission=_policy("admission", admission),
            batching=_policy(
                "batching",
                batching or ("chunked_prefill" if enable_chunked_prefill else "textbook"),
            ),
            reservation=_policy("reservation", reservation),
            placement=_policy("placement", placement),
            victim=_policy("victim", victim),
            preemption=_policy("preemption", preemption),
        )
        loaded = load_model(model, dtype=dtype, seed=seed)
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.engine: Engine = real_engine(
            loaded,
            settings=EngineSettings(**settings),
            policies=policies,
            seed=seed,
            say=_say,
            notices=Notices(status=_say, warn=_say),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
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
            ValueError: as many `sampling_params` as prompts are needed.
        """
        is_single = isinstance(prompts, str | dict)
        many: Sequence[Prompt] = [prompts] if is_single else list(prompts)  # type: ignore[list-item]
        params = _one_each(sampling_params, len(many))
        self._warm_up(params, use_tqdm=use_tqdm)
        submitted: list[Request | RequestOutput] = []
        for prompt, own in zip(many, params, strict=True):
            try:
                submitted.append(self.engine.submit(prompt, own))
            except InvalidRequest as error:
                if is_single:
                    raise
                text = prompt if isinstance(prompt, str) else None
                submitted.append(rejected_output("", text, str(error)))
        self._run(sum(isinstance(r, Request) for r in submitted), use_tqdm=use_tqdm)
        return [self.engine.output(r) if isinstance(r, Request) else r for r in submitted]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Raises:
            ValueError: the model has no chat template, or messages are malformed; and as
                `generate`.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it cannot chat: use generate")
        is_single = bool(messages) and isinstance(messages[0], dict)
        many: Any = [messages] if is_single else messages
        prompts: list[Prompt] = [
            {"prompt_token_ids": self.tokenizer.apply_chat_template(conversation)}
            for conversation in many
        ]
        return self.generate(
            prompts[0] if is_single else prompts, sampling_params, use_tqdm=use_tqdm
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Complete one prompt, yielding text as it becomes certain, in whole characters.

        Raises:
            InvalidRequest: the prompt cannot be served.
        """
        params = sampling_params or SamplingParams()
        self._warm_up([params], use_tqdm=False)
        request = self.engine.submit(prompt, params)
        return (delta for delta in self.engine if delta.request_id == request.request_id)

    def _warm_up(self, params: Sequence[SamplingParams], *, use_tqdm: bool) -> None:
        executor = self.engine.executor
        assert isinstance(executor, Real)
        with _bar("compiling", use_tqdm) as bar:
            executor.warm_up({variant_of(own) for own in params}, _progress(bar))

    def _run(self, num_requests: int, *, use_tqdm: bool) -> None:
        with _bar("requests", use_tqdm) as bar:
            bar.total = num_requests
            while self.engine.has_work:
                bar.update(sum(r.finish_reason is not None for r in self.engine.step()))


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
