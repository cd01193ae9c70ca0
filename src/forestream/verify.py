"""From the main stream's choices to a verdict on the draft tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forestream.drafting import DraftTree


@dataclass(frozen=True)
class Verdict:
    """What a pass decided.

    Attributes:
        path: verified nodes, from the root.
        next_token: what comes behind the path; None where the path's last token ends the text.
    """

    path: tuple[int, ...]
    next_token: int | None


def _goes_on() -> bool:
    return False


def verify(tree: DraftTree, choose: Callable[[int], int], over: Callable[[], bool] = _goes_on) -> Verdict:
    """Walk from the root and accept a child for as long as it carries the main stream's choice at its parent.

    The choice is asked for once at every node of the path, in order, and nowhere else: whatever has a state (random
    draws, processors, grammars) goes through what it would go through in plain decoding. This is the whole rule: a
    draft is never compared with a probability, so the law of the text is the law of the choices.

    Args:
        tree: the nodes that were checked.
        choose: the main stream's own next token at a node.
        over: whether the token chosen last ends the text; nothing is chosen behind it.
    """
    path = [0]
    while True:
        wanted = choose(path[-1])
        match = [child for child in tree.topology.children[path[-1]] if tree.tokens[child] == wanted]
        if not match:
            return Verdict(tuple(path), wanted)
        path.append(match[0])
        if over():
            return Verdict(tuple(path), None)
