"""Two tips, each expanded in its own branch, and a summary of both: python examples/programs/tips.py [URL]"""

from __future__ import annotations

import sys

from foretell import program as fp


@fp.function
def suggest(s: fp.ProgramState, topic: str, tips: list[str]) -> None:
    s += f"Question: What helps with {topic}?\nAnswer: Here are {len(tips)} tips.\n"
    for i, tip in enumerate(tips):
        s += f"{i + 1}. {tip}\n"
    forks = s.fork(len(tips))  # the common prefix is prefilled once
    for i, branch in enumerate(forks):
        branch += f"\nMore about tip {i + 1}, in one sentence:" + fp.gen("detail", max_tokens=40, stop="\n")
    forks.join()
    for i, detail in enumerate(s["detail"]):
        s += f"Tip {i + 1}, in detail:{detail}\n"
    s += "In short," + fp.gen("summary", max_tokens=40, stop="\n")


def main() -> None:
    url = sys.argv[1:]
    fp.set_default_backend(fp.RuntimeEndpoint(url[0]) if url else fp.Engine(quiet=True))
    print(suggest("sleeping badly", ["Go to bed at the same time every day.", "No screens in bed."], seed=1).text())


if __name__ == "__main__":
    main()
