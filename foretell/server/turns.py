"""Fits the turns of a conversation to a chat template: text of turns that it refuses joins a neighbouring turn.

A system turn joins a user turn, and turns of one role in a row become one where the template demands alternation. The
start of the prompt stays as it was, so that the prefix cache keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretell.tokenizer.turn_rules import TurnRules

SYSTEM_ROLES = ("system", "developer")
BETWEEN_TEXTS = "\n\n"

Message = dict[str, Any]  # its content is a string; an assistant's with calls may have none


def fit_turns(messages: Sequence[Message], rules: TurnRules) -> list[Message]:
    """Return the messages as turns that a template with these rules takes."""
    if rules == TurnRules():
        return list(messages)
    fitted = _FittedTurns(rules)
    in_head = True  # no other turn came yet
    for message in messages:
        is_system = message["role"] in SYSTEM_ROLES
        in_head &= is_system
        if in_head and rules.leading_system:
            fitted.add_to_head(message)
        elif is_system and (in_head or not rules.later_system):
            fitted.add_to_user(message)
        else:
            fitted.add(message)
    fitted.end_waiting()
    return [turn.joined() for turn in fitted.turns]


class _Turn:
    """A message to which others are joined: a history may have a hundred thousand, so they are joined once."""

    def __init__(self, message: Message) -> None:
        self.message, self.role = message, message["role"]
        self.others: list[Message] = []

    def joined(self) -> Message:
        """Return one message with the texts and calls of all, and what else any of them has."""
        if not self.others:
            return self.message
        every = (self.message, *self.others)
        calls = [call for message in every for call in message.get("tool_calls", ())]
        found: Message = {}
        for message in reversed(every):
            found |= message
        found |= {"content": BETWEEN_TEXTS.join(message["content"] for message in every if message.get("content"))}
        return found | ({"tool_calls": calls} if calls else {})


class _FittedTurns:
    """The turns so far, and system texts that wait for the next user turn."""

    def __init__(self, rules: TurnRules) -> None:
        self.rules = rules
        self.turns: list[_Turn] = []
        self._waiting: _Turn | None = None

    def add_to_head(self, message: Message) -> None:
        """Add a system turn before all others; they are one where the template takes no second one."""
        if self.turns and not self.rules.later_system:
            self.turns[0].others.append(message)
        else:
            self.turns.append(_Turn(message))

    def add_to_user(self, message: Message) -> None:
        """Add a system turn to the user turn before it, or to the one after it."""
        message = {**message, "role": "user"}
        if self.turns and self.turns[-1].role == "user":
            self.turns[-1].others.append(message)
        elif self._waiting is not None:
            self._waiting.others.append(message)
        else:
            self._waiting = _Turn(message)

    def add(self, message: Message) -> None:
        """Add a turn whose role the template takes, after the system texts that wait for it."""
        waiting = self._waiting
        if waiting is not None and message["role"] == "user":
            waiting.others.append(message)
            message = waiting.joined()
            self._waiting = None
        self.end_waiting()
        last = self.turns[-1] if self.turns else None
        if last is not None and self._joins(last.role, message["role"]):
            last.others.append(message)
        else:
            self.turns.append(_Turn(message))

    def end_waiting(self) -> None:
        """Make a user turn of the system texts that no user turn follows."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.add(waiting.joined())

    def _joins(self, last: str, role: str) -> bool:
        if role == "user" and last == "tool":
            return not self.rules.user_after_tool
        return role == last and role in ("user", "assistant") and not self.rules.repeated_roles
