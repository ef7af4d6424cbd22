"""Errors made on purpose: a proof that does not find them proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from meshwright.data.batch import Batch
from meshwright.data.packing import IGNORE
from meshwright.model.transformer import StageModel
from meshwright.parallel.owned import Owned
from meshwright.train.delayed import DelayedTrainer
from meshwright.train.trainer import Trainer

Plant = Literal["scaled-gradient", "dropped-token", "doubled-gradient", "skipped-layer"]
PLANTS: tuple[Plant, ...] = get_args(Plant)
SCALE = 1e-6
"""How much too large the gradient of one rank is."""


def plant(kind: Plant, trainer: Trainer) -> None:
    """Make the named error in a trainer that is about to run.

    - ``scaled-gradient``: the gradient of the last data-parallel rank is ``1 + 1e-6`` times too large;
    - ``dropped-token``: one counted token of the first micro-batch of dp rank 0 loses its weight;
    - ``doubled-gradient``: the gradient of one replicated parameter (the first layer's norm) is doubled;
    - ``skipped-layer``: one layer passes its input through.
    """
    {
        "scaled-gradient": _scale_gradient,
        "dropped-token": _drop_token,
        "doubled-gradient": _double_gradient,
        "skipped-layer": _skip_layer,
    }[kind](trainer)


def _scale_gradient(trainer: Trainer) -> None:
    if trainer.mesh.coordinate("dp") != trainer.mesh.degree("dp") - 1:
        return
    for module in _modules(trainer):
        if module.last:
            # The value stays, the slope is off: the reported loss cannot give it away.
            module.register_forward_hook(lambda _module, _inputs, loss: loss + SCALE * (loss - loss.detach()))


def _modules(trainer: Trainer) -> list[StageModel]:
    return [module for version in trainer.versions for module in version.stages.values()]


def _drop_token(trainer: Trainer) -> None:
    if trainer.mesh.coordinate("dp") != 0:
        return
    if isinstance(trainer, DelayedTrainer):
        feed = trainer.pipeline.feed
        trainer.pipeline.feed = lambda version, batches, divisor: feed(  # type: ignore[method-assign]
            version, _without_one_token(batches), divisor
        )
        return
    run = trainer.executor.run
    trainer.executor.run = lambda batches, divisor: run(  # type: ignore[method-assign]
        _without_one_token(batches), divisor
    )


def _without_one_token(batches: Sequence[Any]) -> list[Batch]:
    changed = list(batches)
    for index, batch in enumerate(batches):
        where = (batch.labels != IGNORE).nonzero()
        if len(where):
            labels = batch.labels.clone()
            labels[tuple(where[0].tolist())] = IGNORE
            changed[index] = Batch(batch.tokens, labels, batch.positions, batch.documents, batch.examples)
            break
    return changed


def _double_gradient(trainer: Trainer) -> None:
    def double(owned: list[Owned]) -> None:
        for piece in owned:
            if piece.parameter.endswith("layers.0.attention_norm.weight"):
                piece.gradient.mul_(2.0)

    trainer.after_reduction.append(double)


def _skip_layer(trainer: Trainer) -> None:
    middle = trainer.job.model_spec.layers // 2
    for module in _modules(trainer):
        block = _block(module, middle)
        if block is not None:
            # The layer still takes part (gradients exist, collectives match) but adds next to nothing.
            block.register_forward_hook(lambda _module, inputs, output: output * 0.0 + inputs[0])


def _block(module: StageModel, layer: int) -> torch.nn.Module | None:
    name = f"layers.{layer}"
    return dict(module.named_modules()).get(name)
