"""Peers in processes of their own: answers are taken over; what is no answer is said, and ends nobody else's run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tiny import random_prompts, tiny_model

import mtp
from serve.memory import resident_memory
from serve.peers import Peer, PeerError, start_peers
from serve.side_by_side import Prompt, System, sums_of, take_turns, transformers_systems

# A peer that answers by ``answer(request)``, an expression.
CHILD = """
import json, sys, time
print(json.dumps({{"ready": True}}), flush=True)
for at, line in enumerate(sys.stdin):
    request = json.loads(line)
    print({answer}, flush=True)
"""
COUNTING = """json.dumps({"ids": list(range(5, 5 + request["max_new_tokens"])), "seconds": 0.5,
    "rounds": 3, "drafted": 9, "accepted": 4})"""
PLAIN = 'json.dumps({"ids": [5, 6], "seconds": 0.5})'


def peer(folder: Path, answer: str = COUNTING, end_tokens: tuple[int, ...] = ()) -> Peer:
    return Peer("odd", [sys.executable, "-c", CHILD.format(answer=answer)], folder / "odd.log", end_tokens)


def test_an_answer_is_taken_over_up_to_its_end_token(tmp_path: Path) -> None:
    with peer(tmp_path, end_tokens=(7,)) as odd:
        outcome = odd.wait_until_ready().answer([1, 2], 6)
    assert outcome.answers[0].ids == [5, 6, 7]
    assert (outcome.new_tokens, outcome.seconds) == (3, 0.5)
    assert outcome.stats is not None
    assert outcome.stats.mean_accepted_length == pytest.approx(7 / 3)
    assert odd.process.returncode == 0, "it ends with its input"


def test_a_peer_that_does_not_draft_has_no_counters(tmp_path: Path) -> None:
    with peer(tmp_path, PLAIN) as odd:
        assert odd.wait_until_ready().answer([1], 2).stats is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("sys.exit(3)", "odd ended with exit code 3"),
        ('"loading..."', "expected one JSON object a line"),
        ('json.dumps({"ids": [], "seconds": 1})', "a non-empty list of token ids"),
        ('json.dumps({"ids": [1.5], "seconds": 1})', "a non-empty list of token ids"),
        ('json.dumps({"ids": [1], "seconds": -1})', "expected a number above 0"),
        ('json.dumps({"ids": [1], "seconds": 1, "rounds": 1, "drafted": 2, "accepted": 3})', "accepted <= drafted"),
        ("time.sleep(60)", "was silent for 0.5 seconds"),
        ('sys.stderr.write("no memory left") and exit(1)', "no memory left"),
    ],
)
def test_what_is_no_answer_is_said(tmp_path: Path, answer: str, message: str) -> None:
    odd = peer(tmp_path, answer).wait_until_ready()
    with pytest.raises(PeerError, match=message):
        odd.answer([1], 2, seconds=0.5 if "sleep" in answer else 60)
    odd.process.kill()
    odd.close()


def test_a_peer_that_does_not_come_up_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [sys.executable, "-c", CHILD.format(answer=PLAIN)]
    commands = {
        "absent": [str(tmp_path / "no such python")],
        "broken": [sys.executable, "-c", "import no_such_engine"],
        "talkative": [sys.executable, "-c", "print('{}')"],
        "good": good,
    }
    with ExitStack() as stack:
        assert list(start_peers(commands, tmp_path, [], stack)) == ["good"]
    assert "absent cannot be started" in caplog.text
    assert "No module named 'no_such_engine'" in caplog.text
    assert 'expected {"ready": true} first' in caplog.text


def test_a_peer_that_dies_does_not_lose_the_run_of_the_others(tmp_path: Path) -> None:
    model = mtp.SpeculativeModel.from_target(tiny_model(), "none")
    prompts = [Prompt(str(at), "any", ids) for at, ids in enumerate(random_prompts([5, 6, 7]))]
    dying = peer(tmp_path, f"{PLAIN} if at < 2 else sys.exit(9)").wait_until_ready()  # the first is its warm-up
    records: list[dict[str, object]] = []
    systems = [*transformers_systems(model), System("odd", dying.answer)]
    failed = take_turns(model, systems, prompts, 4, records)
    dying.close()
    assert "exit code 9" in failed["odd"]
    sums = sums_of(records)
    assert {name: each.prompts for name, each in sums.items()} == {
        "transformers": 3,
        "transformers, prompt lookup": 3,
        "odd": 1,
    }
    # The peer is held against what transformers took for the prompts that the peer answered.
    first = records[0]["systems"]["transformers"]  # type: ignore[index]
    assert sums["odd"].speedup == pytest.approx((2 / 0.5) / (first["tokens"] / first["seconds"]))
    json.dumps(records)


def test_memory_is_that_of_the_peers_own_process(tmp_path: Path) -> None:
    hungry = 'json.dumps({"ids": [len(b"x" * (64 << 20)) and 1], "seconds": 1})'
    with peer(tmp_path, hungry) as odd:
        odd.wait_until_ready()
        memory = resident_memory(odd.process.pid, partial(odd.answer, [1], 1))
    assert 0 < memory.before < 64 <= memory.peak - memory.before + 1 < 80


TICKING = """
import json, subprocess, sys, threading, time
ticks = 0
def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1
threading.Thread(target=tick, daemon=True).start()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"ids": [1 + ticks], "seconds": 1.0}), flush=True)
"""


def test_a_peer_stands_still_while_it_is_not_asked(tmp_path: Path) -> None:
    with Peer("ticking", [sys.executable, "-c", TICKING], tmp_path / "log") as ticking:
        ticking.wait_until_ready()
        before = ticking.answer([1], 1).answers[0].ids[0]
        time.sleep(1.0)
        assert ticking.answer([1], 1).answers[0].ids[0] < before + 50, "of the hundred times that it would have ticked"


OWNER = """
import sys, time
from pathlib import Path
from serve.peers import Peer
peer = Peer("ticking", [sys.executable, "-c", Path(sys.argv[1]).read_text()], Path(sys.argv[2])).wait_until_ready()
print(peer.process.pid, flush=True)
time.sleep(60)
"""


def test_no_stopped_peer_is_left_behind_by_one_who_was_killed(tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(TICKING)
    command = [sys.executable, "-c", OWNER, str(tmp_path / "ticking.py"), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    ends = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < ends
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_peer_that_is_left_out_is_ended_at_once(tmp_path: Path) -> None:
    stays = f"import os; print(os.getpid(), flush=True, file=open({str(tmp_path / 'pid')!r}, 'w')); print('{{}}')"
    command = [sys.executable, "-c", f"{stays}; import sys; sys.stdout.flush(); sys.stdin.read()"]
    with ExitStack() as stack:
        assert not start_peers({"odd": command}, tmp_path, [], stack)
        assert not is_running(int((tmp_path / "pid").read_text()))
