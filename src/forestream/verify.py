"""From the main stream's choices to a verdict on the draft tree. Greedy and exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forestream.drafting import DraftTree


@dataclass(frozen=True)
class Verdict:
    """What a pass decided: the path of verified nodes, from the root, and the token that comes after it."""

    path: tuple[int, ...]
    next_token: int


def verify(tree: DraftTree, choices: Sequence[int]) -> Verdict:
    """Walk from the root and accept a child for as long as it carries the main stream's choice at its parent.

    Args:
        tree: the nodes that were checked.
        choices: the main stream's own next token at each node.
    """
    path = [0]
    while True:
        wanted = choices[path[-1]]
        match = [child for child in tree.topology.children[path[-1]] if tree.tokens[child] == wanted]
        if not match:
            return Verdict(tuple(path), wanted)
        path.append(match[0])
