#!/usr/bin/env bash
# The tests, from nothing: makes its own virtual environment, then lints, checks types and runs pytest.
#
#   bash scripts/test.sh               fast set (tiny random models; a few minutes)
#   bash scripts/test.sh --all         and the slow sets: several processes, and the real default target, which it fetches (93 MB)
#   bash scripts/test.sh --lowest      at the lowest supported versions, in an environment of its own
#   bash scripts/test.sh -k tree -x    further arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."

all=false lowest=false
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=true ;;
    --lowest) lowest=true ;;
    *) break ;;
  esac
  shift
done

if $lowest; then
  source scripts/environment.sh .venv-lowest dev scripts/constraints-lowest.txt
else
  source scripts/environment.sh .venv dev scripts/constraints.txt
  ruff check .
  ruff format --check .
  mypy
fi

export TOKENIZERS_PARALLELISM=false
HF_HUB_OFFLINE=1 python -m pytest "$@"
if $all; then
  HF_HUB_OFFLINE=1 python -m pytest -m slow "$@"
  MTP_DEFAULT_TARGET=$(python scripts/fetch_default_target.py | tail -n 1)
  export MTP_DEFAULT_TARGET
  HF_HUB_OFFLINE=1 python -m pytest -m real_model "$@"
fi
