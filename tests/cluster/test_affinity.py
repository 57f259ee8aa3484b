"""Where requests go: to whoever has read their beginning, unless that one is much busier."""

from __future__ import annotations

from foretell.cluster.affinity import HOLDERS, Affinity

IDLE = {"a": 0, "b": 0, "c": 0}
SYSTEM, TALK, FURTHER = b"system", b"talk", b"further"


def test_a_conversation_stays_where_it_was_read() -> None:
    affinity = Affinity()
    affinity.remember([SYSTEM, TALK], "b")
    for name in ("a", "c", "a"):
        affinity.remember([b"other"], name)
    assert affinity.order([SYSTEM, TALK, FURTHER], IDLE)[0] == "b"
    assert sorted(affinity.order([SYSTEM, TALK, FURTHER], IDLE)) == ["a", "b", "c"]


def test_the_longest_beginning_decides() -> None:
    affinity = Affinity()
    affinity.remember([SYSTEM, TALK], "a")
    affinity.remember([SYSTEM], "c")
    assert affinity.order([SYSTEM, TALK], IDLE)[0] == "a"


def test_of_several_readers_the_least_loaded() -> None:
    affinity = Affinity()
    for name in ("a", "c"):
        affinity.remember([SYSTEM], name)
    assert affinity.order([SYSTEM], {"a": 1, "b": 0, "c": 2})[0] == "a"
    assert affinity.order([SYSTEM], {"a": 3, "b": 0, "c": 2})[0] == "c"


def test_a_busy_reader_is_left_for_the_least_loaded() -> None:
    affinity = Affinity(slack=2)
    affinity.remember([SYSTEM, TALK], "a")
    assert affinity.order([SYSTEM, TALK], {"a": 2, "b": 0})[0] == "a"
    assert affinity.order([SYSTEM, TALK], {"a": 3, "b": 0})[0] == "b"
    assert affinity.order([SYSTEM, TALK], {"a": 9, "b": 8})[0] == "a", "only the difference counts"


def test_a_busy_reader_is_left_for_one_that_has_read_less() -> None:
    affinity = Affinity(slack=2)
    affinity.remember([SYSTEM], "c")
    affinity.remember([SYSTEM, TALK], "a")
    assert affinity.order([SYSTEM, TALK], {"a": 5, "b": 0, "c": 1})[0] == "c"


def test_unknown_prompts_go_to_the_least_loaded_and_equals_take_turns() -> None:
    affinity = Affinity()
    assert affinity.order([b"new"], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    gone_to = []
    for i in range(6):
        gone_to.append(affinity.order([b"%d" % i], IDLE)[0])
        affinity.remember([b"%d" % i], gone_to[-1])
    assert sorted(gone_to[:3]) == sorted(gone_to[3:]) == ["a", "b", "c"]


def test_who_has_gone_or_refused_is_not_first() -> None:
    affinity = Affinity()
    affinity.remember([SYSTEM], "a")
    assert affinity.order([SYSTEM], {"b": 7}) == ["b"]
    assert affinity.order([SYSTEM], {"a": 0, "b": 7}, avoid=["a"]) == ["b", "a"]
    assert affinity.order([SYSTEM], {}) == []


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    affinity = Affinity(most=100)
    affinity.remember([SYSTEM], "b")
    for i in range(1000):
        affinity.remember([SYSTEM, b"%d" % i], "b")
    assert len(affinity) == 100
    assert affinity.order([SYSTEM], IDLE)[0] == "b"
    assert affinity.order([b"1"], {"a": 0, "b": 1})[0] == "a", "long forgotten"
    for i in range(10):
        affinity.remember([SYSTEM], f"replica {i}")
    assert sum(f"replica {i}" in affinity._holders[SYSTEM] for i in range(10)) == HOLDERS


def test_other_routings_ignore_what_was_read() -> None:
    for routing in ("least_loaded", "random"):
        affinity = Affinity(routing)
        affinity.remember([SYSTEM], "a")
        assert len(affinity) == 0
    least = Affinity("least_loaded")
    assert least.order([SYSTEM], {"a": 1, "b": 0})[0] == "b"
    dice = Affinity("random")
    assert {dice.order([SYSTEM], {"a": 9, "b": 0})[0] for _ in range(50)} == {"a", "b"}
    assert {dice.order([SYSTEM], IDLE, avoid=["a"])[-1] for _ in range(50)} == {"a"}
