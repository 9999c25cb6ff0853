"""Memory and time of training a head on targets of any size, from counted bytes and operations.

    python scripts/scaling.py            # the tables of docs/scaling.md

Nothing is measured here.  What is counted is checked against real modules in tests/test_scaling.py, and against runs at
small size in docs/scaling.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetSize:
    """A frozen model.

    Attributes:
        hidden: size of a hidden state.
        parameters: all that are stored, embeddings included.
        active: those that one token is multiplied with below the output matrix.
        layers: how many.
        attention: query heads times their size, all layers: what scores and values cost a token and a context token.
        heads: of the draft layer, with ``head_dim``.
        inner: MLP width of the draft layer, which takes the target's own where that is dense.
        bytes_each: of a stored parameter.
    """

    name: str
    hidden: int
    parameters: float
    active: float
    layers: int
    attention: int
    heads: int
    head_dim: int
    inner: int
    bytes_each: float

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_each


@dataclass(frozen=True)
class HeadSize:
    """An EAGLE-3 head (``mtp/heads/eagle3.py``): as many key-value heads as query heads.

    Attributes:
        hidden: of the target.
        width: query heads times their size.
        inner: of the MLP.
        vocabulary: of the draft vocabulary.
        steps: unrolled.
    """

    hidden: int
    width: int
    inner: int
    vocabulary: int
    steps: int

    @property
    def once(self) -> int:
        """Parameters that every position is multiplied with once: ``fc``, keys and values of the true entries."""
        return 3 * self.hidden**2 + 2 * 2 * self.hidden * self.width

    @property
    def each_step(self) -> int:
        """Parameters that a trained position is multiplied with at every step."""
        query, out = 2 * self.hidden * self.width, self.width * self.hidden
        return query + out + 3 * self.hidden * self.inner + self.vocabulary * self.hidden

    @property
    def own_entries(self) -> int:
        """Parameters of keys and values that a step after the first adds for its own entries."""
        return 2 * 2 * self.hidden * self.width

    @property
    def parameters(self) -> int:
        return self.once + self.each_step + 4 * self.hidden  # and four norms


@dataclass(frozen=True)
class Machine:
    """One accelerator, and how it is joined to seven others.

    Attributes:
        memory: bytes.
        operations: a second, dense, bfloat16.
        efficiency: share of them that large products reach.
        head_efficiency: the same for the head, whose products are smaller and whose softmax is bound by memory.
        link: bytes a second that come in from its neighbours.
        host_link: from main memory.
        network: bytes a second between groups of neighbours, for each accelerator.
        neighbours: accelerators that share a fast link, itself included.
    """

    memory: float = 141e9
    operations: float = 989e12
    efficiency: float = 0.4
    head_efficiency: float = 0.24
    link: float = 450e9
    host_link: float = 50e9
    network: float = 50e9
    neighbours: int = 8


H200 = Machine()
TARGETS = (
    TargetSize("8B dense, bf16", 4096, 8.03e9, 6.98e9, 32, 32 * 32 * 128, 32, 128, 14336, 2),
    TargetSize("70B dense, bf16", 8192, 70.6e9, 68.5e9, 80, 80 * 64 * 128, 64, 128, 28672, 2),
    TargetSize("671B MoE, fp8", 7168, 671e9, 36.6e9, 61, 61 * 128 * 192, 56, 128, 18432, 1),
)
SMOLLM2 = TargetSize("SmolLM2-135M", 576, 134.5e6, 106.2e6, 30, 30 * 9 * 64, 9, 64, 1536, 2)

VOCABULARY, STEPS, CONTEXT, RESPONSE_SHARE = 32_000, 3, 2048, 0.65
POSITIONS = (16_384, 8_192, 4_096)  # of a batch on one accelerator, whichever fits
GPUS = (1, 8, 64)
STREAMED = "streamed from main memory"


def head_of(target: TargetSize, vocabulary: int = VOCABULARY, steps: int = STEPS) -> HeadSize:
    return HeadSize(target.hidden, target.heads * target.head_dim, target.inner, vocabulary, steps)


def target_operations(target: TargetSize, context: float) -> float:
    """Of one token's pass below the output matrix, with ``context`` tokens before it on average."""
    return 2 * target.active + 4 * target.attention * context


def head_operations(head: HeadSize, trained: float, context: float) -> float:
    """Of one position's share of a training step: forward, and backward at twice that.

    Args:
        trained: share of the positions that are trained; prompts are only looked back at.
        context: tokens before a trained one, on average.
    """
    attention = 2 * head.width * context * head.steps
    forward = head.once + trained * (head.steps * head.each_step + (head.steps - 1) * head.own_entries + attention)
    teacher = trained * head.vocabulary * head.hidden
    return 2 * (3 * forward + teacher)


def feature_bytes(hidden: int, storage: float = 2, layers: int = 4) -> float:
    """Of one position in the cache: the last state and the tapped ones."""
    return layers * hidden * storage


def head_bytes(head: HeadSize) -> float:
    """Weights, gradients and two moments in float32."""
    return 16.0 * head.parameters


