"""The training of the package speculators, by its own model and loss."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig

from mtp.heads.eagle3 import Eagle3Head
from scripts.training_contenders.contender import Contender
from scripts.training_contenders.shop import Shop, device_at_hand


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
        head = Eagle3Head.from_target(
            self.target, draft_ids, steps=self.shop.settings["steps"], context_vocabulary=False
        )
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
