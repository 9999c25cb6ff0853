"""Several trees as one: nodes on the same path are one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp.drafters.reliability import MOST, Reliability
from mtp.tree import TokenTree

UNSAID = 0.5  # confidence in the guesses of a drafter that names none; corrected by what comes of them


@dataclass(frozen=True)
class Candidates:
    """All guesses of several trees, each once.

    Attributes:
        tree: ``[B, M]`` nodes with their worth; those on the path of an earlier one are marked as not valid.
        promised: ``[B, M]`` what the drafters promise of each node given its parent, together.
        group: ``[B, M]`` who guessed it, one bit for each tree.
    """

    tree: TokenTree
    promised: Tensor
    group: Tensor


def merge(trees: Sequence[TokenTree], reliability: Reliability) -> Candidates:
    """Lay trees on top of each other, and say what each node is worth.

    Where several drafters guess the same, each may be right where the others are not: their promises together are
    ``1 - prod(1 - p)``, as if they erred independently.  How far that holds is learnt for each set of drafters.

    Args:
        trees: with the same roots, and none with drawn children.
        reliability: has a group for every set of trees.
    """
    guessing = [at for at, each in enumerate(trees) if each.num_nodes > 1]
    if len(guessing) < 2:  # nothing can be said twice
        alone = guessing[0] if guessing else 0
        tree = TokenTree(*(getattr(trees[alone], name) for name in ("tokens", "parents", "depths", "valid")))
        promised = _promises(trees[alone]).clamp_max(MOST)
        return _weighed(tree, promised, torch.full_like(tree.tokens, 1 << alone), reliability)
    tree, same = _laid_together(trees)
    promises = torch.cat([_promises(each) for each in trees], dim=1)
    bits = torch.cat([tree.tokens.new_full((each.num_nodes,), 1 << at) for at, each in enumerate(trees)])
    members = same.to(promises.dtype)
    promised = -torch.expm1(members @ torch.log1p(-promises.clamp_max(MOST))[..., None])[..., 0]
    group = (members @ bits.to(members.dtype)).long().clamp_max(2 ** len(trees) - 1)
    return _weighed(tree, promised, group, reliability)


def _weighed(tree: TokenTree, promised: Tensor, group: Tensor, reliability: Reliability) -> Candidates:
    """What each node is worth, from what is promised of it given its parent."""
    log_q = reliability.believed(promised, group).log()
    log_q[:, 0] = 0.0
    doublings = _doublings(tree.num_nodes)
    worth = torch.where(tree.valid, _path_sums(log_q, tree.parents.clamp_min(0), doublings).exp(), 0.0)
    return Candidates(replace(tree, log_q=log_q, worth=worth), promised, group)


def graft(drawn: TokenTree, guesses: TokenTree, nodes: int) -> TokenTree:
    """Put the worthiest guesses of another tree into a drawn one, behind the drawn children of each node.

    A guess that was drawn, too, is one node, with what both have below it.  Rules for drawn children keep the target's
    distribution as long as all that was drawn stays, whatever the guesses are and however they were chosen: a guess
    that was not drawn is accepted as often as the target would have said it at that point.

    Args:
        drawn: stays as it was drawn.
        guesses: with their worth.
        nodes: of the whole, more than were drawn.
    """
    assert drawn.q is not None
    assert guesses.worth is not None
    tree, _ = _laid_together([drawn, guesses])
    first = guesses.worth.new_full(drawn.tokens.shape, 2.0)  # more than any guess is worth
    chosen = torch.zeros_like(drawn.valid) if drawn.fixed is None else drawn.fixed
    whole = replace(
        tree,
        q=F.pad(drawn.q, (0, 0, 0, guesses.num_nodes)),
        fixed=torch.cat([chosen, torch.ones_like(guesses.valid)], dim=1),
        worth=torch.cat([first, guesses.worth], dim=1),
    )
    return replace(whole.worthiest(nodes), worth=None)


def _laid_together(trees: Sequence[TokenTree]) -> tuple[TokenTree, Tensor]:
    """All nodes side by side ``[B, M]``, those on the path of an earlier one marked as not valid.

    Returns:
        the tree, and ``[B, M, M]`` which nodes stand for the same text.
    """
    tokens, depths, valid = (
        torch.cat([getattr(tree, name) for tree in trees], dim=1) for name in ("tokens", "depths", "valid")
    )
    starts = accumulate([tree.num_nodes for tree in trees], initial=0)
    # A root is its own parent here.
    above = torch.cat([tree.parents.clamp_min(0) + start for tree, start in zip(trees, starts, strict=False)], dim=1)
    same = _same_paths(tokens, depths, valid, above, _doublings(max(tree.num_nodes for tree in trees)))
    first = same.byte().argmax(-1)  # of several maxima the first
    index = torch.arange(tokens.shape[1], device=tokens.device)
    alive = same.diagonal(dim1=1, dim2=2) & (first == index)
    parents = torch.where(index == 0, -1, first.gather(1, above))
    return TokenTree(tokens, parents, depths, alive), same


def _doublings(nodes: int) -> int:
    """After how many doublings of a step up the path every node of a tree of ``nodes`` nodes is at its root."""
    return (nodes - 1).bit_length()


def _promises(tree: TokenTree) -> Tensor:
    """``[B, N]`` how likely each node is to be accepted given its parent, as its drafter says."""
    if tree.worth is not None:
        return (tree.worth / tree.worth.gather(1, tree.parents.clamp_min(0)).clamp_min(1e-9)).clamp(0.0, 1.0).float()
    if tree.log_q is not None:
        return tree.log_q.float().exp()
    return torch.full(tree.tokens.shape, UNSAID, device=tree.tokens.device)


def _same_paths(tokens: Tensor, depths: Tensor, valid: Tensor, above: Tensor, doublings: int) -> Tensor:
    """``[B, M, M]`` True where two nodes stand for the same text; False for those with padding on their path.

    Two paths of one length are the same if their last tokens are and the paths above them; looking twice as far up each
    time takes the logarithm of the depth, where level by level would take the depth.
    """
    same = (tokens[:, :, None] == tokens[:, None]) & (depths[:, :, None] == depths[:, None])
    same &= valid[:, :, None] & valid[:, None]
    for _ in range(doublings):
        of_rows = same.gather(1, above[:, :, None].expand_as(same))
        same = same & of_rows.gather(2, above[:, None].expand_as(same))
        above = above.gather(1, above)
    return same


def _path_sums(values: Tensor, parents: Tensor, doublings: int) -> Tensor:
    """Sums of ``values [B, M]`` from each node up to the root, whose own value is zero."""
    for _ in range(doublings):
        values = values + values.gather(1, parents)
        parents = parents.gather(1, parents)
    return values
