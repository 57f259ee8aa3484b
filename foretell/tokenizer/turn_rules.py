"""Which turns a chat template takes: found by rendering short chats once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import RequestError

Turn = dict[str, Any]
CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": {}}}  # an id as Mistral's are
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class TurnRules:
    """Which turns a chat template shows, besides those of user and assistant in alternation.

    A template refuses a turn by an error, or leaves its text out.
    """

    leading_system: bool = True  # a system turn before the first user turn
    later_system: bool = True  # further system turns, anywhere
    repeated_roles: bool = True  # two turns of the user, or of the assistant, in a row
    user_after_tool: bool = True  # a user turn that follows the result of a tool


def probe_turns(render: Callable[[Sequence[Turn]], str]) -> TurnRules:
    """Return the rules of the template that `render` applies; a template that shows no user turn has none."""

    def takes(*roles: str) -> bool:
        turns = [_turn(role, f"probe{i}text") for i, role in enumerate(roles)]
        try:
            text = render(turns)
        except RequestError:
            return False
        return all(turn["content"] in text for turn in turns if turn["role"] in ("system", "user"))

    if not takes("user"):
        return TurnRules()
    return TurnRules(
        leading_system=takes("system", "user"),
        later_system=takes("user", "system", "assistant", "system", "user"),
        repeated_roles=takes("user", "user", "assistant", "assistant", "user"),
        user_after_tool=takes("user", "call", "tool", "user") or not takes("user", "call", "tool"),
    )


def _turn(role: str, text: str) -> Turn:
    match role:
        case "call":
            return {"role": "assistant", "content": "", "tool_calls": [CALL]}
        case "tool":
            return {"role": "tool", "tool_call_id": CALL["id"], "name": "probe", "content": text}
    return {"role": role, "content": text}
