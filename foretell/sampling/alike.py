"""Rows of the same settings: those of one text, which may be many."""

from __future__ import annotations

from foretell.params import SamplingParams


def distinct(params: list[SamplingParams]) -> tuple[list[SamplingParams], list[int]]:
    """The settings there are, and for each row which of them are its own."""
    places: dict[int, int] = {}
    found: list[SamplingParams] = []
    for each in params:
        if id(each) not in places:  # by identity: to compare all their fields would take longer than it saves
            places[id(each)] = len(found)
            found.append(each)
    return found, [places[id(each)] for each in params]