def batch_bytes(head: HeadSize, positions: int, trained: float, checkpointing: bool = False) -> float:
    """Most that a batch takes, under bfloat16 autocast: where the forward pass ends, or a step is computed again.

    Args:
        trained: share of the positions that are trained.
        checkpointing: ``optim.activation_checkpointing``.
    """
    # The target's states in float32; of the text's entries the inputs of norms and products, keys and values.
    text = 16 * head.hidden + (38 if checkpointing else 29) * head.hidden + 5 * head.width
    # Of a step: ten hidden states in float32 (the stream, embeddings, and each before and behind its norm), queries,
    # keys, values and what they attend to, and four vectors of the MLP, in bfloat16.
    inside = 40 * head.hidden + 7 * head.width + 8 * head.inner
    left = 4 * head.hidden + 5 * head.width  # the stream, and the step's own keys and values
    kept = head.steps * left + inside if checkpointing else head.steps * inside
    # Logits and their gradient in bfloat16 for each step, and the target's distribution in float32 for all of them.
    logits = (head.steps * (2 + 2) + 4) * head.vocabulary
    return positions * (text + trained * (kept + logits))


@dataclass(frozen=True)
class Plan:
    """A target on some accelerators.

    Attributes:
        placement: of the target's weights, in words.
        positions: of a batch on one accelerator.
        memory: bytes on each accelerator.
        saved: bytes of it that activation checkpointing saves, for one more forward pass of the head.
        target_seconds: of one token on one accelerator.
        head_seconds: the same.
        tokens: a second on all of them.
    """

    placement: str
    positions: int
    memory: float
    saved: float
    target_seconds: float
    head_seconds: float
    tokens: float


def plan(target: TargetSize, gpus: int, machine: Machine = H200) -> Plan:
    """The fastest placement that fits: whole, sharded over neighbours, or streamed from main memory.

    A pass that waits for its weights takes as long as they do or as long as the products do, whichever is longer: the
    next layer is fetched while one is computed.

    Raises:
        ValueError: if nothing fits.
    """
    plans = [found for positions in POSITIONS for found in _plans(target, gpus, machine, positions)]
    fitting = [found for found in plans if found.memory <= machine.memory]
    if not fitting:
        raise ValueError(f"{target.name} does not fit on {gpus} accelerators of {machine.memory / 1e9:.0f} GB.")
    return max(fitting, key=lambda found: (found.tokens, found.placement != STREAMED))


def _plans(target: TargetSize, gpus: int, machine: Machine, positions: int) -> list[Plan]:
    head, weights, group = head_of(target), target.weight_bytes, min(gpus, machine.neighbours)
    batch, spared = (batch_bytes(head, positions, RESPONSE_SHARE, checkpointing) for checkpointing in (False, True))
    working = head_bytes(head) + batch + pass_bytes(target, positions)
    gathered = 2 * weights / target.layers  # one layer at work while the next arrives
    exchange = weights * (group - 1) / group / machine.link
    options = [
        ("whole on each", weights, 0.0),
        # Each accelerator reads its share from main memory, once for all neighbours, and they exchange the shares.
        (STREAMED, gathered, max(weights / group / machine.host_link, exchange)),
    ]
    if group > 1:
        options.append((f"sharded over {group}", weights / group + gathered, exchange))
    compute = target_operations(target, CONTEXT / 2) / (machine.operations * machine.efficiency)
    step = head_operations(head, RESPONSE_SHARE, CONTEXT / 2) / (machine.operations * machine.head_efficiency)
    # Gradients go round once to be summed and once to be shared; that nothing runs meanwhile is the worst case.
    between = machine.link if gpus <= machine.neighbours else machine.network
    step += 0.0 if gpus == 1 else 2 * 4 * head.parameters / between / positions
    plans = []
    for placement, stored, fetch in options:
        seconds = max(compute, fetch / positions)
        memory, tokens = stored + working, gpus / (seconds + step)
        plans.append(Plan(placement, positions, memory, batch - spared, seconds, step, tokens))
    return plans


def pass_bytes(target: TargetSize, positions: int) -> float:
    """Activations of the target's pass, of one layer at a time: no gradient flows through it."""
    return positions * 2.0 * (8 * target.hidden + 3 * target.inner)


def tables() -> str:
    """The tables of docs/scaling.md, in Markdown."""
    lines = [
        "| target | head, M parameters | operations a token: target | head | cache a million tokens: bf16 | int8 |",
        "|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        head = head_of(target)
        lines.append(
            f"| {target.name} | {head.parameters / 1e6:.0f} | {target_operations(target, CONTEXT / 2) / 1e9:.1f} G "
            f"| {head_operations(head, RESPONSE_SHARE, CONTEXT / 2) / 1e9:.1f} G "
            f"| {feature_bytes(target.hidden) * 1e6 / 1e9:.0f} GB "
            f"| {feature_bytes(target.hidden, 1) * 1e6 / 1e9:.0f} GB |"
        )
    lines += [
        "",
        "| target | GPUs | weights | positions a batch | memory of each | checkpointing | µs/token: target | head "
        "| tokens/s | 100 M |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        for gpus in GPUS:
            it = plan(target, gpus)
            lines.append(
                f"| {target.name} | {gpus} | {it.placement} | {it.positions:,} | {it.memory / 1e9:.0f} GB "
                f"| {(it.memory - it.saved) / 1e9:.0f} GB "
                f"| {it.target_seconds * 1e6:.0f} | {it.head_seconds * 1e6:.0f} | {it.tokens:,.0f} "
                f"| {1e8 / it.tokens / 60:,.0f} min |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
