"""The contenders of bench_training.py, each in a process of its own: a request a line, an answer a line.

ready       how many steps there are, how many weights are trained, and what went before the first step, in seconds
warm up     one step, which does not count
step        the next batch: seconds, trained tokens, accuracy of the first unrolled step's guesses
peak        most bytes in use beyond those before the first step
acceptance  of what was trained, by this library's evaluation on held-out rows
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from mtp.heads.eagle3 import Eagle3Head
from mtp.target import Target
from train.batches import training_batch
from train.config import DataConfig, HeadSection, OptimConfig, RunConfig, TargetConfig
from train.data import Row, length_batches
from train.evaluate import decode_acceptance, held_out_metrics
from train.features import FeatureSource, OnlineFeatures, pad_rows
from train.loop import Trainer
from train.schedule import warmup_cosine

CLIP_NORM = 1.0


def device_at_hand() -> torch.device:
    """The accelerator if there is one."""
    return torch.device(torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu")


class Peak:
    """How much more memory was in use at its peak than when this was made: of the accelerator, or of this process.

    What loading took at its own peak does not count: Linux forgets it on demand.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")
        else:
            torch.accelerator.reset_peak_memory_stats()
        self.before = self._now()

    def _now(self) -> int:
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated()
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def grown(self) -> int:
        """Bytes."""
        return self._now() - self.before


class Shop:
    """Rows and the target's states, as bench_training.py wrote them.

    Attributes:
        settings: of the run.
        rows: prompts and answers, to train on.
        held_out: others.
        hidden: of each row, ``[T, H]``.
        taps: of each row, ``[T, 3 * H]``.
        draft_ids: ``[Vd]``.
    """

    def __init__(self, folder: Path):
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
        tensors = load_file(folder / "states.safetensors")
        self.draft_ids = tensors["draft_ids"]
        prompts = self.settings["prompts"]
        ids = [tuple(tensors[f"tokens.{at}"].tolist()) for at in range(len(prompts))]
        self.rows = [Row(each[:start], each[start:]) for each, start in zip(ids, prompts, strict=True)]
        self.held_out = [Row(tuple(row["prompt_ids"]), tuple(row["response_ids"])) for row in self.settings["held_out"]]
        self.hidden = [tensors[f"hidden.{at}"] for at in range(len(prompts))]
        self.taps = [tensors[f"taps.{at}"] for at in range(len(prompts))]

    def target(self) -> Target:
        model = AutoModelForCausalLM.from_pretrained(self.settings["target"], dtype=torch.float32)
        return Target(model.eval().requires_grad_(False))

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens ``[B, T]``, hidden ``[B, T, H]``, taps ``[B, T, 3 * H]``, and which tokens are an answer's."""
        tokens, _ = pad_rows([self.rows[at].ids for at in indices], "cpu")
        hidden = torch.nn.utils.rnn.pad_sequence([self.hidden[at] for at in indices], batch_first=True)
        taps = torch.nn.utils.rnn.pad_sequence([self.taps[at] for at in indices], batch_first=True)
        answer = torch.zeros_like(tokens, dtype=torch.bool)
        for row, at in enumerate(indices):
            answer[row, len(self.rows[at].prompt_ids) : len(self.rows[at])] = True
        return tokens, hidden, taps, answer

    def in_order(self, padding: bool) -> list[list[int]]:
        """Batches of rows as they come, of at most so many positions as a step may have."""
        batches: list[list[int]] = [[]]
        for at in range(len(self.rows)):
            grown = [*batches[-1], at]
            lengths = [len(self.rows[index]) for index in grown]
            size = len(grown) * max(lengths) if padding else sum(lengths)
            if size > self.settings["positions"] and batches[-1]:
                batches.append([at])
            else:
                batches[-1] = grown
        return batches


