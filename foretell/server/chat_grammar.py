"""Grammars of chat output: reasoning first where the model has begun it, then an answer in a format, or tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import FunctionDefinition
from foretell.server.parsers.tools.grammar import CallFormat, calls_rules, strict_rules
from foretell.server.parsers.tools.harmony import CHANNEL, ENDS, MESSAGE, START
from foretell.server.parsers.tools.lark import LarkTokens
from foretell.server.request_params import rule_body
from foretell.structured_output import GrammarSpec
from foretell.tokenizer.reasoning_tags import ReasoningTags

LARK_FIELD = "structured_outputs.grammar"  # the request field of a Lark grammar
BLANKS = "blanks: /[\\n ]{0,4}/\n"  # between reasoning and the rest


@dataclass(frozen=True)
class ChatGrammars:
    """Composes the grammars of one request's output.

    `tags` are those of the model's reasoning, `in_reasoning` says that the prompt ends after the first of them.
    """

    tokens: LarkTokens
    tags: ReasoningTags | None = None
    in_reasoning: bool = False
    is_harmony: bool = False

    def answer(self, spec: GrammarSpec) -> GrammarSpec:
        """Return the grammar of an answer that follows `spec`."""
        if spec.kind == "lark" and self.in_reasoning:
            raise RequestError(
                LARK_FIELD,
                "cannot follow the reasoning that this chat template starts with; include the reasoning in the grammar "
                "and use /v1/completions, or turn reasoning off in chat_template_kwargs",
            )
        if spec.kind == "lark" or not (self.in_reasoning or self.is_harmony):
            return spec
        return self._after_reasoning("answer", self._answer_rules(spec))

    def calls(self, form: CallFormat, functions: Sequence[FunctionDefinition], parallel: bool) -> GrammarSpec:
        """Return the grammar of output that calls one of the functions, or several if `parallel`."""
        return self._after_reasoning("calls", calls_rules(form, functions, parallel, self.tokens))

    def answer_or_calls(
        self, spec: GrammarSpec, form: CallFormat, functions: Sequence[FunctionDefinition], parallel: bool
    ) -> GrammarSpec:
        """Return the grammar of output that follows `spec`, or calls functions."""
        if spec.kind == "lark":
            raise RequestError(
                LARK_FIELD,
                "cannot be combined with tools; leave tools out, or use /v1/completions and a grammar with both",
            )
        calls = calls_rules(form, functions, parallel, self.tokens)
        return self._after_reasoning("(calls | answer)", calls + self._answer_rules(spec))

    def strict(self, form: CallFormat, functions: Sequence[FunctionDefinition]) -> GrammarSpec | None:
        """Return the grammar of free text with calls whose arguments follow their schemas; None if there is none.

        Text has no special tokens: a model whose reasoning has such tags may still begin with it.
        """
        rules = strict_rules(form, functions, self.tokens)
        if rules is None:
            return None
        tags = self.tags
        if tags is None or self.in_reasoning or not self.tokens.has(tags.start):
            return self._after_reasoning("strict", rules)
        opening = f"({self.tokens.text(tags.start)} thoughts)?"
        return GrammarSpec.lark(f"start: {opening} strict\n{self.tokens.until('thoughts', tags.end)}{rules}")

    def _answer_rules(self, spec: GrammarSpec) -> str:
        if not self.is_harmony:
            return f"answer: {rule_body(spec)}\n"
        return f"answer: {self.tokens.text(f'{CHANNEL}final{MESSAGE}')} body\nbody: {rule_body(spec)}\n"

    def _after_reasoning(self, what: str, rules: str) -> GrammarSpec:
        """Return the grammar of `what`, after the reasoning that the prompt has begun or that harmony allows."""
        text, until = self.tokens.text, self.tokens.until
        if self.is_harmony:
            before, after = text(f"{CHANNEL}analysis{MESSAGE}"), text(f"{START}assistant")
            reasoning = f"reasoning: {before} thoughts {after}\n{until('thoughts', ENDS[0])}"
            return GrammarSpec.lark(f"start: reasoning? {what}\n{reasoning}{rules}")
        if self.in_reasoning:
            assert self.tags is not None, "a prompt ends inside reasoning only if the model has tags for it"
            return GrammarSpec.lark(f"start: thoughts blanks {what}\n{until('thoughts', self.tags.end)}{BLANKS}{rules}")
        return GrammarSpec.lark(f"start: {what}\n{rules}")
