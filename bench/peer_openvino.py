"""A child of peers.py: OpenVINO GenAI over JSON lines. python peer_openvino.py MODEL_FOLDER plain|lookup TOKENS"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

folder, mode, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
scheduler = genai.SchedulerConfig()
scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
settings = {"INFERENCE_NUM_THREADS": 2} | ({"prompt_lookup": True} if mode == "lookup" else {})
pipeline = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler, **settings)
config = genai.GenerationConfig()
config.max_new_tokens, config.do_sample, config.apply_chat_template = most, False, False
config.eos_token_id, config.stop_token_ids = 2, {2}
if mode == "lookup":
    config.num_assistant_tokens, config.max_ngram_size = 10, 3
for line in sys.stdin:
    began = time.perf_counter()
    found = pipeline.generate(openvino.Tensor(np.array([json.loads(line)], np.int64)), config)
    whole = time.perf_counter() - began
    metrics = found.perf_metrics
    tokens = list(map(int, found.tokens[0]))
    speed = (len(tokens) - 1) / (whole - metrics.get_ttft().mean / 1e3)
    print(json.dumps({"answer": tokens, "speed": speed}), flush=True)
