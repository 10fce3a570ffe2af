"""Checkpoints: one safetensors file with everything a run needs to go on, and a pointer with its hash.

    step-00000100.safetensors   model.*, optimiser.*, random.*; step, config and length of the metrics as JSON metadata
    checkpoint.json             {"file": "step-00000100.safetensors", "sha256": "…"}

The pointer is replaced only after the file it names is safely on disk, and the older file goes last.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor, nn

from compactattn.training.config import RunConfig, RunError
from compactattn.training.files import remove_stale, replace_durably

POINTER, PATTERN = "checkpoint.json", "step-*.safetensors"
FORMAT = 1


class CheckpointError(RunError):
    """A checkpoint that cannot be written, read or used."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` updates."""

    step: int
    config: RunConfig
    metrics_bytes: int  # length of metrics.jsonl at that moment
    weights: dict[str, Tensor]
    optimiser: dict[str, dict[str, Tensor]]  # by parameter, then by quantity
    random: dict[str, Tensor]  # states of the generators, by device type


def capture(
    step: int, config: RunConfig, metrics_bytes: int, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
) -> Checkpoint:
    """The present state; its tensors are those in use, not copies."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[parameter]: dict(values) for parameter, values in optimiser.state.items()}
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    return Checkpoint(step, config, metrics_bytes, _own_tensors(model), state, random)


def restore(checkpoint: Checkpoint, model: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
    """Puts weights, optimiser and random state back as they were."""
    restore_weights(model, checkpoint.weights)
    groups = optimiser.state_dict()["param_groups"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in optimiser.param_groups for parameter in group["params"]]
    if unknown := sorted(set(checkpoint.optimiser) - set(ordered)):
        raise CheckpointError(f"the checkpoint has optimiser state for {_list(unknown)}, which the model does not train")
    state = {
        number: {key: value.clone() for key, value in checkpoint.optimiser[name].items()}
        for number, name in enumerate(ordered)
        if name in checkpoint.optimiser
    }
    optimiser.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(checkpoint.random["cpu"])
    if device.type == "cuda" and "cuda" in checkpoint.random:
        torch.cuda.set_rng_state(checkpoint.random["cuda"], device)


def restore_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copies the weights into the model; names and shapes must be its own."""
    own = _own_tensors(model)
    if missing := [name for name in own if name not in weights]:
        raise CheckpointError(f"the checkpoint has no {_list(missing)}, which the model needs; it was made by another model")
    if surplus := [name for name in weights if name not in own]:
        raise CheckpointError(f"the checkpoint has {_list(surplus)}, which the model lacks; it was made by another model")
    for name, tensor in own.items():
        given = weights[name]
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            sizes = f"{_describe(given)} in the checkpoint and {_describe(tensor)} in the model"
            raise CheckpointError(f"{name} is {sizes}; it was made by another model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the checkpoint so that the folder holds the old or the new one at every moment, then removes the old one."""
    name = f"step-{checkpoint.step:08d}.safetensors"
    try:
        if (
            _current(folder) != name
        ):  # to replace a file that the pointer vouches for would leave neither old nor new for a while
            content = _to_bytes(checkpoint)
            replace_durably(folder / name, content)
            replace_durably(folder / POINTER, _pointer(name, hashlib.sha256(content).hexdigest()))
        remove_stale(folder, PATTERN, keep=name)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} to {folder}: {error.strerror or error};"
            " the one before it, if any, is intact: make room and resume"
        ) from error


def load(folder: Path) -> Checkpoint:
    """The checkpoint in that folder, proven by its hash."""
    name, digest = _read_pointer(folder)
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}, which {POINTER} names: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(
            f"{folder / name} does not match its hash in {POINTER}; one of them is damaged: restore a copy or train again"
        )
    return _from_bytes(content, folder / name)


def load_config(folder: Path) -> RunConfig:
    """What the run in that folder is."""
    path = folder / "config.json"
    try:
        return RunConfig.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{folder} holds no run (it has no config.json); name the folder of a run") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RunError(f"{path} is malformed: {error}") from None


def exists(folder: Path) -> bool:
    return (folder / POINTER).exists()


def step_of(folder: Path) -> int:
    """The step of the checkpoint in that folder, without reading it."""
    return int(_read_pointer(folder)[0].removeprefix("step-").removesuffix(".safetensors"))


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and kept buffers by name; one that has two names goes by its first."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def _to_bytes(checkpoint: Checkpoint) -> bytes:
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint.weights.items()}
    for name, state in checkpoint.optimiser.items():
        tensors |= {f"optimiser.{key}.{name}": value for key, value in state.items()}
    tensors |= {f"random.{name}": tensor for name, tensor in checkpoint.random.items()}
    facts = {
        "format": FORMAT,
        "step": checkpoint.step,
        "metrics_bytes": checkpoint.metrics_bytes,
        "config": json.loads(checkpoint.config.to_json()),
    }
    # one entry only: safetensors shuffles several, and equal states should be equal files
    return format_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, {"run": json.dumps(facts)})


def _from_bytes(content: bytes, path: Path) -> Checkpoint:
    try:
        facts = _metadata(content)
        if facts["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {facts['format']}, this version reads {FORMAT}; use the version that wrote it"
            )
        tensors = parse_tensors(content)
        optimiser: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimiser").items():
            key, _, parameter = name.partition(".")
            optimiser.setdefault(parameter, {})[key] = tensor
        config = RunConfig.from_json(json.dumps(facts["config"]))
        random = _part(tensors, "random")
        return Checkpoint(int(facts["step"]), config, int(facts["metrics_bytes"]), _part(tensors, "model"), optimiser, random)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of a run: {error}") from error


def _metadata(content: bytes) -> dict[str, Any]:
    """Our facts in the header of a safetensors file: 8 bytes of length, then JSON."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["run"])


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def _pointer(name: str, digest: str) -> bytes:
    return (json.dumps({"file": name, "sha256": digest}, indent=2) + "\n").encode()


def _read_pointer(folder: Path) -> tuple[str, str]:
    path = folder / POINTER
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no checkpoint (it has no {POINTER}); train first, or name the folder of a run"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    found = re.search(rb'"file": "(step-\d{8,}\.safetensors)".*"sha256": "([0-9a-f]{64})"', content, re.DOTALL)
    name, digest = (part.decode() for part in found.groups()) if found else ("", "")
    if content != _pointer(name, digest):
        raise CheckpointError(f"{path} is damaged; restore a copy of the run, or train again")
    return name, digest


def _current(folder: Path) -> str | None:
    """The file the pointer names, if it names one."""
    try:
        return _read_pointer(folder)[0]
    except CheckpointError:
        return None


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
