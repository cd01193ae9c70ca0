"""Settings refuse what is unknown or out of range, survive JSON, and cannot be changed."""

import json
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import Any

import pytest

from forestream.config import DecodeSettings, JsonConfig, SamplingSettings, StreamConfig
from forestream.errors import ConfigError, ForestreamError
from forestream.objective import LossConfig

CLASSES: list[type[JsonConfig]] = [StreamConfig, DecodeSettings, LossConfig]
CHANGED: list[JsonConfig] = [
    StreamConfig(
        streams=3,
        stream_layers=2,
        mode="lossless",
        positions="same",
        start="low_rank",
        start_rank=2,
        value_rotation=True,
        rotation_angle=0.125,
        lora_rank=4,
        lora_alpha=3,
        scorer_rank=0,
    ),
    DecodeSettings(
        tree="full",
        nodes=5,
        lookup_beside=3,
        lookup_behind=4,
        k=3,
        streams=2,
        carriers="fused",
        carried=2,
        prune_below=0.0,
        prune_to=4,
        max_new_tokens=0,
        prompt_chunk=7,
    ),
    LossConfig(main=0.5, stream=0.25, scorer=0.0, chunk=7, decay=0.5, target="both", soft_share=0.25),
]
STATIC = DecodeSettings(tree="static", shape=((0, 0), (0, 2), (1, 0), (3, 1)))


@pytest.mark.parametrize("cls", CLASSES)
def test_unknown_keys_are_errors_that_name_the_known_ones(cls: type[JsonConfig]) -> None:
    with pytest.raises(ConfigError, match=rf"unknown keys in {cls.__name__}: gamma, zeta; known are") as caught:
        cls.from_dict({"zeta": 1, "gamma": 4})
    assert all(field.name in str(caught.value) for field in fields(cls))


@pytest.mark.parametrize("settings", [*CHANGED, *(cls() for cls in CLASSES)])
def test_json_and_back(settings: JsonConfig) -> None:
    text = settings.to_json()
    assert json.loads(text) == asdict(settings)
    assert type(settings).from_json(text) == settings


def test_a_shape_survives_json_although_json_knows_lists_only() -> None:
    text = STATIC.to_json()
    assert json.loads(text) == {**asdict(STATIC), "shape": [[0, 0], [0, 2], [1, 0], [3, 1]]}
    again = DecodeSettings.from_json(text)
    assert again == STATIC
    assert hash(again) == hash(STATIC)
    assert replace(again, max_new_tokens=3).shape == STATIC.shape


def test_words_survive_json_although_json_knows_lists_only() -> None:
    law = SamplingSettings(temperature=0.5, bad_words=((1,), (2, 3)), logit_bias=(((4, 5), -1.5),), seed=2**63)
    again = SamplingSettings.from_json(law.to_json())
    assert again == law
    assert hash(again) == hash(law)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**64},
        {"bad_words": ((),)},
        {"bad_words": (("a",),)},
        {"logit_bias": (((), 1.0),)},
        {"mirror": 1},
        {"accept": "sometimes"},
        {"accept": "typical"},
        {"threshold": 0.3},
        {"accept": "top_k", "threshold": 0.5},
        {"accept": "ratio", "threshold": 1.5},
    ],
)
def test_laws_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join(wrong)):
        SamplingSettings(**wrong)


def test_the_round_trip_was_tried_with_every_field_changed() -> None:
    for settings in CHANGED:
        default = type(settings)()
        same = [f.name for f in fields(settings) if getattr(settings, f.name) == getattr(default, f.name)]
        # what contradicts the others is tried elsewhere
        assert same == (["shape", "prune_below"] if isinstance(settings, DecodeSettings) else [])


