"""Continue a prompt with a model that is whole on one device."""

from __future__ import annotations

import numpy
import torch

from meshwright.data.batch import Batch
from meshwright.model.transformer import StageModel


@torch.no_grad()
def continue_prompt(
    model: StageModel, prompt: list[int], *, tokens: int, window: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Sample ``tokens`` further token numbers after ``prompt``.

    Each one is drawn from softmax(logits / temperature) of the last position, given at most the last
    ``window`` tokens. The draw is a function of ``seed`` alone.
    """
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    sequence = list(prompt)
    model.eval()
    for _ in range(tokens):
        context = torch.tensor([sequence[-window:]], dtype=torch.int64)
        positions = torch.arange(context.shape[1])[None]
        batch = Batch(
            tokens=context,
            labels=torch.full_like(context, -100),
            positions=positions,
            documents=None,
            examples=torch.zeros(1, dtype=torch.int64),
        )
        logits = model.logits(None, batch)[-1].double().numpy() / temperature
        odds = numpy.exp(logits - logits.max())
        sequence.append(int(generator.choice(odds.size, p=odds / odds.sum())))
    return sequence[len(prompt) :]
