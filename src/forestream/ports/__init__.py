"""Which port serves which host. Families are told apart by `config.model_type`, exactly."""

from typing import Any

from transformers import PreTrainedModel

from forestream.errors import UnsupportedModel
from forestream.ports.base import KVShape, LayerCache, LayerInputs, Port, Rotary
from forestream.ports.gemma import Gemma2Port, Gemma3Port, GemmaPort
from forestream.ports.generic import GenericPort
from forestream.ports.gpt2 import GPT2Port
from forestream.ports.gpt_neox import GPTNeoXPort
from forestream.ports.opt import OPTPort
from forestream.ports.parity import check_parity
from forestream.ports.phi import PhiPort
from forestream.ports.rotary_decoder import MistralPort, Phi3Port, QwenPort, RotaryDecoderPort

_PORTS: dict[str, type[Port]] = {
    "llama": RotaryDecoderPort,
    "opt": OPTPort,
    "phi": PhiPort,
    "phi3": Phi3Port,
    "mistral": MistralPort,
    "qwen2": QwenPort,
    "qwen3": QwenPort,
    "gemma": GemmaPort,
    "gemma2": Gemma2Port,
    "gemma3_text": Gemma3Port,
    "gpt_neox": GPTNeoXPort,
    "gpt2": GPT2Port,
}
# Positions enter these as a bias on the attention scores, which an explicit mask would replace.
_ALIBI = ("bloom", "mpt")

SUPPORTED: tuple[str, ...] = tuple(_PORTS)
"""Families with a port of their own."""

__all__ = ["SUPPORTED", "KVShape", "LayerCache", "LayerInputs", "Port", "Rotary", "check_parity", "port_for"]


def port_for(model: PreTrainedModel) -> Port:
    """The port of a loaded causal language model.

    The driven forward is compared with the stock forward on a short random text. A family without a port of its
    own is driven generically if the two are equal.

    Raises:
        UnsupportedModel: the model cannot be driven exactly; says why, with numbers, and which families can.
    """
    config: Any = model.config
    family: str = config.model_type
    try:
        if family in _PORTS:
            _refuse_non_causal(config)
            port = _PORTS[family](model)
            check_parity(port)
            return port
        _refuse_by_design(config)
        return _generic(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error} Supported: {', '.join(SUPPORTED)}.") from error.__cause__


def _refuse_non_causal(config: Any) -> None:
    # some configs carry no such entry and mean True
    if not getattr(config, "is_causal", True):
        raise UnsupportedModel(f"{config.model_type} has is_causal=False; causal attention is needed.")


def _refuse_by_design(config: Any) -> None:
    _refuse_non_causal(config)
    if config.model_type in _ALIBI or (config.model_type == "falcon" and config.alibi):
        raise UnsupportedModel(f"{config.model_type} puts positions into an attention bias (ALiBi).")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder; a decoder alone is needed.")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{config.model_type} is made of several models; load its text model alone.")


def _generic(model: PreTrainedModel) -> Port:
    try:
        port = GenericPort(model)
        check_parity(port)
    except UnsupportedModel:
        raise
    except Exception as error:  # an unknown family may fail in any way: all of them mean the same
        family = model.config.model_type
        raise UnsupportedModel(f"{family} has no port and cannot be driven generically: {error!r}.") from error
    return port
