"""A recipe that this target cannot carry is refused before any training, with the reason."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from architectures import HIDDEN

from mtp.heads import HEADS, Head
from mtp.support import UnsupportedTargetError
from tests.tiny import LAYERS, tiny_target
from train.assembly import gather
from train.config import ConfigError
from train.fitting import make_head, size_kinds
from train.recipe import load_config

NO_ESTIMATE = [family for family, head in sorted(HEADS.items()) if not head.estimates_hidden]
READING_EMBEDDINGS = [family for family, head in sorted(HEADS.items()) if head.reads_embeddings]
NOT_FOLLOWING = [family for family, head in sorted(HEADS.items()) if not head.follows_own_tokens]


def make(*overrides: str) -> Head:
    config = load_config(["target.path=here", "data.path=there", *overrides])
    return make_head(config, tiny_target(), torch.arange(12))


@pytest.mark.parametrize("family", sorted(HEADS))
def test_every_family_is_made_from_a_recipe_with_defaults(family: str) -> None:
    assert make(f"head.family={family}", "head.steps=2").config.steps == 2


@pytest.mark.parametrize("recipe", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_makes_its_head(recipe: Path) -> None:
    config = load_config([str(recipe), "target.path=here", "data.path=there"])
    assert make_head(config, tiny_target(), torch.arange(12)).family == config.head.family


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"head\.family: No head family 'eagel'; there are .*eagle"):
        make("head.family=eagel")


def test_a_layer_that_the_target_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"reads layer 27 of the target.*has layers 0 to {LAYERS}"):
        make("head.sizes.taps=[1,2,27]")


@pytest.mark.parametrize("family", READING_EMBEDDINGS)
def test_a_target_with_narrow_embeddings_is_refused_for_heads_that_read_them(family: str) -> None:
    target = tiny_target()
    target.causal_lm.set_input_embeddings(torch.nn.Embedding(target.vocab_size, 16))
    config = load_config(["target.path=here", "data.path=there", f"head.family={family}"])
    with pytest.raises(UnsupportedTargetError, match=rf"as wide as hidden states \({HIDDEN}\).* have 16 dimensions"):
        make_head(config, target, torch.arange(12))


def test_too_few_layers_to_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"EAGLE-3 reads three layers of the target; found taps=\(1,\)"):
        make("head.sizes.taps=[1]")


def test_an_unknown_size_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"head\.sizes\.intermediate; did you mean head\.sizes\.intermediate_size"):
        make("head.sizes.intermediate=64")


SIZES = [(family, name) for family, head in sorted(HEADS.items()) for name in sorted(size_kinds(head))]
NUMBERS = [(family, name) for family, name in SIZES if size_kinds(HEADS[family])[name] in (int, float)]


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_a_checkpoint_says_every_size_that_a_recipe_may_name(family: str, name: str) -> None:
    """A recipe that goes on with a finished head is compared with it."""
    assert name in {item.name for item in fields(HEADS[family].config_class)}


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_a_size_of_another_type_is_refused_by_its_name(family: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^head\.sizes\.{name}[.0-9]*: found .*'many'.*, expected"):
        make(f"head.family={family}", f"head.sizes.{name}=[many]")


@pytest.mark.parametrize(("family", "name"), NUMBERS)
def test_no_size_may_be_below_zero(family: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"makes no {family} head: .*-1"):
        make(f"head.family={family}", f"head.sizes.{name}=-1")


@pytest.mark.parametrize("family", sorted(HEADS))
def test_what_follows_from_the_target_cannot_be_asked_for(family: str) -> None:
    for name in HEADS[family].fixed_sizes:
        with pytest.raises(ConfigError, match=rf"Unknown key head\.sizes\.{name}"):
            make(f"head.family={family}", f"head.sizes.{name}=[]")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ("family=mtp head.sizes.layer=3", r"Layer 3 cannot be copied: the target has layers 0 to 2"),
        ("family=block head.sizes.markov_rank=33", r"rank of hidden states at most \(32\); found markov_rank=33"),
        ("family=eagle head.sizes.rope_parameters={rope_type: round}", r"rope_parameters=.*round"),
        ("family=eagle3 head.sizes.rope_parameters={rope_type: linear}", r"rope_parameters=.*factor"),
        ("family=hydra head.sizes.depth=3", r"Trees of depth 3 need as many Hydra heads; found steps=2"),
    ],
)
def test_sizes_that_do_not_fit_each_other_or_the_target_are_refused(sizes: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make("head.steps=2", *(f"head.{part.removeprefix('head.')}" for part in sizes.split(" ", 1)))


def test_the_layers_of_an_assistant_are_named_in_a_recipe() -> None:
    head = make("head.family=assistant", "head.sizes.layers=[0,2]")
    assert head.config.model["num_hidden_layers"] == 2
    with pytest.raises(UnsupportedTargetError, match=r"Found layers \(0, 9\); expected some of 0 to 2"):
        make("head.family=assistant", "head.sizes.layers=[0,9]")


@pytest.mark.parametrize(
    "override",
    [
        *("head.family=eagel", "head.steps=0", "head.sizes.depht=3", "head.sizes.depth=deep", "optim.own_tokens=2"),
        *("optim.loss.smooth_l1=1", "optim.step_weight=[1]", "features.prompt_positions=1"),
    ],
)
def test_what_a_recipe_says_by_itself_is_refused_before_the_target_is_loaded(override: str) -> None:
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"{key.rsplit('.', 1)[0]}"):
        gather(load_config(["target.path=nowhere", "data.path=there", override]))


def test_a_size_that_is_set_elsewhere_is_not_set_twice() -> None:
    with pytest.raises(ConfigError, match=r"Unknown key head\.sizes\.steps"):
        make("head.sizes.steps=64")


@pytest.mark.parametrize("override", ["head.sizes.head_dim=7", "head.sizes.width=0"])
def test_sizes_that_make_no_head_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"^head: found HeadSection.*makes no eagle3 head"):
        make(override)


@pytest.mark.parametrize("family", sorted(HEADS))
def test_a_warm_start_on_an_output_matrix_that_cannot_be_copied_is_refused(family: str) -> None:
    class QuantisedWeight(torch.nn.Parameter):
        """Stands for the weight types of quantisation libraries."""

    target = tiny_target()
    layer = target.causal_lm.get_output_embeddings()
    layer.weight = QuantisedWeight(layer.weight.detach())
    config = load_config(["target.path=here", "data.path=there", f"head.family={family}"])
    with pytest.raises(UnsupportedTargetError, match="rows cannot be copied"):
        make_head(config, target, torch.arange(12))


def test_an_unknown_loss_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"optim\.loss\.total_variance; did you mean optim\.loss\.total_variation"):
        make("optim.loss.total_variance=1")


@pytest.mark.parametrize("weights", ["{}", "{top_k: 0}", "{top_k: -1}", "{top_k: .nan}", "{top_k: .inf}"])
def test_weights_that_are_no_weights_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"optim\.loss: found .*expected weights that are zero or more"):
        make(f"optim.loss={weights}")


@pytest.mark.parametrize("family", NO_ESTIMATE)
def test_regression_is_refused_for_a_head_that_estimates_no_hidden_state(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.loss\.smooth_l1 .* {family} head makes no estimate"):
        make(f"head.family={family}", "optim.loss.smooth_l1=1")


@pytest.mark.parametrize("weight", ["0", "-0.5", "[1,1]", "[0,0,0]", "[1,-1,1]"])
def test_step_weights_that_do_not_fit_the_steps_are_refused(weight: str) -> None:
    with pytest.raises(ConfigError, match=r"optim\.step_weight: found .*a list of 3 weights"):
        make("head.steps=3", f"optim.step_weight={weight}")


def test_step_weights_may_be_a_list() -> None:
    config = load_config(["target.path=here", "data.path=there", "optim.step_weight=[1, 0.5, 2e-1]"])
    assert config.optim.step_weight == (1.0, 0.5, 0.2)


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_a_share_of_own_tokens_is_between_none_and_all(share: str) -> None:
    with pytest.raises(ConfigError, match=r"optim\.own_tokens: found .*, expected 0 to 1"):
        make(f"optim.own_tokens={share}")


@pytest.mark.parametrize("family", NOT_FOLLOWING)
def test_own_tokens_are_refused_for_a_head_that_follows_none(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"a {family} head has no steps that could follow"):
        make(f"head.family={family}", "optim.own_tokens=0.5")
