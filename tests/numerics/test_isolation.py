"""Nothing is left behind: a run depends on model, prompt and settings, not on what ran before or beside it."""

from collections.abc import Sequence
from typing import Any

import pytest

from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.errors import ConfigError
from forestream.steps import tokens_of
from oracle import assert_equal_texts
from subject import model_of
from wrapped import prompt, wrapped
from zoo import HOSTS

every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_runs_repeat_and_an_abandoned_run_leaves_no_trace(mode: str) -> None:
    model, start, other = model_of("qwen3", mode), prompt(6), prompt(9, seed=1)
    settings = DecodeSettings(max_new_tokens=20, prune_to=7)

    def outline(first: Sequence[int]) -> list[tuple[Any, ...]]:
        steps = decode(model, first, settings)
        return [(s.tokens, s.accepted, s.kept, s.path, s.finish, s.tree and s.tree.tokens) for s in steps]

    alone = outline(start)
    assert outline(start) == alone
    for passes in (1, 2, 3):
        begun = decode(model, other, settings)
        for _ in range(passes):
            next(begun)
        begun.close()
        assert outline(start) == alone
    left_open = decode(model, other, settings)
    next(left_open)
    assert outline(start) == alone
    assert list(left_open), "an open run goes on beside another"
    assert outline(start) == alone


class _Fault(Exception):
    """Something breaks in the middle of a pass."""


@both_modes
def test_a_run_that_broke_anywhere_leaves_no_trace(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer, the head or a commit fails, early or late: the next run is as if nothing had been."""
    model, start = model_of("llama", mode), prompt(6)
    settings = DecodeSettings(max_new_tokens=12, nodes=8, prune_to=6)
    alone = [step.tokens for step in decode(model, start, settings)]
    for owner, name in ((model.port, "run"), (model.port, "head"), (StreamCache, "commit"), (StreamCache, "advance")):
        for calls in (1, 3, 6):
            right, left = getattr(owner, name), [calls]

            def breaks(*args: Any, right: Any = right, left: list[int] = left, **keywords: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise _Fault
                return right(*args, **keywords)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, breaks)
                with pytest.raises(_Fault):
                    list(decode(model, start, settings))
            assert [step.tokens for step in decode(model, start, settings)] == alone


@both_modes
@every_host
def test_the_hosts_configuration_is_left_alone(host: str, mode: str) -> None:
    base = HOSTS[host]()
    before = base.config.to_dict(), base.generation_config.to_dict()
    model = wrapped(base, mode)
    list(decode(model, prompt(4), DecodeSettings(max_new_tokens=5)))
    assert (base.config.to_dict(), base.generation_config.to_dict()) == before


def test_runs_side_by_side_do_not_meet() -> None:
    model, settings = model_of("llama", "lossless"), DecodeSettings(max_new_tokens=10)
    starts = [prompt(4, seed=2), prompt(11, seed=3)]
    alone = [tokens_of(list(decode(model, start, settings))) for start in starts]
    runs = [decode(model, start, settings) for start in starts]
    together: list[list[int]] = [[], []]
    for _ in range(10):
        for run, text in zip(runs, together, strict=True):
            if (step := next(run, None)) is not None:
                text += step.tokens
    assert [tuple(text) for text in together] == alone


def test_settings_beyond_what_was_trained_are_refused() -> None:
    model = wrapped("llama", streams=2, scorer_rank=0)
    with pytest.raises(ConfigError, match="streams is 3; this adapter was trained with 2"):
        next(decode(model, prompt(3), DecodeSettings(streams=3)))
    with pytest.raises(ConfigError, match="needs the exit scorer"):
        next(decode(model, prompt(3), DecodeSettings(prune_to=4)))


def test_an_adapter_without_streams_decodes_plainly() -> None:
    model = wrapped("llama", streams=0)
    for settings in (DecodeSettings(max_new_tokens=9), DecodeSettings(max_new_tokens=9, tree="full", k=3)):
        steps = assert_equal_texts(model, prompt(6), settings)
        assert len(steps) == 9
