"""The one-device oracle: the plainest training loop there is, to hold every layout against.

Imports nothing from comm/, parallel/, sync/ or train/, and shares no optimizer, clipping, accumulation or schedule
code with them. The model is whole, the loss is the sum of cross entropy over the valid tokens of the global batch
divided by their number, and every update is written out in the simplest tensor operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from meshwright.data.batch import Batch
from meshwright.job.job import Job
from meshwright.job.sections import OptimizerSection
from meshwright.model.dropout import Randomness
from meshwright.model.hugging_face import load_into
from meshwright.model.initialise import initialise
from meshwright.model.transformer import StageModel
from meshwright.prove.parity import Arrays, Trace


class Oracle:
    """A whole model on one device, its masters and its optimizer state.

    Args:
        model: whole (first and last stage, one tensor parallel rank), filled, in the type of masters.
        dtype: of forward and backward; the masters stay as they are.
        optimizer: "sgd" or "adamw".
        betas: AdamW's decay rates of the moments.
        eps: AdamW's term in the denominator.
        momentum: SGD's.
        weight_decay: decoupled, on 2-D parameters only.
        clip_norm: largest global gradient norm, or None.
        delayed: forward and backward use the masters of one update before.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        dtype: torch.dtype = torch.float64,
        optimizer: Literal["sgd", "adamw"] = "sgd",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        delayed: bool = False,
    ) -> None:
        masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.model, self.masters = model.to(dtype), masters
        self.optimizer, self.betas, self.eps = optimizer, betas, eps
        self.momentum, self.weight_decay, self.clip_norm = momentum, weight_decay, clip_norm
        self.parameters = dict(model.named_parameters())
        self.first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.second = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.updates, self.delayed = 0, delayed

    def gradients(self, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
        """Loss per valid token, and its gradients: one micro-batch after the other, added in their order."""
        valid = max(1, sum(int((batch.labels != -100).sum()) for batch in batches))
        total = 0.0
        sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        for batch in batches:
            self.model.zero_grad(set_to_none=True)
            loss = self.model.loss(None, batch, valid)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad
        return total, sums

    def step(self, batches: Sequence[Batch], learning_rate: float) -> tuple[float, float, dict[str, Tensor]]:
        """One update; returns the loss, the gradient norm before clipping, and the gradients before clipping."""
        loss, gradients = self.gradients(batches)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        factor = 1.0
        if self.clip_norm is not None and norm > self.clip_norm:
            factor = self.clip_norm / norm
        self.updates += 1
        next_used = {name: master.clone() for name, master in self.masters.items()} if self.delayed else self.masters
        for name, gradient in gradients.items():
            self._update(name, gradient * factor, learning_rate)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(next_used[name])
        return loss, norm, gradients

    def _update(self, name: str, gradient: Tensor, learning_rate: float) -> None:
        value = self.masters[name]
        if value.dim() == 2:
            value -= learning_rate * self.weight_decay * value
        if self.optimizer == "sgd":
            self.first[name] = self.momentum * self.first[name] + gradient
            value -= learning_rate * self.first[name]
            return
        beta1, beta2 = self.betas
        self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
        self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient * gradient
        mean = self.first[name] / (1 - beta1**self.updates)
        square = self.second[name] / (1 - beta2**self.updates)
        value -= learning_rate * mean / (square.sqrt() + self.eps)

    def logical(self, values: dict[str, Tensor]) -> Arrays:
        """Physical tensors cut into whole logical ones, by full name."""
        result: dict[str, NDArray[Any]] = {}
        for name, segments in self.model.segments.items():
            for segment in segments:
                result[segment.name] = segment.box(values[name]).numpy(force=True).copy()
        return result


def whole_model(job: Job, init_from: str | Path | None = None) -> StageModel:
    """The job's model on one device at its start, from the seed, a Hugging Face folder or a checkpoint."""
    spec = job.model_spec
    master = torch.float64 if job.precision.dtype == "float64" else torch.float32
    model = StageModel(spec, range(spec.layers), first=True, last=True).to(master)
    if init_from is None:
        initialise(model, job.train.seed)
    elif (Path(init_from) / "manifest.json").exists():
        _fill_from_checkpoint(model, Path(init_from))
    else:
        load_into(model, Path(init_from))
    return model


def _fill_from_checkpoint(model: StageModel, folder: Path) -> None:
    """Its files are plain safetensors of boxes named ``parameter/name/offsets``, read here by that alone."""
    whole = {name: torch.full(shape, math.nan, dtype=torch.float64) for name, shape in model.spec.parameters()}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in (key for key in file.keys() if key.startswith("parameter/")):  # noqa: SIM118
                name, _, offsets = key.removeprefix("parameter/").rpartition("/")
                value = file.get_tensor(key)
                starts = [int(text) for text in offsets.split(",") if text]
                whole[name][tuple(slice(a, a + n) for a, n in zip(starts, value.shape, strict=True))] = value
    parameters = dict(model.named_parameters())
    for name, segments in model.segments.items():
        for segment in segments:
            segment.box(parameters[name].data).copy_(whole[segment.name])


def rate(optimizer: OptimizerSection, step: int, total: int) -> float:
    """The learning rate of step ``step`` (the first is 0) of ``total``, by the schedules' definitions."""
    warmup, low = optimizer.warmup_steps, optimizer.lr * optimizer.min_lr_ratio
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    if optimizer.schedule == "wsd":
        length = optimizer.decay_steps or max(1, total // 5)
        done = (step - (total - length)) / length
    else:
        length = optimizer.decay_steps or max(1, total - warmup)
        done = (step - warmup) / length
    done = min(1.0, max(0.0, done))
    if optimizer.schedule == "cosine":
        return low + (optimizer.lr - low) * (1 + math.cos(math.pi * done)) / 2
    return low + (optimizer.lr - low) * (1 - done)


def train_one_device(
    job: Job,
    batches_of: Callable[[int], Sequence[Batch]],
    steps: int,
    *,
    gradient_steps: int = 0,
    init_from: str | Path | None = None,
    delayed: bool = False,
) -> Trace:
    """Train ``steps`` steps of the job on one device.

    Args:
        job: its model, optimizer, precision and seed; its layout is ignored.
        batches_of: the micro-batches of the whole global batch, by step.
        steps: how many.
        gradient_steps: keep the gradients (before clipping) of this many first steps.
        init_from: Hugging Face folder or checkpoint to start from.
        delayed: take every gradient one update late, ``W_{t+1} = W_t - update(gradient at W_{t-1})``, ``W_{-1} = W_0``.

    Returns:
        Losses, gradient norms, kept gradients and final parameters, by full logical name.
    """
    settings = job.optimizer
    oracle = Oracle(
        whole_model(job, init_from),
        dtype=getattr(torch, job.precision.dtype),
        optimizer=settings.name,
        betas=settings.betas,
        eps=settings.eps,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        delayed=delayed,
    )
    trace = Trace()
    for step in range(steps):
        oracle.model.randomness = Randomness(job.train.seed, step)
        loss, norm, gradients = oracle.step(batches_of(step), rate(settings, step, job.train.steps))
        if not (numpy.isfinite(loss) and numpy.isfinite(norm)):
            raise ValueError(f"the one-device run is not finite at step {step}: loss {loss}, gradient norm {norm}")
        trace.losses.append(loss)
        trace.norms.append(norm)
        if step < gradient_steps:
            trace.gradients.append(oracle.logical(gradients))
    trace.parameters = oracle.logical(oracle.masters)
    return trace
