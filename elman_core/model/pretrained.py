"""The base of all ladder classes: initialisation that is safe on the meta device, saving, and transformers' flags."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from elman_core.registry import CheckpointError, Mixer
from elman_core.storage import CHECKSUMS, MOST_READ, check_folder, open_regular

from .card import model_card
from .config import LadderConfig
from .shipped import is_shipped, shipped
from .tokenizer import byte_tokenizer

ALIGNMENT = 64
"""Bytes: what torch's own allocator gives."""
_WHERE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download", "proxies")

log = logging.getLogger("elman_core")

_FLOATS = {"F64", "F32", "F16", "BF16"}


class LadderPreTrainedModel(PreTrainedModel):
    """Base of all ladder classes."""

    config: LadderConfig
    config_class = LadderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LadderBlock"]  # noqa: RUF012 (transformers declares these so)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _loss: Any = None  # transformers' name of the loss, which it would take from the name of a (sub)class
    tokenizer: Any = None  # what `save_pretrained` writes beside the weights; None: that of bytes for 256 tokens
    model_tags: Any = None  # of the hub: set for each model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: otherwise saving would copy this package's source files into checkpoints."""

    def post_init(self) -> None:
        mixers = [module for module in self.modules() if isinstance(module, Mixer)]
        for mixer in mixers:  # built under another default dtype; transformers looks after those that it loads
            for name, tensor in itertools.chain(mixer.named_parameters(), mixer.named_buffers()):
                if name in mixer.fp32_params and tensor.dtype in (torch.float16, torch.bfloat16):
                    tensor.data = tensor.data.float()
        super().post_init()
        self.loss_type = self._loss
        self.model_tags = ["rnn", "elman", *["byte-level"] * (self.config.vocab_size == 256), "custom_code"]
        self._can_compile_fullgraph = all(mixer.state_growth == "constant" for mixer in mixers)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For classes outside transformers the base skips a module without parameters of its own, which a mixer made of
        # linear layers is; `_init_weights` below looks at the tensors itself.
        super()._initialize_weights(module, False)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in (None, "eager"):
            log.warning("elman: attn_implementation=%r has no effect: each mixer has its own", attn_implementation)
        return "eager"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise `module`, leaving tensors that came from a checkpoint bit for bit as they were.

        Transformers builds on the meta device, loads, and calls this if anything may be missing. It protects loaded tensors
        from `torch.nn.init` but not from in-place arithmetic; here, no operation writes to them while a mixer resets the rest.
        So a mixer derives values, such as the largest singular value of a tensor, from the loaded tensor.
        """
        if not isinstance(module, Mixer):
            super()._init_weights(module)
            return
        own = module.state_dict(keep_vars=True).values()
        loaded = [t for t in own if getattr(t, "_is_hf_initialized", False)]
        if not loaded:
            module.reset_parameters()
        elif len(loaded) < len(own):
            with _ReadOnly(loaded):
                module.reset_parameters()
        module.reset_buffers()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but files are compared with `checksums.json` if there is one, and weights are in aligned memory.

        `pretrained/NAME` is a model of a package.

        The loader returns views into the mapped file, at any multiple of 8 bytes, and matrix libraries sum in another order if
        memory is not aligned. So the last bits of the logits would differ between a loaded and a new model.

        Args:
            checksums: whether to compare; by default unless the environment has `ELMAN_CHECKSUMS=0`.

        Raises:
            CheckpointError: a file is missing, truncated or altered, or holds weights that are not floating-point numbers.
        """
        name = pretrained_model_name_or_path
        where = {k: v for k, v in kwargs.items() if k in _WHERE}
        compares = kwargs.pop("checksums", os.environ.get("ELMAN_CHECKSUMS", "1") != "0") and name is not None
        if name is not None and is_shipped(name):
            name = shipped(name)
        cast: dict[str, str] = {}
        is_folder = name is not None and os.path.isdir(name)
        if is_folder:
            cast = _check(Path(name, kwargs.get("subfolder") or ""), compares)
        loaded = super().from_pretrained(name, *args, **kwargs)
        if compares and not is_folder:  # of the hub, in the cache by now
            listed = cached_file(name, CHECKSUMS, _raise_exceptions_for_missing_entries=False, **where)
            if listed is not None:
                cast = _check(Path(listed).parent, compares)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        base = f"{cls.base_model_prefix}."
        for key in model.state_dict():
            # A backbone's file may serve a head, and the reverse.
            for stored in (key, base + key, key.removeprefix(base)):
                if stored in cast:
                    raise CheckpointError(cast[stored])
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
                tensor.data = tensor.data.clone()
        return loaded

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Write a checkpoint: weights, config, shim, byte tokenizer and model card. An existing tokenizer or card is kept.

        Checksums of files that are replaced are removed; `elman export` and training write them. So are earlier weights in the
        other layout, whole or in shards, which transformers would load instead.
        """
        folder = Path(save_directory)
        layouts = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
        before = [path for path in layouts if path.exists()]
        if is_main_process:
            for name in (CHECKSUMS, "training.json"):  # which `elman export` writes
                (folder / name).unlink(missing_ok=True)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            if len(before) == 1 and all(path.exists() for path in layouts):  # the other was written now
                before[0].unlink()
            self._complete(folder)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """As transformers', which uploads a saved model before `save_pretrained` returns."""
        self._complete(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _complete(self, folder: Path) -> None:
        """Add what transformers does not write: tokenizer and model card."""
        if not (folder / "config.json").is_file():  # an adapter that the model holds, or a file in the folder's place
            return
        for weights in folder.glob("*.safetensors"):  # written for the owner alone
            weights.chmod((folder / "config.json").stat().st_mode)
        if not (folder / "tokenizer_config.json").exists():
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            elif self.config.vocab_size == 256:
                byte_tokenizer().save_pretrained(folder)
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(model_card(self), encoding="utf-8")


def check_safetensors(path: str | os.PathLike) -> None:
    """Raise `CheckpointError` unless a safetensors file has a readable header, the length that it states, and floating-point
    numbers alone: transformers would cast others."""
    for problem in _not_floats(path).values():
        raise CheckpointError(problem)


def _not_floats(path: str | os.PathLike) -> dict[str, str]:
    """Return `{tensor: error}` for the tensors of a file that hold no floating-point numbers.
    Raises `CheckpointError` if the file cannot be read, is truncated or altered."""
    try:
        os.close(open_regular(path))
        with safe_open(path, framework="pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, MemoryError) as error:  # too long to be mapped
        raise CheckpointError(f"{path} is truncated or altered: {error}") from error
    return {
        name: f"{path} has {name} as {kind}: weights are floating-point numbers"
        for name, kind in kinds.items()
        if kind not in _FLOATS
    }


def _check(folder: Path, compares: bool) -> dict[str, str]:
    """Raise `CheckpointError` for a folder that transformers would wait for or read without end, or that has changed.

    Returns what is wrong with each tensor that transformers would cast, by name.
    """
    cast: dict[str, str] = {}
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
        raise CheckpointError(f'{folder} is a run, not a model: load find_checkpoint("{folder}")')
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix == ".safetensors" and path.name.startswith("model"):
            cast |= _not_floats(path)
        elif path.exists() and not path.is_dir():
            if not path.is_file():
                raise CheckpointError(f"{path} is not a regular file")
            if path.suffix == ".json" and not 0 < path.stat().st_size <= MOST_READ:  # 0: also the files of /proc
                raise CheckpointError(f"{path} is empty or longer than {MOST_READ:,} bytes")
    if compares and (folder / CHECKSUMS).exists():
        check_folder(folder, weights=True)
    return cast


class _ReadOnly(TorchDispatchMode):
    """Inside it, operations that would write to the given tensors, or to views of them, do nothing."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in tensors if t.device.type != "meta"}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable:
            for value, declared in zip(args, func._schema.arguments, strict=False):
                written = declared.alias_info is not None and declared.alias_info.is_write
                if written and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.storages:
                    return value
        return func(*args, **(kwargs or {}))
