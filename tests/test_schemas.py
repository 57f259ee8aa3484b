"""JSON schemas with speculation: valid output, equal to that of plain decoding."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.errors import RequestError
from foretell.structured_output import GrammarSpec

BENCH = Path(__file__).parents[2] / "shared" / "data" / "jsonschemabench" / "maskbench_subset.jsonl.xz"
OFF = SpeculationChoice(enabled=False)
OWN: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}, "required": ["x", "y"]},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 10, "maximum": 99}]},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]},
    {"const": {"fixed": [1, 2, 3]}},
    {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3, "$defs": {"n": {"enum": [1, 2]}}},
]  # fmt: skip


def check(llm: LLM, schemas: list[dict[str, Any]], temperature: float, max_tokens: int) -> tuple[int, int]:
    """Return the number of completed schemas and of accepted draft tokens."""
    specs = [GrammarSpec.json_schema(schema, any_whitespace=False) for schema in schemas]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, structured_outputs=spec)
        for i, spec in enumerate(specs)
    ]
    prompts = ["Give an example of such a record as JSON:\n" for _ in specs]
    speculative = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, speculation=OFF)
    finished = 0
    for schema, one, other in zip(schemas, speculative, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].finish_reason in ("stop", "length")
        if one.outputs[0].finish_reason == "stop":
            # The validator itself: some schemas people write do not satisfy the schema of schemas.
            validator = jsonschema.validators.validator_for(schema)(schema)
            assert not list(validator.iter_errors(json.loads(one.outputs[0].text))), (schema, one.outputs[0].text)
            finished += 1
    return finished, sum(each.speculation.accepted for each in speculative)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_our_own_schemas(tiny_folder: Path, temperature: float) -> None:
    llm = LLM(tiny_folder, drafter="ngram", prompt_lookup_min=1, quiet=True)
    finished, accepted = check(llm, OWN, temperature, 80)
    assert finished >= 5
    assert accepted > 10


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.skipif(not BENCH.exists(), reason="the schema collection is not here")
def test_a_few_hundred_schemas_of_others() -> None:
    llm = LLM(quiet=True, max_model_len=1024, max_num_seqs=16)
    schemas = []
    with lzma.open(BENCH, "rt") as lines:
        for i, line in enumerate(lines):
            if i % 14 == 0:
                schema = json.loads(line)["schema"]
                try:
                    llm.assembly.grammars.compile(GrammarSpec.json_schema(schema, any_whitespace=False))
                    schemas.append(schema)
                except RequestError:
                    continue  # refused with the reason, which is the other right answer
    assert len(schemas) >= 250
    finished = sum(check(llm, schemas[i : i + 16], 0.0, 64)[0] for i in range(0, len(schemas), 16))
    print(f"{len(schemas)} schemas, {finished} outputs finished and valid")
    assert finished > len(schemas) / 4
