"""A tree of thoughts: plans, elaborations of each, and a vote: python examples/programs/thoughts.py [URL]"""

from __future__ import annotations

import sys
from collections import Counter

from foretell import program as fp


@fp.function
def solve(s: fp.ProgramState, question: str, answers: list[str], plans: int = 2, tries: int = 3) -> str:
    s += f"Question: {question}\nLet us make a plan and then work it out step by step.\nPlan:"
    planned = s.fork(plans)
    planned += fp.gen("plan", max_tokens=24, stop="\n", temperature=0.8)
    leaves = [leaf for branch in planned for leaf in branch.fork(tries)]  # starts as soon as its plan is generated
    for leaf in leaves:
        leaf += "\nWork:" + fp.gen("work", max_tokens=48, stop="\n", temperature=0.8)
        leaf += "\nSo the answer is" + fp.select("vote", [f" {answer}." for answer in answers])
    votes = Counter(leaf["vote"] for leaf in leaves)
    return votes.most_common(1)[0][0].strip(" .")


def main() -> None:
    url = sys.argv[1:]
    fp.set_default_backend(fp.RuntimeEndpoint(url[0]) if url else fp.Engine(quiet=True))
    question = "A farmer has 3 fields with 4 cows each and sells 2 cows. How many cows are left?"
    print(solve(question, ["8", "10", "12"], seed=3))


if __name__ == "__main__":
    main()
