"""Hugging Face weights into dp=2 tp=2 pp=2 and out again: the same logits, the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.folder import latest
from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job, job_from_values
from meshwright.model.hugging_face import load_into
from meshwright.prove.pool import RankPool
from meshwright.prove.proof_data import ProofSamples, proof_batches
from meshwright.train.exchange import export_hugging_face
from meshwright.train.saving import Saver, load_whole_model
from meshwright.train.trainer import Trainer
from tests.small_jobs import Batch

transformers = pytest.importorskip("transformers")
Ranks = Callable[[int], RankPool]

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {**COMMON, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {**COMMON, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": 8, "tie_word_embeddings": False}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
}  # fmt: skip


def job_from(folder: Path) -> Job:
    return job_from_values(
        {
            "model": {"init_from": str(folder)},
            "data": {"train": ["unused.txt"], "sequence_length": 16},
            "batch": {"global_size": 4},
            "optimizer": {"name": "sgd", "lr": 0.0},
            "train": {"steps": 1},
            "layout": "dp=2 tp=2 pp=2 micro_batch=1",
        }
    ).resolve()


def import_and_save(job: Job, out: str) -> tuple[float, dict[int, Any]]:
    """On a rank: start from the folder, evaluate one global batch, save; the loss and the logits by sequence."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        hidden: list[torch.Tensor] = []
        for module in trainer.stages.values():
            if module.last:
                module.final_norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        mine = batches(mesh.coordinate("dp"), 2)
        loss, valid, _ = trainer.evaluate(mine)
        logits = {}
        with torch.no_grad():
            for state, batch in zip(hidden, mine, strict=False):
                last = trainer.stages[job.layout.stage_count - 1]
                logits[int(batch.examples[0])] = last.partition.logits(state, last.head_weight).numpy()
        Saver(trainer, None, Path(out)).save()
        return loss / valid, logits


def batches(dp_rank: int, dp: int) -> list[Batch]:
    samples = ProofSamples(97, 16, seed=3, masked=False)
    return proof_batches(samples, 0, global_size=4, micro_batch=1, dp_rank=dp_rank, dp=dp)


@pytest.mark.parametrize("name", list(MODELS))
def test_in_and_out_of_eight_ranks(ranks: Ranks, tmp_path: Path, name: str) -> None:
    config_name, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "in")
    job = job_from(tmp_path / "in")
    tokens = torch.cat([batch.tokens for batch in batches(0, 1)])
    labels = torch.cat([batch.labels for batch in batches(0, 1)])
    with torch.no_grad():
        logits = theirs(input_ids=tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.view(-1, 97), labels.view(-1)).item()

    results = ranks(8).run(import_and_save, job, str(tmp_path / "run"))
    assert [loss for loss, _ in results] == pytest.approx([expected] * 8, rel=1e-5)
    assert sum(len(rows) for _, rows in results) == 8, "each of 4 sequences on the 2 tp ranks of the last stage"
    for _, rows in results:
        for example, row in rows.items():
            assert abs(row - logits[example].numpy()).max() < 1e-5

    checkpoint = latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    mine = load_whole_model(job, checkpoint).eval()
    batch = batches(0, 1)
    with torch.no_grad():
        ours = torch.stack([mine.logits(None, each) for each in batch])
    assert (ours - logits).abs().max() < 1e-5

    export_hugging_face(checkpoint, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.numpy().tobytes() == after[key].numpy().tobytes(), key


def test_importing_needs_the_same_shape(tmp_path: Path) -> None:
    config_name, sizes = MODELS["llama"]
    config = getattr(transformers, config_name)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    from meshwright.errors import InputError
    from meshwright.model.transformer import StageModel

    spec = job_from(tmp_path).model_spec.model_copy(update={"ffn_hidden": 64})
    model = StageModel(spec, range(spec.layers), first=True, last=True)
    with pytest.raises(InputError, match="shape"):
        load_into(model, tmp_path)
