"""Vidur's operator times: the products of a layer by tokens, sums over a group by bytes.

The linear part of a step is the time of all operators of a layer at its (padded) tokens, times the
layers, and once the embedding and the last norm; each residual is added twice a layer. Attention is
not in the published profiles and stays a roofline, as do logits; the host is a setting, since only
operators were timed. `links_path` has the sums: two a layer, of `tokens x hidden size` numbers.

Source: Agrawal et al., "Vidur", MLSys 2024, section 4, and the profiles of its repository
(`compute/**/mlp.csv`, `network/**/all_reduce.csv`, milliseconds; medians are read).
"""

from collections.abc import Callable

from paxserve.cost_model import Costs, Target
from paxserve.models.dimensions import Dimensions
from paxserve.numbers import MOST_TOKENS, real_text, whole_text
from paxserve.profiles import Files, Format
from paxserve.profiles.curve import Curve
from paxserve.step_shape import StepShape
from paxserve.traces.csv_file import read_csv

_MS = 1e-3
_MOST_MS = 1e7
_MOST_BYTES = 10**12
ONCE_A_LAYER = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
)
TWICE_A_LAYER = ("add",)
ONCE_A_STEP = ("emb", "input_layernorm")  # the last norm is one like the others
_OPERATORS = (*ONCE_A_LAYER, *TWICE_A_LAYER, "emb")
_SIZES = {
    "n_head": "num_heads",
    "n_kv_head": "num_kv_heads",
    "n_embd": "hidden_size",
    "n_expanded_embd": "mlp_size",
}


def read_linear(path: str, model: Dimensions, num_devices: int) -> Curve:
    """Seconds of a step's linear part over its tokens.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of Vidur's, of another model, or has nothing of such a group.
    """
    columns = [f"time_stats.{name}.median" for name in _OPERATORS]
    sizes = [*_SIZES, "num_tokens", "num_tensor_parallel_workers"]
    points, groups = [], set()
    for place, fields in read_csv(path, [*columns, *sizes], what="profile"):
        *texts, heads, kv_heads, hidden, mlp, tokens, group = fields
        for name, text in zip(_SIZES, (heads, kv_heads, hidden, mlp), strict=True):
            _check_size(f"{place} {name}", text, model, _SIZES[name])
        groups.add(group)
        if group != str(num_devices):
            continue
        seconds = {
            name: _MS * real_text(f"{place} {name}", text, high=_MOST_MS)
            for name, text in zip(_OPERATORS, texts, strict=True)
        }
        layer = sum([seconds[name] for name in ONCE_A_LAYER])
        layer += 2 * sum([seconds[name] for name in TWICE_A_LAYER])
        once = sum([seconds[name] for name in ONCE_A_STEP])
        count = whole_text(f"{place} num_tokens", tokens, low=1, high=MOST_TOKENS)
        points.append((count, model.num_layers * layer + once))
    if not points:
        raise ValueError(f"{path} has no group of {num_devices}; it has {sorted(groups, key=int)}")
    return Curve(f"{path} on {num_devices}, tokens", points)


def read_sums(path: str, num_devices: int) -> Curve:
    """Seconds of one sum over a group within a machine, over the bytes of what is summed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of Vidur's, or has nothing of such a group.
    """
    columns = ("num_workers", "devices_per_node", "collective", "size")
    group = [str(num_devices), str(num_devices), "all_reduce"]
    points, found = [], set()
    for place, (*kind, size, time_ms) in read_csv(
        path, [*columns, "time_stats.all_reduce.median"], what="profile"
    ):
        found.add(" ".join(kind))
        if kind == group:
            num_bytes = whole_text(f"{place} size", size, low=1, high=_MOST_BYTES)
            points.append((num_bytes, _MS * real_text(f"{place} time", time_ms, high=_MOST_MS)))
    if not points:
        raise ValueError(
            f"{path} has no all_reduce of {num_devices} devices in one machine; it has (devices, "
            f"of one machine, kind) {', '.join(sorted(found))}"
        )
    return Curve(f"{path} on {num_devices}, bytes of a sum", points)


def open_profile(files: Files, target: Target, rest: Costs) -> Costs:
    """See `Format.open`."""
    linear = read_linear(files.path, target.model, target.num_devices)
    links_s = _links(files, target)
    linear_at, links_at = rest.terms.index("linear"), rest.terms.index("links")

    def of(shape: StepShape) -> tuple[float, ...]:
        seconds = list(rest.of(shape))
        tokens = shape.padded_tokens
        seconds[linear_at] = linear.at(tokens) if tokens else 0.0
        seconds[links_at] = links_s(tokens) if tokens else 0.0
        return tuple(seconds)

    return Costs(rest.terms, of, rest.ridge)


def _links(files: Files, target: Target) -> Callable[[int], float]:
    if target.num_devices == 1:
        if files.links_path is not None:
            raise ValueError("cost_model.links_path is for tensor_parallel_size > 1: leave it null")
        return lambda tokens: 0.0
    if files.links_path is None:
        raise ValueError(
            f"tensor_parallel_size={target.num_devices}: set cost_model.links_path to a profile "
            "of all_reduce"
        )
    sums, model = read_sums(files.links_path, target.num_devices), target.model
    each = model.hidden_size * model.weight_bytes_each
    return lambda tokens: 2 * model.num_layers * sums.at(tokens * each)


FORMAT = Format(
    needs=("compute_efficiency", "bandwidth_efficiency"), takes=("links_path",), open=open_profile
)


def _check_size(place: str, text: str, model: Dimensions, name: str) -> None:
    size = whole_text(place, text, low=1, high=MOST_TOKENS)
    if size != getattr(model, name):
        raise ValueError(
            f"{place} is {size}, and the model has {name}={getattr(model, name)}: it is a profile "
            "of another model"
        )
