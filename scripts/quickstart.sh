#!/usr/bin/env bash
# From nothing to the same text, faster: environment, target, data, head, measurement, one answer side by side.
#
#   bash scripts/quickstart.sh
#
# Takes at most 20 minutes on two cores.  Every step can be interrupted (Ctrl-C); run the command again to go on where
# it stopped.  Everything it makes lies in runs/quickstart, .venv and ~/.cache/mtp (or $MTP_CACHE).
set -euo pipefail
cd "$(dirname "$0")/.."
trap 'echo; echo "Interrupted; the same command continues from here."; exit 130' INT

prompts=${QUICKSTART_PROMPTS:-400}
new_tokens=${QUICKSTART_NEW_TOKENS:-128}
runs=runs/quickstart
started=$SECONDS
step() { printf '\n[%s, %d:%02d] %s\n' "$1" $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$2"; }

step 1/6 "Virtual environment"
source scripts/environment.sh .venv dev scripts/constraints.txt
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

step 2/6 "Default target: SmolLM2-135M-Instruct"
target=$(python scripts/fetch_default_target.py | tail -n 1)

step 3/6 "Distillation data: the target writes $prompts questions and answers them"
python train/distill.py --target "$target" --num-prompts "$prompts" --max-new-tokens "$new_tokens" \
  --batch-size 96 --shard-size 96 --held-out-fraction 0.1 --output "$runs/data"

step 4/6 "Training an EAGLE-3 head on the frozen target"
if [ ! -f "$runs/head/last/config.json" ]; then
  accelerate launch --config_file configs/accelerate/cpu.yaml --num_cpu_threads_per_process "$(nproc)" \
    train/heads.py configs/quickstart.yaml target.path="$target" data.path="$runs/data" output="$runs/head"
fi

step 5/6 "Acceptance and speed on held-out questions"
python serve/measure.py "$runs/head/best" --data "$runs/data" --held-out-fraction 0.1 --limit 10 \
  --max-new-tokens 64 --output "$runs/measured.json"

step 6/6 "One answer, with and without drafting"
python serve/generate.py "$runs/head/best" --compare --max-new-tokens 96 \
  --prompt "Explain in three sentences why the sky is blue."

step done "The head is in $runs/head/best, the measurements in $runs/measured.json"