@pytest.mark.parametrize("text", ["", "{", "{'streams': 4}", "[]", "4", '"x"', "null"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="StreamConfig is"):
        StreamConfig.from_json(text)


@pytest.mark.parametrize("settings", CHANGED)
def test_settings_are_frozen(settings: JsonConfig) -> None:
    for field in fields(settings):
        with pytest.raises(FrozenInstanceError):
            setattr(settings, field.name, getattr(settings, field.name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("streams", -1),
        ("streams", 65),
        ("streams", "4"),
        ("streams", True),
        ("streams", None),
        ("streams", float("nan")),
        ("stream_layers", 0),
        ("mode", "Joint"),
        ("mode", ""),
        ("positions", "behind"),
        ("start", "linear"),
        ("start_rank", 0),
        ("lora_rank", 0),
        ("lora_alpha", 0),
        ("scorer_rank", -1),
        ("rotation_angle", -0.1),
    ],
)
def test_stream_config_ranges(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; expected"):
        StreamConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tree", "chain"),
        ("nodes", 0),
        ("nodes", 4097),
        ("lookup_beside", -1),
        ("lookup_beside", 65),
        ("lookup_behind", -1),
        ("lookup_behind", 65),
        ("k", 0),
        ("k", 65),
        ("streams", -1),
        ("carriers", "both"),
        ("carried", 0),
        ("prune_below", -0.1),
        ("prune_below", 1.5),
        ("prune_to", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", None),
    ],
)
def test_decode_settings_ranges(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; expected"):
        DecodeSettings(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("main", -1.0), ("stream", -0.1), ("scorer", "0.1"), ("chunk", 0)])
def test_loss_config_ranges(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; expected"):
        LossConfig(**{name: value})


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (StreamConfig, "streams"),
        (StreamConfig, "stream_layers"),
        (StreamConfig, "lora_rank"),
        (StreamConfig, "scorer_rank"),
        (DecodeSettings, "nodes"),
        (DecodeSettings, "lookup_beside"),
        (DecodeSettings, "lookup_behind"),
        (DecodeSettings, "k"),
        (DecodeSettings, "streams"),
        (DecodeSettings, "carried"),
        (DecodeSettings, "prune_to"),
        (DecodeSettings, "max_new_tokens"),
        (LossConfig, "chunk"),
    ],
)
def test_counts_are_whole_numbers(cls: type[JsonConfig], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 2.5; expected"):
        cls.from_dict({name: 2.5})


def test_the_ends_of_the_ranges_belong_to_them() -> None:
    assert StreamConfig(streams=0).streams == 0
    assert StreamConfig(streams=64, stream_layers=1, scorer_rank=0).streams == 64
    assert DecodeSettings(nodes=1, k=1, streams=0, prune_below=1.0, max_new_tokens=0).prune_below == 1.0


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="two pruning rules"):
        DecodeSettings(prune_below=0.1, prune_to=4)
    with pytest.raises(ConfigError, match="trains nothing"):
        StreamConfig(mode="lossless", streams=0)


def test_a_shape_belongs_to_a_static_tree_and_to_no_other() -> None:
    with pytest.raises(ConfigError, match="tree is 'static' with no shape; expected"):
        DecodeSettings(tree="static")
    for tree in ("budget", "full"):
        with pytest.raises(ConfigError, match=f"tree is '{tree}' with a shape; expected"):
            DecodeSettings(tree=tree, shape=((0, 0),))
    assert DecodeSettings(tree="static", shape=()).shape == ()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (3, "shape is 3; expected a list"),
        ("00", "shape is '00'; expected a list"),
        ([0, 1], "node 1 of shape is 0; expected a pair"),
        ([[0, 0], [0]], r"node 2 of shape is \[0\]; expected a pair"),
        ([[0, 0, 0]], "node 1 of shape is .*; expected a pair"),
        ([[-1, 0]], "parent of node 1 of shape is -1; expected a number from 0 to 0"),
        ([[0, 0], [2, 0]], "parent of node 2 of shape is 2; expected a number from 0 to 1"),
        ([[0, 0.5]], "rank of node 1 of shape is 0.5; expected a whole number"),
        ([[0, -1]], "rank of node 1 of shape is -1; expected"),
        ([[0, True]], "rank of node 1 of shape is True; expected"),
        ([[0, 1], [1, 1], [0, 1]], r"nodes 1 and 3 of shape are both \[0, 1\]; expected"),
        ([[0, rank] for rank in range(4096)], "4096 nodes besides the root; expected 4095"),
    ],
)
def test_what_is_no_shape_is_refused(shape: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeSettings(tree="static", shape=shape)


def test_errors_can_be_caught_as_value_errors_and_as_ours() -> None:
    for kind in (ValueError, ForestreamError):
        with pytest.raises(kind):
            StreamConfig(streams=-1)


def test_defaults_are_the_papers_where_it_has_any() -> None:
    assert (LossConfig().main, LossConfig().stream) == (1.0, 0.1)
    config = StreamConfig()
    assert (config.streams, config.lora_rank, config.scorer_rank, config.start) == (4, 32, 8, "identity")
