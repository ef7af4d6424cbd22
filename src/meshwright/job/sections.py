"""The sections of a job file, one class each. Names here are the keys a user writes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from meshwright.errors import InputError
from meshwright.job.checkpoint_shape import MANIFEST, fields_from_checkpoint
from meshwright.job.hf_config import fields_from_hf_folder
from meshwright.job.model_spec import ModelSpec
from meshwright.job.presets import preset_fields

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Paths = Annotated[tuple[str, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def changed(self, *keys: str) -> dict[str, Any]:
        """Those of ``keys`` that have another value than their default, with it."""
        fields = type(self).model_fields
        return {key: value for key in keys if (value := getattr(self, key)) != fields[key].default}


class ModelSection(ModelSpec):
    """[model]: a shape by ``preset``, by ``hf`` (a Hugging Face folder or config.json), or by its sizes.

    Sizes given beside a preset or ``hf`` override it; ``sliding_window = 0`` and ``rope_scaling = []``
    take those away.
    """

    preset: str | None = None
    """A well-known shape, such as ``llama3-8b`` or ``gpt2``."""
    hf: str | None = None
    """A Hugging Face folder or its config.json, read for the shape alone."""
    init_from: str | None = None
    """A Hugging Face folder or a ``step-N`` folder whose weights training starts from; absent: from scratch."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        given: dict[str, Any] = dict(values)
        base: dict[str, Any] = {}
        if given.get("preset") is not None and given.get("hf") is not None:
            raise ValueError("preset and hf are both given; give one of them")
        missing = [size for size in ("vocabulary", "hidden", "layers", "heads", "ffn_hidden") if size not in given]
        try:
            if isinstance(given.get("preset"), str):
                base = preset_fields(given["preset"])
            elif isinstance(given.get("hf"), str):
                base = fields_from_hf_folder(given["hf"], "model.hf")
            elif isinstance(given.get("init_from"), str) and missing and "preset" not in given:
                own = (Path(given["init_from"]) / MANIFEST).is_file()
                base = (fields_from_checkpoint if own else fields_from_hf_folder)(given["init_from"], "model.init_from")
        except InputError as error:
            raise ValueError(str(error)) from None
        if given.get("sliding_window") == 0:
            given["sliding_window"] = None
        if given.get("rope_scaling") in ([], ()):
            given["rope_scaling"] = None
        return {**base, **given}


class DataSection(Section):
    """[data]: the corpus, the tokenizer and how samples are cut from it."""

    train: Paths = ()
    """Files, as a string or a list."""
    validation: Annotated[float, Field(gt=0, lt=1)] | Paths | None = None
    """A fraction of the training corpus that is held out, or files of its own."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json."""
    sequence_length: PositiveInt
    """Tokens per sample that the model sees."""
    packing: Literal["stream", "best-fit"] = "stream"
    """``stream``: documents end to end, cut into samples; ``best-fit``: whole documents together, the rest padded."""
    document_mask: bool = False
    """Tokens attend only inside their own document, and positions restart there."""
    format: Literal["auto", "text", "jsonl", "parquet", "megatron"] = "auto"
    """Of all files; ``auto``: by suffix."""
    separator: str = "\f"
    """Plain text: what stands between two documents; the default is the form feed."""
    end_token: str | None = None
    """The end-of-document token of a tokenizer.json; absent: ``<|endoftext|>``, ``</s>`` and the like."""
    text_field: str = "text"
    """JSONL and Parquet: the field that holds the text."""
    prompt_field: str | None = None
    """JSONL field put before the text and masked from the loss."""
    cache: str = ".cache"
    """Folder of tokenised files."""

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class OptimizerSection(Section):
    """[optimizer]: the update and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The update rule."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Of matrices; norms and biases have none."""
    betas: Annotated[tuple[Below1, Below1], Field(strict=False)] = (0.9, 0.95)
    """adamw: decay of the first and the second moment."""
    eps: Positive = 1e-8
    """adamw: added to the root of the second moment."""
    momentum: Below1 = 0.0
    """sgd only."""
    clip_norm: Positive | None = None
    """Largest global gradient norm; absent: no clipping."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """How the rate goes from ``lr`` to ``lr * min_lr_ratio`` after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from zero."""
    decay_steps: PositiveInt | None = None
    """Steps over which the rate falls; absent: the rest of the run (wsd: its last fifth)."""
    min_lr_ratio: Fraction = 0.0
    """The rate at the end of the decay, as a fraction of ``lr``."""


class TrainSection(Section):
    """[train]: how long, from which seed, under which guarantees."""

    steps: PositiveInt = 1000
    """Optimizer steps in all."""
    eval_every: PositiveInt | None = None
    """Steps between validations; absent: only at the end."""
    seed: NonNegativeInt = 0
    """Of initial weights, dropout and the order of samples."""
    deterministic: bool = False
    """Bits do not depend on dp, and two runs are bit-equal."""
    compile: bool = False
    """``torch.compile`` each transformer block."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What all ranks do when the loss or a gradient is not finite."""


