"""The training that one would write first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mtp.heads.eagle3 import Eagle3Head
from scripts.training_contenders.contender import Contender
from scripts.training_contenders.shop import Shop, device_at_hand


class Plain(Contender):
    """The same layer as one would write its training first."""

    def __init__(self, shop: Shop):
        self.shop, self.target = shop, shop.target()
        self.target.causal_lm.to(device_at_hand())
        torch.manual_seed(0)
        vocabulary = self.vocabulary().to(self.target.device)
        self.head = Eagle3Head.from_target(
            self.target, vocabulary, steps=shop.settings["steps"], context_vocabulary=False
        )
        self.batches = shop.in_order(padding=True) * shop.settings["passes"]
        self.prepare(self.head.parameters(), shop.settings)
        self.parameters = self.head.num_trainable_parameters()

    def vocabulary(self) -> Tensor:
        """``[Vd]`` tokens that it can guess: all."""
        return torch.arange(self.target.vocab_size)

    def trained(self) -> Eagle3Head:
        return self.head

    def step(self, batch: list[int]) -> tuple[int, float]:
        tokens, hidden, taps, answer = (each.to(self.target.device) for each in self.shop.padded(batch))
        loss, right, count = self.loss(tokens, hidden, taps, answer)
        loss.backward()
        self.descend(self.head.parameters())
        return count, right / max(count, 1)

    def loss(self, tokens: Tensor, hidden: Tensor, taps: Tensor, answer: Tensor) -> tuple[Tensor, int, int]:
        """Of all unrolled steps, with how many first guesses were right and how many there were."""
        head, layer, length = self.head, self.head.midlayer, tokens.shape[1]
        place = torch.arange(length, device=tokens.device)
        mask = torch.where(place[None] <= place[:, None], 0.0, float("-inf"))
        diagonal = torch.where(place[None] == place[:, None], 0.0, float("-inf"))
        state = head.fc(taps / head.tap_scale)
        keys, values, losses, right, count = [], [], [], 0, 0
        for step in range(self.shop.settings["steps"]):
            after = tokens.roll(-1 - step, 1)  # what comes round at the end of a row is never trained on
            embedding = layer.input_layernorm(self.target.embed(after))
            inputs = torch.cat([embedding, layer.hidden_norm(state)], dim=-1)
            query, key = head.rotary(
                place[None] + step,
                layer.split_heads(layer.q_proj(inputs)),
                layer.split_heads(layer.k_proj(inputs)),
            )
            keys.append(key)
            values.append(layer.split_heads(layer.v_proj(inputs)))
            scores = query @ torch.cat(keys, 2).transpose(2, 3) * query.shape[-1] ** -0.5 + mask
            attended = (scores.softmax(-1) @ torch.cat(values, 2)).transpose(1, 2).flatten(2)
            state = layer.finish(state, attended)
            logits = head.guess(state)
            with torch.no_grad():
                teacher = self.target.unembed(hidden.roll(-1 - step, 1))[..., head.draft_ids].softmax(-1)
            trained = answer.roll(-2 - step, 1)
            trained[:, length - 2 - step :] = False
            each = cross_entropy(logits.flatten(0, 1), teacher.flatten(0, 1), reduction="none").view_as(trained)
            losses.append((each * trained).sum() / trained.sum().clamp_min(1))
            if step == 0:
                right = int(((head.draft_ids[logits.argmax(-1)] == tokens.roll(-2, 1)) & trained).sum())
                count = int(trained.sum())
            mask = torch.cat([mask, diagonal], dim=1)
        weights = [0.8**step for step in range(len(losses))]
        return sum(w * each for w, each in zip(weights, losses, strict=True)) / sum(weights), right, count


class PlainOverDraftVocabulary(Plain):
    """The same over the draft vocabulary, as EAGLE's own training has it."""

    def vocabulary(self) -> Tensor:
        return self.shop.draft_ids
