"""Chat messages to prompt text, by a template that came with a model and is not trusted.

Owns: the only place that renders Jinja, its sandbox and its limits. In: messages. Out: text. Must
not know: token ids.

The sandbox keeps a template away from Python's internals. Work is bounded by a budget of loop
turns and calls and of characters made by output, `~`, `+` and `*`. Filters and string methods
such as `replace` run unbounded inside one call: for templates you would not run, use a process
with a memory limit.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

Message = Mapping[str, str]

MAX_TEXT = 2**24
MAX_STEPS = 200_000

# Not spellable in a template, so no template reads or replaces its own budget.
_BUDGET = "paxserve budget"


class ChatTemplate:
    """One model's chat template.

    Compiled at the first render, so a model with a broken template still serves plain prompts.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Keep the source.

        Args:
            source: Jinja text.
            bos_token: what the template sees under this name.
            eos_token: likewise.
            now: the clock behind `strftime_now`, which some templates print.
        """
        self.source = source
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation.

        Args:
            messages: dicts with exactly the keys `role` and `content`, both text.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            ValueError: a message is malformed, or the template fails, refuses the conversation
                or does more work than allowed.
        """
        check_messages(messages)
        try:
            chunks = self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
                **{_BUDGET: _Budget(steps=MAX_STEPS, text=MAX_TEXT)},
            )
            return _joined(chunks)
        except Exception as error:  # a template can raise any error there is
            raise ValueError(
                f"the chat template failed: {type(error).__name__}: {error}; check the messages' "
                "roles and order, or pass a prompt instead of messages"
            ) from error

    @cached_property
    def _template(self) -> Template:
        environment = _Environment(self._now)
        tree = _Metered().visit(environment.parse(self.source))
        code = environment.compile(tree)
        return Template.from_code(environment, code, environment.make_globals(None))


def check_messages(messages: object) -> None:
    """Require a non-empty list of `{"role": text, "content": text}`.

    Raises:
        ValueError: naming the message by its position.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(f"messages must be a non-empty list of dicts, got {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dict, got {type(message).__name__}")
        if set(message) != {"role", "content"}:
            raise ValueError(
                f"messages[{i}] must have exactly role and content, got {list(message)!r:.80}"
            )
        for key, value in message.items():
            if not isinstance(value, str):
                raise ValueError(f"messages[{i}][{key!r}] must be text, got {type(value).__name__}")
        if not message["role"]:
            raise ValueError(f"messages[{i}]['role'] must not be empty")


@dataclass(slots=True, kw_only=True)
class _Budget:
    """What one render may still spend."""

    steps: int
    text: int

    def spend(self, *, steps: int = 0, text: int = 0) -> None:
        self.steps -= steps
        self.text -= text
        if self.steps < 0:
            raise TemplateError(f"more than {MAX_STEPS} loop turns and calls")
        if self.text < 0:
            raise TemplateError(f"more than {MAX_TEXT} characters")


def _budget(context: Context) -> _Budget:
    budget = context.parent[_BUDGET]
    assert isinstance(budget, _Budget)
    return budget


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, charging calls and growing text to the render's budget."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        # Not optimized: constant expressions would be computed, unmetered, while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_charge_output,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.filters["tojson"] = _to_json

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget(context).spend(steps=1)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget(context).spend(text=_size_made(operator, left, right))
        return super().call_binop(context, operator, left, right)

    @pass_context
    def turn(self, context: Context) -> None:
        """Stands at the head of every loop body; the call itself is what is counted."""

    @pass_context
    def concatenate(self, context: Context, *values: Any) -> str:
        """The `~` operator."""
        texts = [str(value) for value in values]
        _budget(context).spend(text=sum(map(len, texts)))
        return "".join(texts)


class _Metered(NodeTransformer):
    """Rewrites a template so that loop turns and `~` pass through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node)


def _call(method: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=at.lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=at.lineno)


def _size_made(operator: str, left: Any, right: Any) -> int:
    """Characters, items or digits that the operator will make; 0 for plain numbers."""
    sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "+":
        return sum(map(len, sized))
    if operator == "*" and sized and numbers:
        return len(sized[0]) * max(numbers[0], 0)
    return sum(number.bit_length() for number in numbers) * (
        max(right, 1) if operator == "**" and isinstance(right, int) else 1
    )


@pass_context
def _charge_output(context: Context, value: Any) -> Any:
    _budget(context).spend(text=len(value) if isinstance(value, str) else 0)
    return value


def _joined(chunks: Iterable[str]) -> str:
    parts, size = [], 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_TEXT:
            raise TemplateError(f"more than {MAX_TEXT} characters")
        parts.append(chunk)
    return "".join(parts)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
