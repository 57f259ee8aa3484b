"""Two programs of an article about SGLang, with the indentation its text lost; only their import is changed."""

from __future__ import annotations

THEIRS, OURS = "import sglang as sgl", "from foretell import program as sgl"
ADDRESS = ("localhost", 30000)  # where the first of them expects its server

FIRST = """
import sglang as sgl
@sgl.function
def code_gen(s, prompt):
    s += prompt
    s += sgl.gen(
        "response",
        max_new_tokens=256,
        temperature=0.7,
    )
# Launch the SGLang engine
sgl.set_default_backend(sgl.RuntimeEndpoint("http://localhost:30000"))
result = code_gen(
    prompt="Write a Python function to check if a number is prime."
)
print(result["response"])
"""

SECOND = '''
@sgl.function
def batch_code_gen(s, prompts):
    """Generate code for multiple prompts in a single batch."""
    responses = []
    for prompt in prompts:
        s += f"\\nPrompt: {prompt}"
        s += sgl.gen(
            f"response_{len(responses)}",
            max_new_tokens=128,
        )
        responses.append(s[f"response_{len(responses)}"])
    return responses
# SGLang will schedule all generations in a single batch,
# with speculative decoding applied across the entire batch.
prompts = [
    "Write a sort function.",
    "Write a hash function.",
    "Write a search function.",
]
results = batch_code_gen(prompts=prompts)
for prompt, result in zip(prompts, results):
    print(f"{prompt}\\n{result}\\n---")
'''
