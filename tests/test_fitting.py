"""A recipe that this target cannot carry is refused before any training, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import HIDDEN

from mtp.heads import HEADS
from mtp.heads.autoregressive import AutoregressiveHead
from mtp.support import UnsupportedTargetError
from tests.tiny import LAYERS, tiny_target
from train.config import ConfigError, load_config
from train.fitting import make_head

NO_ESTIMATE = [family for family, head in sorted(HEADS.items()) if not head.estimates_hidden]
AUTOREGRESSIVE = [family for family, head in sorted(HEADS.items()) if issubclass(head, AutoregressiveHead)]
NOT_FOLLOWING = [family for family, head in sorted(HEADS.items()) if not head.follows_own_tokens]


def make(*overrides: str) -> object:
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


@pytest.mark.parametrize("family", AUTOREGRESSIVE)
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


def test_a_size_that_is_set_elsewhere_is_not_set_twice() -> None:
    with pytest.raises(ConfigError, match=r"Unknown key head\.sizes\.steps"):
        make("head.sizes.steps=64")


@pytest.mark.parametrize("override", ["head.steps=0", "head.sizes.num_heads=two", "head.sizes.head_dim=7"])
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
    with pytest.raises(ConfigError, match=r"optim\.own_tokens: found .*between 0 and 1"):
        make(f"optim.own_tokens={share}")


@pytest.mark.parametrize("family", NOT_FOLLOWING)
def test_own_tokens_are_refused_for_a_head_that_follows_none(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"a {family} head has no steps that could follow"):
        make(f"head.family={family}", "optim.own_tokens=0.5")
