"""Ask the real vLLM, in one process, how many KV tokens it makes of a given space. Run as a program.

Reads a JSON list of EngineArgs from stdin, prints one JSON line per entry. Each entry is a full engine: model built
(dummy weights), KV cache specs collected, blocks allocated; only the API server is left out.
"""

import gc
import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    """Start one engine after the other."""
    from vllm import LLM

    for arguments in json.load(sys.stdin):
        try:
            llm = LLM(
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                distributed_executor_backend="uni",
                **arguments,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller wants to read it
            print("RESULT " + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        cache = llm.llm_engine.vllm_config.cache_config
        result = {
            "tokens": cache.kv_cache_size_tokens,
            "concurrency": cache.kv_cache_max_concurrency,
            "blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
        }
        print("RESULT " + json.dumps(result), flush=True)
        del llm
        gc.collect()


if __name__ == "__main__":
    main()
