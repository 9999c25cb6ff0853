"""What a step of the optimiser minimises, and what it says about the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtp.heads import Head, Prediction, TrainingBatch
from train.config import OptimConfig
from train.evaluate import labels_of, teacher_probs
from train.losses import confidence_loss, mixture, step_weights


def objective(
    head: Head, batch: TrainingBatch, predictions: Sequence[Prediction], optim: OptimConfig, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The recipe's loss of all unrolled steps, each the mean over its trained positions in the whole optimiser step.

    Args:
        batch: one of the step's batches, and ``predictions`` what ``head`` made of it.
        counts: ``[steps]`` positions that the recipe trains in all batches of the step, in all processes.  A mean a
            batch would weigh the tokens of a batch with few of them more.  Positions that a head leaves out because its
            own tokens were others than the text's still count.

    Returns:
        The batch's share of the loss, and ``[4, steps]`` sums over the batch of each unrolled step's losses, right
        guesses, guesses, and tokens outside the draft vocabulary.
    """
    teacher = teacher_probs(head, batch)
    losses, objectives, hits, outside = [], [], [], []
    for prediction in predictions:
        labels = labels_of(head, batch, prediction, teacher)
        loss = mixture(optim.loss, prediction, labels).sum()
        losses.append(loss.detach())
        # A confidence output has weights of its own, so that it takes nothing from the rest.
        objectives.append(loss + confidence_loss(prediction, labels).sum())
        # Where logits are bfloat16, argmax takes four times as long on a CPU.
        hits.append((prediction.logits.detach().max(-1).indices == labels.tokens).sum())
        outside.append((labels.tokens < 0).sum())
    weights = step_weights(optim.step_weight, len(losses))
    means = [each / max(count, 1) for each, count in zip(objectives, counts.tolist(), strict=True)]
    made = hits[0].new_tensor([len(prediction.rows) for prediction in predictions])
    share = torch.stack([w * mean for w, mean in zip(weights, means, strict=True)]).sum()
    return share, torch.stack([torch.stack(losses), torch.stack(hits), made, torch.stack(outside)])


def metrics_of(sums: Tensor, optim: OptimConfig) -> dict[str, Any]:
    """What the sums ``[4, steps]`` of ``objective`` over a whole step say, for logs."""
    loss, hits, made, outside = sums
    per_step = (loss / made.clamp_min(1)).tolist()
    weights = step_weights(optim.step_weight, len(per_step))
    return {
        "loss": round(sum(w * value for w, value in zip(weights, per_step, strict=True)), 4),
        "step_loss": [round(value, 4) for value in per_step],
        "accuracy": [round(value, 4) for value in (hits / made.clamp_min(1)).tolist()],
        "outside_draft_vocabulary": round(float(outside[0] / made[0].clamp_min(1)), 4),
    }
