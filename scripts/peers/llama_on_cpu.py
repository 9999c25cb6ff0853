"""llama.cpp on a CPU as a peer of scripts/bench.py, with weights in its own format (GGUF), quantised as they come.

Runs under a Python in which ``xllamacpp`` is installed (``pip install xllamacpp`` in a virtual environment of its own;
its wheels hold llama.cpp for AVX2) and knows nothing of this project but the protocol of ``serve/peers.py``.  Greedy.
Other weights than the target's say other things: only its speed can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target; not read")
    parser.add_argument("--gguf", required=True, help="the weights")
    parser.add_argument("--dtype", help="of the target; not read")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-length", type=int, default=2048, help="most tokens of a prompt and its answer")
    parser.add_argument(
        "--eos", type=int, nargs="*", default=[], help="tokens that end an answer; the file names its own"
    )
    return parser.parse_args()


def complete(address: str, prompt: list[int], count: int) -> dict[str, Any]:
    """The server's answer to a prompt of token ids: their ids (``tokens``), and times in ``timings``."""
    wanted = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    body = json.dumps(wanted).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found


def serve(options: argparse.Namespace, answers: Any) -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.gguf
    parameters.n_ctx = options.max_length
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(parameters)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        found = complete(server.listening_address, request["prompt_ids"], request["max_new_tokens"])
        seconds = time.perf_counter() - start
        print(json.dumps({"ids": found["tokens"], "seconds": seconds}), file=answers, flush=True)


def main() -> None:
    options = parse_arguments()
    # What llama.cpp prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(options, answers)


if __name__ == "__main__":
    main()
