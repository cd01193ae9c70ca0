"""Verdicts on random trees against a search among all paths."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from forestream.verify import verify
from strategies import draft_trees


@given(st.data())
def test_the_accepted_path_is_the_longest_that_the_main_stream_agrees_with(data: DataObject) -> None:
    tree = data.draw(draft_trees(most=20, vocabulary=25))
    # Mostly one of the children's tokens, so that paths get long.
    choices = []
    for children in tree.topology.children:
        own = [tree.tokens[child] for child in children]
        choices.append(data.draw(st.sampled_from([*own * 3, 25])))
    verdict = verify(tree, choices.__getitem__)
    agreed = [
        path
        for path in map(tree.topology.path, range(len(tree.topology)))
        if all(tree.tokens[b] == choices[a] for a, b in pairwise(path))
    ]
    assert verdict.path == max(agreed, key=len)
    assert verdict.next_token == choices[verdict.path[-1]]
    assert sorted(map(len, agreed)) == list(range(1, len(verdict.path) + 1)), "what is agreed with is one path"
