"""Extract JSON from letters by a schema, all letters in one batch: python examples/programs/extract.py [URL]"""

from __future__ import annotations

import json
import sys
from typing import Any

from foretell import program as fp
from foretell.structured_output import GrammarSpec

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "city": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["order", "complaint", "question"]},
    },
    "required": ["name", "city", "kind"],
    "additionalProperties": False,
}
ONE_LINE = GrammarSpec.json_schema(SCHEMA, any_whitespace=False)  # json_schema=SCHEMA would allow line breaks
LETTERS = [
    "Dear team, my lamp arrived broken and I want my money back. Maria Silva, Lisbon",
    "Could you tell me whether you deliver on Saturdays? Kind regards, John Smith from Leeds",
    "Please send two more of the blue chairs to my address in Oslo. Thanks, Kari Nordmann",
]


@fp.function
def extract(s: fp.ProgramState, letter: str) -> dict[str, Any]:
    s += "Each letter is followed by its sender's name and city and by what kind of letter it is, as JSON.\n\n"
    s += f"Letter: {letter}\nJSON: "
    s += fp.gen("found", max_tokens=160, temperature=0, grammar=ONE_LINE)
    found: dict[str, Any] = json.loads(s["found"])
    return found


def main() -> None:
    url = sys.argv[1:]
    fp.set_default_backend(fp.RuntimeEndpoint(url[0]) if url else fp.Engine(quiet=True))
    for state in extract.run_batch([{"letter": letter} for letter in LETTERS], progress_bar=True):
        print(state.ret_value)


if __name__ == "__main__":
    main()
