"""Two replicas of vLLM with streams behind one OpenAI-compatible address, by Ray Serve. Not run by the project.

Needs `ray[serve,llm]` beside vLLM and forestream on every machine, and the exported folder at one path on all of them:

    forestream export vllm --adapter my-adapter --output my-model
    python examples/ray/replicas.py my-model
"""

import sys
from pathlib import Path

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

from forestream.vllm.server import options

folder = Path(sys.argv[1]).resolve()
told = options(folder)  # checks the folder and the version of vLLM before anything is started
config = LLMConfig(
    model_loading_config={"model_id": folder.name, "model_source": told.pop("model")},
    deployment_config={"num_replicas": 2},
    engine_kwargs=told,
)
serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