class PrecisionSection(Section):
    """[precision]: the type of forward and backward; 16-bit types keep float32 masters."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Of forward and backward; masters, gradients and reductions are float32 at least."""
    loss_scale_initial: Positive = 65536.0
    """float16 only."""
    loss_scale_growth_interval: PositiveInt = 2000
    """float16 only: steps without overflow before the scale doubles."""


class ClusterSection(Section):
    """[cluster]: what it runs on."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is one."""
    machines: str | None = None
    """What the planner plans for: "512x8 A100-SXM4-80GB" (nodes x devices, name), or a cluster file."""
    ranks: PositiveInt | None = None
    """Ranks to start; absent: as many as the layout takes."""
    memory_per_rank_bytes: PositiveInt | None = None
    """What a rank may use; absent: its share of what is free. A layout whose state needs more is refused."""


class MemorySection(Section):
    """[memory]: buffers."""

    bucket_bytes: PositiveInt = 25 * 2**20
    """Gradients are reduced in buckets of this size, in bytes, while backward runs."""


class CheckpointSection(Section):
    """[checkpoint]: when state is saved, and how many are kept."""

    every: PositiveInt | None = None
    """Steps between checkpoints; absent (and no ``interval``): only at the end."""
    interval: Positive | Literal["auto"] | None = None
    """Seconds between checkpoints, beside or instead of ``every``; ``auto``: sqrt(2 cost mtbf), as they cost here."""
    mtbf_hours: Positive | None = None
    """Mean time between failures of the whole run, for ``interval = "auto"``."""
    mode: Literal["sync", "async"] = "sync"
    """``async``: the state is copied to host buffers, and written while training goes on."""
    drill_every: PositiveInt | None = None
    """Every so many checkpoints another process loads the new one whole and compares it, before an old one goes."""
    incremental: PositiveInt | None = None
    """Refer to slices that the checkpoint before holds already, but write all anew every so many checkpoints."""
    copy_to: str | None = None
    """An fsspec URL, such as s3://bucket/run, to which every checkpoint is copied (the ``remote`` extra)."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that this divides stay for good; so does one with a file named ``pin`` in its folder."""
    keep_hours: Positive | None = None
    """Checkpoints younger than this stay too."""
    damaged: Literal["refuse", "previous"] = "refuse"
    """``--resume`` finds the newest damaged: say so and stop, or take the one before it."""
    failure: Literal["stop", "continue"] = "stop"
    """A checkpoint could not be written (a full disk): stop the run, or train on and record it."""

    @field_validator("copy_to")
    @classmethod
    def _a_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, mark, rest = value.partition("://")
        if not (scheme and mark and rest):
            raise ValueError(f'copy_to = "{value}" is no URL; give one such as s3://bucket/run')
        if find_spec("fsspec") is None:
            raise ValueError(f"copy_to = \"{value}\" needs the package fsspec; pip install 'meshwright[remote]'")
        return value

    @model_validator(mode="after")
    def _auto_needs_failures(self) -> CheckpointSection:
        if self.interval == "auto" and self.mtbf_hours is None:
            raise ValueError('interval = "auto" needs mtbf_hours, the mean time between failures of the run; give it')
        return self


class ObserveSection(Section):
    """[observe]: what a run records."""

    sample_prompt: str | None = None
    """Text to continue after training."""
    sample_tokens: PositiveInt = 64
    """Tokens of that continuation."""
    tensorboard: bool = False
    """Also write TensorBoard events (the ``tensorboard`` extra)."""
    ledger_step: PositiveInt = 3
    """First step that the ledger records (steps count from 1)."""
    one_device_steps: NonNegativeInt = 3
    """Steps timed on one device after training, behind one that is not, for the useful speed-up; 0: not measured."""
