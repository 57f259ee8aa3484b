"""Prefix routing: requests go to the replica with the longest cached prefix, unless it is much busier."""

from __future__ import annotations

from foretell.cluster.prefix_affinity import MAX_HOLDERS, PrefixAffinity

IDLE = {"a": 0, "b": 0, "c": 0}
SYSTEM, TALK, FURTHER = b"system", b"talk", b"further"


def test_a_conversation_stays_on_its_replica() -> None:
    affinity = PrefixAffinity()
    affinity.remember([SYSTEM, TALK], "b")
    for name in ("a", "c", "a"):
        affinity.remember([b"other"], name)
    assert affinity.rank([SYSTEM, TALK, FURTHER], IDLE)[0] == "b"
    assert sorted(affinity.rank([SYSTEM, TALK, FURTHER], IDLE)) == ["a", "b", "c"]


def test_the_longest_beginning_decides() -> None:
    affinity = PrefixAffinity()
    affinity.remember([SYSTEM, TALK], "a")
    affinity.remember([SYSTEM], "c")
    assert affinity.rank([SYSTEM, TALK], IDLE)[0] == "a"


def test_of_several_holders_the_least_loaded_is_chosen() -> None:
    affinity = PrefixAffinity()
    for name in ("a", "c"):
        affinity.remember([SYSTEM], name)
    assert affinity.rank([SYSTEM], {"a": 1, "b": 0, "c": 2})[0] == "a"
    assert affinity.rank([SYSTEM], {"a": 3, "b": 0, "c": 2})[0] == "c"


def test_a_busy_holder_is_skipped_for_the_least_loaded() -> None:
    affinity = PrefixAffinity(slack=2)
    affinity.remember([SYSTEM, TALK], "a")
    assert affinity.rank([SYSTEM, TALK], {"a": 2, "b": 0})[0] == "a"
    assert affinity.rank([SYSTEM, TALK], {"a": 3, "b": 0})[0] == "b"
    assert affinity.rank([SYSTEM, TALK], {"a": 9, "b": 8})[0] == "a", "only the difference counts"


def test_a_busy_holder_is_skipped_for_one_with_a_shorter_prefix() -> None:
    affinity = PrefixAffinity(slack=2)
    affinity.remember([SYSTEM], "c")
    affinity.remember([SYSTEM, TALK], "a")
    assert affinity.rank([SYSTEM, TALK], {"a": 5, "b": 0, "c": 1})[0] == "c"


def test_unknown_prompts_go_to_the_least_loaded_and_equals_take_turns() -> None:
    affinity = PrefixAffinity()
    assert affinity.rank([b"new"], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    gone_to = []
    for i in range(6):
        gone_to.append(affinity.rank([b"%d" % i], IDLE)[0])
        affinity.remember([b"%d" % i], gone_to[-1])
    assert sorted(gone_to[:3]) == sorted(gone_to[3:]) == ["a", "b", "c"]


def test_removed_and_avoided_replicas_are_not_first() -> None:
    affinity = PrefixAffinity()
    affinity.remember([SYSTEM], "a")
    assert affinity.rank([SYSTEM], {"b": 7}) == ["b"]
    assert affinity.rank([SYSTEM], {"a": 0, "b": 7}, avoid=["a"]) == ["b", "a"]
    assert affinity.rank([SYSTEM], {}) == []


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    affinity = PrefixAffinity(max_hashes=100)
    affinity.remember([SYSTEM], "b")
    for i in range(1000):
        affinity.remember([SYSTEM, b"%d" % i], "b")
    assert len(affinity) == 100
    assert affinity.rank([SYSTEM], IDLE)[0] == "b"
    assert affinity.rank([b"1"], {"a": 0, "b": 1})[0] == "a", "long forgotten"
    for i in range(10):
        affinity.remember([SYSTEM], f"replica {i}")
    assert sum(f"replica {i}" in affinity._holders[SYSTEM] for i in range(10)) == MAX_HOLDERS


def test_other_routings_ignore_the_prefix_cache() -> None:
    for routing in ("least_loaded", "random"):
        affinity = PrefixAffinity(routing)
        affinity.remember([SYSTEM], "a")
        assert len(affinity) == 0
    least = PrefixAffinity("least_loaded")
    assert least.rank([SYSTEM], {"a": 1, "b": 0})[0] == "b"
    dice = PrefixAffinity("random")
    assert {dice.rank([SYSTEM], {"a": 9, "b": 0})[0] for _ in range(50)} == {"a", "b"}
    assert {dice.rank([SYSTEM], IDLE, avoid=["a"])[-1] for _ in range(50)} == {"a"}
