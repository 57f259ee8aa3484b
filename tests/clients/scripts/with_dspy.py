"""dspy: a predictor in its own format, which needs no structured output."""

from __future__ import annotations

import dspy
from task import MODEL, QUESTION, URL

model = dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="any", cache=False, num_retries=0, max_tokens=400)
with dspy.context(lm=model):
    assert dspy.Predict("question -> answer")(question=QUESTION).answer == "walnut"
