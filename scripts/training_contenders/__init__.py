"""The ways of training EAGLE-3 that scripts/bench_training.py compares, each in a process of its own."""
