"""How Hugging Face and GGUF spell the names of our parameters.

Owns: the two dictionaries of words, and which weights are linear maps. In: a `ModelConfig`. Out:
foreign name -> our name. Must not know: arrays, files.
"""

from collections.abc import Mapping

from paxserve.models.config import ModelConfig, parameter_shapes

_HF = {
    "layers": "model.layers",
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF = {
    "layers": "blk",
    "embed": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def hf_names(config: ModelConfig) -> Mapping[str, str]:
    """Hugging Face tensor name -> our name, for every parameter of the model."""
    return {_foreign_name(name, _HF): name for name in parameter_shapes(config)}


def gguf_names(config: ModelConfig) -> Mapping[str, str]:
    """GGUF tensor name -> our name, for every parameter of the model."""
    return {_foreign_name(name, _GGUF): name for name in parameter_shapes(config)}


def is_linear(name: str) -> bool:
    """True for the weights of linear maps, which are [in, out] here and [out, in] elsewhere."""
    return name.rsplit(".", 1)[-1] in ("lm_head", "q", "k", "v", "o", "gate", "up", "down")


def _foreign_name(name: str, words: Mapping[str, str]) -> str:
    """Spell `layers.3.q_bias` as another format does, such as `blk.3.attn_q.bias`."""
    *layer, last = name.split(".")
    prefix = f"{words['layers']}.{layer[1]}." if layer else ""
    if last.endswith("_bias"):
        return f"{prefix}{words[last.removesuffix('_bias')]}.bias"
    return f"{prefix}{words[last]}.weight"