class Contender(ABC):
    """One way of training.

    Attributes:
        batches: of all passes, in order.
        parameters: that are trained.
        start_seconds: what went before the first step, as a warm start of the weights.
    """

    batches: list[list[int]]
    parameters: int
    start_seconds = 0.0
    target: Target

    @abstractmethod
    def step(self, batch: list[int]) -> tuple[int, float]:
        """One step of the optimiser: how many tokens it trained, and the share of right first guesses."""

    @abstractmethod
    def trained(self) -> Eagle3Head:
        """What was trained so far, as this library decodes it."""

    def prepare(self, weights: Iterable[Tensor], settings: dict[str, Any]) -> None:
        """AdamW on ``weights``, at learning rates that fall as ours do."""
        self.optimizer = torch.optim.AdamW(weights, lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_cosine(len(self.batches), 0))

    def descend(self, weights: Iterable[Tensor]) -> None:
        """A step along gradients that were computed."""
        torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class FromMemory(FeatureSource):
    """States that were computed before."""

    def __init__(self, shop: Shop, target: Target):
        super().__init__(target, shop.rows, shop.settings["taps"])
        self.shop = shop

    def _states(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        _, hidden, taps, _ = self.shop.padded(indices)
        return hidden.to(self.target.device), taps.to(self.target.device)


class Ours(Contender):
    """The step of train/heads.py, with everything around it: counts, clipping, schedule, metrics."""

    warm_start_positions = 0

    def __init__(self, shop: Shop):
        settings, accelerator = shop.settings, Accelerator(mixed_precision="no")
        target = shop.target()
        target.causal_lm.to(accelerator.device)
        config = RunConfig(
            output=os.devnull,
            target=TargetConfig(path=settings["target"]),
            data=DataConfig(path="memory"),
            head=HeadSection(steps=settings["steps"], warm_start_positions=self.warm_start_positions),
            optim=OptimConfig(
                epochs=settings["passes"],
                batch_positions=settings["positions"],
                lr=settings["lr"],
                warmup=0.0,
                clip_norm=CLIP_NORM,
            ),
        )
        torch.manual_seed(0)
        head = Eagle3Head.from_target(target, shop.draft_ids.to(target.device), steps=settings["steps"])
        features = FromMemory(shop, target)
        self.trainer, self.target = Trainer(config, accelerator, target, head, features, features), target
        started = time.perf_counter()
        self.trainer.begin()
        self.start_seconds = time.perf_counter() - started
        self.batches = [batch for (batch,) in self.trainer.order.steps(1)]
        self.parameters = head.num_trainable_parameters()

    def step(self, batch: list[int]) -> tuple[int, float]:
        metrics = self.trainer._step([batch])
        return metrics["positions"], metrics["accuracy"][0]

    def trained(self) -> Eagle3Head:
        assert isinstance(self.trainer.head, Eagle3Head)
        return self.trainer.head


class OursWithStart(Ours):
    """As recipes have it: the weights start from least squares on the rows to train on."""

    warm_start_positions = HeadSection.warm_start_positions


class Plain(Contender):
    """The same layer as one would write its training first."""

    def __init__(self, shop: Shop):
        self.shop, self.target = shop, shop.target()
        self.target.causal_lm.to(device_at_hand())
        torch.manual_seed(0)
        vocabulary = self.vocabulary().to(self.target.device)
        self.head = Eagle3Head.from_target(self.target, vocabulary, steps=shop.settings["steps"])
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


class Speculators(Contender):
    """speculators' EAGLE-3 model, forward, loss and metrics; rows packed into one, as its collator packs them."""

    train_output = False

    def __init__(self, shop: Shop):
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel

        settings = shop.settings
        layer = AutoConfig.from_pretrained(settings["target"])
        layer.num_hidden_layers = 1
        if getattr(layer, "head_dim", None) is None:
            layer.head_dim = layer.hidden_size // layer.num_attention_heads
        in_draft = torch.zeros(layer.vocab_size, dtype=torch.bool)
        in_draft[shop.draft_ids] = True
        torch.manual_seed(0)
        self.model = Eagle3DraftModel.from_training_args(
            layer,
            t2d=in_draft,
            d2t=shop.draft_ids - torch.arange(len(shop.draft_ids)),
            draft_vocab_size=len(shop.draft_ids),
            norm_before_residual=False,
            ttt_steps=settings["steps"],
            verifier_name_or_path=settings["target"],
            target_layer_ids=list(settings["taps"]),
            draft_attn_impl=settings["attention"],
        ).float()
        # Our states are those behind the target's last norm already.
        self.model.verifier_norm = torch.nn.Identity()
        if self.train_output:
            self.model.lm_head.weight.requires_grad_(True)
        self.model.to(device_at_hand()).train()
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        # Its fused losses need Triton, which needs a GPU.
        implementation = "fused" if torch.cuda.is_available() else "eager"
        self.options = {
            "ttt_steps": settings["steps"],
            "ttt_step_loss_decay": 0.8,
            "loss_config": resolve_loss_config("kl_div", implementation),
        }
        self.shop, self.target = shop, shop.target()
        self.batches = shop.in_order(padding=False) * settings["passes"]
        self.prepare(trained, settings)
        self.parameters = sum(weight.numel() for weight in trained)

    def step(self, batch: list[int]) -> tuple[int, float]:
        inputs = self.packed(batch)
        _, loss, metrics = self.model(**inputs, **self.options)
        loss.backward()
        self.descend(self.model.parameters())
        return int(inputs["loss_mask"].sum()), float(metrics["full_acc_0_sum"] / metrics["full_acc_0_total"])

    def packed(self, batch: list[int]) -> dict[str, Tensor]:
        """Rows behind one another, ``[1, T]``: each token with the states before it and the state behind it."""
        parts: dict[str, list[Tensor]] = {}
        for document, at in enumerate(batch):
            row = self.shop.rows[at]
            place = torch.arange(1, len(row))
            trained = torch.zeros(len(place), dtype=torch.bool)
            trained[:-1] = place[1:] >= len(row.prompt_ids)
            for name, part in {
                "input_ids": torch.tensor(row.ids[1:]),
                "hidden_states": self.shop.taps[at][:-1],
                "verifier_last_hidden_states": self.shop.hidden[at][1:],
                "loss_mask": trained,
                "position_ids": place,
                "document_ids": torch.full_like(place, document),
            }.items():
                parts.setdefault(name, []).append(part)
        device = self.model.fc.weight.device
        return {name: torch.cat(each)[None].to(device) for name, each in parts.items()}

    @torch.no_grad()
    def trained(self) -> Eagle3Head:
        """Its weights go by the same names; each of its key-value heads serves several of ours."""
        self.target.causal_lm.to(device_at_hand())
        draft_ids = self.shop.draft_ids.to(self.target.device)
        head = Eagle3Head.from_target(self.target, draft_ids, steps=self.shop.settings["steps"])
        theirs = {name.replace("layers.0.", "midlayer."): weight for name, weight in self.model.state_dict().items()}
        theirs = {name.replace("self_attn.", ""): weight for name, weight in theirs.items()}
        for name, weight in head.named_parameters():
            source = theirs[name]
            if source.shape != weight.shape:
                heads = source.unflatten(0, (-1, head.config.head_dim))
                source = heads.repeat_interleave(weight.shape[0] // source.shape[0], 0).flatten(0, 1)
            weight.copy_(source)
        return head


class SpeculatorsWithOutput(Speculators):
    """The same with its output matrix trained, as ours is; the package leaves it as it takes it from the target."""

    train_output = True


CONTENDERS: dict[str, type[Contender]] = {
    "ours": Ours,
    "ours+start": OursWithStart,
    "plain": Plain,
    "plain+draft": PlainOverDraftVocabulary,
    "speculators": Speculators,
    "speculators+output": SpeculatorsWithOutput,
}


def acceptance(contender: Contender, shop: Shop) -> dict[str, Any]:
    """Of held-out rows, by labels and by the decoder; the same for all contenders."""
    head, settings = contender.trained().eval(), shop.settings
    features = OnlineFeatures(contender.target, shop.held_out, head.taps)
    batches = length_batches([len(row) for row in shop.held_out], settings["positions"], generator=None)
    counted = held_out_metrics(head, (training_batch(features, batch) for batch in batches), settings["steps"])
    decoded = decode_acceptance(
        contender.target,
        head,
        shop.held_out,
        max_new_tokens=settings["new_tokens"],
        batch_size=8,
        nodes=settings["nodes"],
        progress=False,
    )
    return {**counted, "mean_accepted_length": decoded["mean_accepted_length"]}


def main(name: str, folder: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed does not belong between answers
    shop = Shop(Path(folder))
    contender = CONTENDERS[name](shop)  # type: ignore[call-arg]
    device, left = device_at_hand(), list(contender.batches)
    peak = Peak(device)

    def timed(batch: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        tokens, accuracy = contender.step(batch)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return {"seconds": time.perf_counter() - started, "tokens": tokens, "accuracy": accuracy}

    for request in sys.stdin:
        match request.strip():
            case "ready":
                answer: dict[str, Any] = {
                    "batches": len(contender.batches),
                    "parameters": contender.parameters,
                    "start_seconds": contender.start_seconds,
                }
            case "warm up":
                answer = timed(contender.batches[0])
            case "step":
                answer = timed(left.pop(0))
            case "peak":
                answer = {"bytes": peak.grown()}
            case _:
                answer = acceptance(contender, shop)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
