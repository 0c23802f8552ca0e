"""What a build is asked for: every option, declared once.

A field of :class:`BuildSpec` says its type, default, bounds and text, its key in a recipe and its
option on the command line. The tables of ``recipe.toml`` (:mod:`odtpack.recipe.schema`), the
options of ``odtpack build``, the arguments of :func:`odtpack.build.build_package`, the cache key
and fields of the manifest follow from that. The object goes unchanged from there to the last stage.

This module imports nothing large, for the command line; its annotations are types, not text.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from odtpack import choices
from odtpack.option import REQUIRED, Option, also, check_options, option, options_of, parse_value

Group = tuple[str, float, float | None]
"""Pattern, factor of the learning rate, and weight decay or None for the optimizer's."""

LossPart = tuple[str, str, float, tuple[str, ...], Mapping[str, Any]]
"""Name, kind, weight, what it reads, and options of one of several losses."""

_VERSION = re.compile(r"\d{1,4}\.\d{1,4}(\.\d{1,4})?")


def _check_version(text: str) -> str:
    if not _VERSION.fullmatch(text):
        msg = f'must be a version such as "1.20", found {text[:40]!r}'
        raise ValueError(msg)
    return text


def _check_size(text: str) -> str:
    from odtpack_simulator.values.units import parse_quantity

    try:
        parse_quantity(text, "bytes")
    except ValueError as error:
        msg = f"is not a size: {error}"
        raise ValueError(msg) from None
    return text


def _read_options(table: Any) -> dict[str, Any]:
    """Options of a loss or an optimizer that are not the defaults."""
    given = table.model_dump(exclude_defaults=True)
    return {k: v for k, v in given.items() if k not in ("kind", "inputs", "decay_vectors")}


def _read_inputs(table: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple | list) else value}"
        for name, value in table.items()
    )


def _read_groups(tables: Any) -> tuple[Group, ...]:
    return tuple((each.parameters, each.learning_rate_scale, each.weight_decay) for each in tables)


def _parse_group(text: str) -> Group:
    """Read ``GLOB:lr=X,decay=X``; names may hold colons, so the last one counts."""
    from odtpack.errors import OdtpackError

    pattern, colon, rest = text.rpartition(":")
    numbers: dict[str, float] = {}
    try:
        for part in rest.split(","):
            key, _, value = part.partition("=")
            if key not in ("lr", "decay") or key in numbers:
                raise ValueError(key)
            numbers[key] = float(value)
        if not pattern or not colon:
            raise ValueError(pattern)
    except ValueError:
        raise OdtpackError("bad-group", f"--group {text!r} is not GLOB:lr=X,decay=X") from None
    return pattern, numbers.get("lr", 1.0), numbers.get("decay")


def _read_losses(tables: Any) -> tuple[LossPart, ...]:
    return tuple((t.name, t.kind, t.weight, t.inputs, t.options) for t in tables)


def _parse_loss(text: str) -> LossPart:
    """Read ``NAME=KIND KEY=VALUE ...``: ``weight``, ``input`` as often as needed, options."""
    from odtpack.errors import OdtpackError

    first, *rest = text.split() or [""]
    (name, _, kind), weight = first.partition("="), "1"
    inputs, options = list[str](), dict[str, Any]()
    for each in rest:
        key, _, value = each.partition("=")
        if key == "input":
            inputs.append(value)
        elif key == "weight":
            weight = value
        else:
            options[key] = parse_value(value)
    try:
        number = float(weight)
        if not name or not kind or not 0 < number < float("inf"):
            raise ValueError(text)
    except ValueError:
        raise OdtpackError(
            "bad-loss-option",
            f"--loss-part {text!r} is not NAME=KIND, with KEY=VALUE after it and a weight above 0",
            hint="class weights are an option of the loss in a recipe: [[losses]], and "
            f"options = {{ weight = [{weight}] }}"
            if "," in weight
            else "for example --loss-part 'digit=cross_entropy input=digits weight=0.5'",
        ) from None
    return name, kind, number, tuple(inputs), options


def _read_schedule(table: Any) -> Any:
    if table is None:
        return None
    from odtpack_runtime.training.schedules import ScheduleSpec

    settings = table.model_dump(exclude_defaults=True, exclude={"kind", "learning_rate"})
    return ScheduleSpec(table.kind, settings, table.learning_rate)


def _parse_schedule(value: Any) -> Any:
    from odtpack.errors import OdtpackError
    from odtpack_runtime.training.schedules import ScheduleSpec

    if isinstance(value, str):
        return ScheduleSpec.parse(value)
    if not isinstance(value, ScheduleSpec):
        hint = "pass for example: schedule='cosine:warmup=100'"
        raise OdtpackError("bad-argument", f"schedule cannot be {repr(value)[:60]}", hint=hint)
    return value


def _read_ort_format(table: Any) -> choices.OrtFormat | None:
    if not table.ort:
        return None
    styles = tuple(choices.Style(name) for name in table.ort_styles)
    platforms = tuple(choices.Platform(name) for name in table.ort_platforms)
    return choices.OrtFormat(styles, platforms or (None,))


@dataclasses.dataclass(frozen=True)
class Head:
    """A classification head for an encoder, see :func:`odtpack.model.head.add_head`."""

    pool: choices.Pool = option(
        REQUIRED,
        "Mean over the tokens (those of `attention_mask`), the first token, or none for an output "
        "`[batch, width]`. Of a feature map `[batch, channels, ...]`, global for the mean of each "
        "channel, or flatten for all of its numbers.",
    )  # fmt: skip
    classes: int = option(REQUIRED, "Number of classes.", whole=True, least=1)
    seed: int = option(0, "Seed of the weight.", whole=True, least=0)
    input: str | None = option(
        None, "Output of the encoder that the head reads. Without it, the first that fits."
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TextSpec:
    """How texts become samples of a language model, see :mod:`odtpack.text`.

    Raises:
        OdtpackError: ``bad-argument``: a value out of range, or of another type.
    """

    tokenizer: str = option(
        REQUIRED,
        "Tokenizer of Hugging Face. A `tokenizer_config.json` beside it names `bos_token` and "
        "`eos_token`.",
        flag="--tokenizer", metavar="tokenizer.json",
    )  # fmt: skip
    length: int = option(
        REQUIRED,
        "Tokens of a sample. Longer rows lose the start of the prompt first, and the end of the "
        "answer if it alone is longer.",
        whole=True, least=2, most=100_000, flag="--length", metavar="N", example=256,
    )  # fmt: skip
    template: str = option(
        "plain",
        "How messages become text: `chatml`, `llama3`, `gemma`, `plain` (only their contents), a "
        "file of Jinja, or a `tokenizer_config.json` with a `chat_template`.",
        flag="--template", metavar="NAME|FILE",
    )  # fmt: skip
    prompt_field: str = option(
        "prompt", "Key of the prompt, in rows without `messages`.",
        flag="--prompt-field", metavar="KEY",
    )  # fmt: skip
    answer_field: str = option(
        "answer", "Key of the answer, in rows without `messages`.",
        flag="--answer-field", metavar="KEY",
    )  # fmt: skip
    end: str | None = option(
        None,
        "Token after each answer of `plain` and after each `text`. Without it, the `eos_token`. "
        "Empty: no token.",
        flag="--end", metavar="TOKEN", check=str,
    )  # fmt: skip
    pack: bool = option(
        False,
        "Join short rows to samples of up to `length` tokens. Each row then sees earlier ones.",
        flag="--pack",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """An adapter, and the layers that it goes on.

    ``lora``: Hu et al., 2021; ``dora``: Liu et al., 2024; ``ia3``: Liu et al., 2022;
    ``bitfit``: Ben Zaken et al., 2021; ``prompt``: Lester et al., 2021.

    Raises:
        OdtpackError: ``bad-adapter``: a value out of range, or one that the kind does not have;
            ``bad-argument``: a value of another type.
    """

    kind: choices.AdapterKind = option(
        REQUIRED,
        "Train a small adapter and freeze the model: low-rank matrices beside layers (`lora`), "
        "with magnitudes (`dora`), factors of layers (`ia3`), the biases of layers (`bitfit`), or "
        "vectors before the tokens of every sequence (`prompt`).",
    )  # fmt: skip
    on: tuple[str, ...] = option(
        (),
        "Patterns of the layers to adapt, by name without `.weight`. Without any, "
        "`bitfit` takes all. `prompt` needs no layers.",
        key="adapter.on", flag="--on", metavar="GLOB", example="*.q_proj",
    )  # fmt: skip
    feedforward: tuple[str, ...] = option(
        (), "`ia3`: patterns of the layers whose input is scaled instead of the output.",
        key="adapter.feedforward", flag="--feedforward", metavar="GLOB",
    )  # fmt: skip
    rank: int = option(
        8, "`lora`, `dora`: rank of the matrices.",
        whole=True, least=1, below=2**31, key="adapter.rank", flag="--rank", metavar="R",
        code="bad-adapter",
    )  # fmt: skip
    alpha: float = option(
        16.0, "`lora`, `dora`: their product is scaled by `alpha / rank`.",
        above=0, key="adapter.alpha", flag="--alpha", metavar="X", code="bad-adapter",
    )  # fmt: skip
    dropout: float = option(
        0.0, "`lora`: dropout rate of the inputs of the low-rank matrices.",
        least=0, below=1, key="adapter.dropout", flag="--adapter-dropout", metavar="X", example=0.1,
        code="bad-adapter",
    )  # fmt: skip
    seed: int = option(
        0, "`lora`, `dora`: seed of the first matrix, the second begins as zero; `prompt`: of the "
        "vectors.",
        whole=True, least=0, key="adapter.seed", flag="--adapter-seed", metavar="S",
        code="bad-adapter",
    )  # fmt: skip
    tokens: int = option(
        8, "`prompt`: vectors before the tokens of every sequence.",
        whole=True, least=1, below=2**31, key="adapter.tokens", flag="--prompt-tokens", metavar="N",
        code="bad-adapter",
    )  # fmt: skip

    def __post_init__(self) -> None:
        from odtpack.errors import OdtpackError

        check_options(self)
        problem = example = ""
        if self.on and self.kind == "prompt":
            problem, example = "the adapter prompt takes no layers", "--adapter prompt"
        elif not self.on and self.kind not in ("bitfit", "prompt"):
            problem, example = f"{self.kind} needs the layers to adapt", "--on '*.q_proj'"
        elif self.feedforward and self.kind != "ia3":
            problem = f"{self.kind} has no feedforward layers, only ia3 has"
            example = "--adapter ia3"
        elif self.dropout and self.kind != "lora":
            problem, example = f"{self.kind} has no dropout, only lora has", "--adapter lora"
        if problem:
            raise OdtpackError("bad-adapter", problem, hint=f"write for example: {example}")

    @property
    def scaling(self) -> float:
        """How often B A counts."""
        return self.alpha / self.rank

    @property
    def low_rank(self) -> bool:
        """Whether it has matrices A and B."""
        return self.kind in ("lora", "dora")


@dataclasses.dataclass(frozen=True)
class MemorySpec:
    """For which shapes the memory of a training step is made small, and how far."""

    # Sizes of open axes of the inputs by name.
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: int = 8  # size of every other open first axis
    other: int = 64  # size of every other open axis
    # Bytes that the whole training may take at its peak, see :mod:`odtpack.package.write`.
    budget: int | None = None
    # Bytes of activations that a training step may have at its peak, those of the sessions' nodes
    # that are added counted; as few as ``slowdown`` allows if None.
    limit: int | None = None
    # Part of the training model's time that computing again may take, by the estimate of
    # :mod:`odtpack.memory.schedule`; of a build without a budget by default.
    slowdown: float = 0.05
    worth: float = 0.03  # part of the activations below which a saving is left


@dataclasses.dataclass(frozen=True)
class BuildSpec:
    """Everything that decides a package, in plain values; the order is that of ``--help``.

    Raises:
        OdtpackError: ``bad-argument``: a value of another type. Values out of range have codes of
            their own.
    """

    model: Any = option(
        Path(), "Forward model: a path, an `onnx.ModelProto` or an `onnx_ir.Model`."
    )  # fmt: skip
    loss: str = option(
        "none", "Name of the loss; `none` if the first output is the loss.",
        key="loss.kind", manifest="loss", example="cross_entropy",
    )  # fmt: skip
    head: Head | None = option(
        None, "A classification head to add to the model first.",
        key="head", read=lambda table: None if table is None else Head(**table.model_dump()),
    )  # fmt: skip
    loss_options: Mapping[str, Any] = option(
        {}, "Options of the loss that are not the defaults.",
        key="loss", read=_read_options, manifest="loss_options", example={"reduction": "sum"},
    )  # fmt: skip
    optimizer: str = option(
        "adamw", "Name of the optimizer.", key="optimizer.kind", manifest="optimizer"
    )  # fmt: skip
    train: tuple[str, ...] = option(
        (), "Patterns of the parameters to train. Without any, all that are not frozen.",
        key="parameters.train", flag="--train", metavar="GLOB",
    )  # fmt: skip
    freeze: tuple[str, ...] = option(
        (),
        "Patterns of the parameters to freeze. Without any, all that are not trained. With both, "
        "a parameter that neither matches stays a constant inside the models.",
        key="parameters.freeze", flag="--freeze", metavar="GLOB",
    )  # fmt: skip
    like: str | None = option(
        None,
        "File with the names of the parameters to train: a list that "
        "`odtpack.names(module, 'names.txt')` wrote, or a `.safetensors` file with the trained "
        "tensors only, not a whole `state_dict`.",
        key="parameters.like", flag="--like", metavar="FILE", example="names.txt",
    )  # fmt: skip
    freeze_rows: tuple[str, ...] = option(
        (),
        "Row of a parameter that must not change, such as the row of PyTorch's `padding_idx`, "
        "which ONNX does not record.",
        key="parameters.freeze_rows", flag="--freeze-row", metavar="NAME=ROW",
        example="embedding.weight=0",
    )  # fmt: skip
    untie: tuple[str, ...] = option(
        (),
        "Patterns of shared tensors: each place that reads one gets a copy of its own. "
        "`odtpack inspect` lists them.",
        key="parameters.untie", flag="--untie", metavar="GLOB",
    )  # fmt: skip
    stop_gradient: tuple[str, ...] = option(
        (),
        "Values at which the gradient stops, as with `detach` in PyTorch, which exporters leave "
        "out. `VALUE@OUTPUT` stops it only into the node that computes OUTPUT. Both may be "
        "patterns.",
        key="stop_gradient", flag="--stop-gradient", metavar="VALUE",
    )  # fmt: skip
    adapter: choices.AdapterKind | None = option(
        None, AdapterSpec.__dataclass_fields__["kind"].metadata["meaning"], key="adapter.kind",
        flag="--adapter", manifest="adapter",
    )  # fmt: skip
    adapter_on: tuple[str, ...] = also(AdapterSpec, "on")
    adapter_feedforward: tuple[str, ...] = also(AdapterSpec, "feedforward")
    adapter_rank: int = also(AdapterSpec, "rank")
    adapter_alpha: float = also(AdapterSpec, "alpha")
    adapter_dropout: float = also(AdapterSpec, "dropout")
    adapter_seed: int = also(AdapterSpec, "seed")
    adapter_tokens: int = also(AdapterSpec, "tokens")
    loss_inputs: tuple[str, ...] = option(
        (), "Values that the loss reads, in its order; additional ones replace its targets. "
        "Without any, the first outputs.",
        key="loss.inputs", flag="--loss-input", metavar="NAME",
    )  # fmt: skip
    losses: tuple[LossPart, ...] = option(
        (),
        "One of several losses whose weighted sum is trained: its name, its kind, what it reads "
        "(`input=VALUE`, repeated), `weight=W` and its options. Both models return each loss as "
        "`loss.NAME`, and `accuracy.NAME` where it compares classes with labels.",
        key="losses", flag="--loss-part", metavar="'NAME=KIND KEY=VALUE ...'", parse=_parse_loss,
        read=_read_losses, manifest="loss", example=("a", "mse", 0.5, ("y",), {}),
    )  # fmt: skip
    inputs: tuple[str, ...] = option(
        (),
        "Input without one sample per element of the first axis: a constant (`sr=16000`), a "
        "state that starts at zero in every batch (`state=zeros`), a state that is carried over "
        "from step to step (`state=carry:OUTPUT`, of fixed sizes; it is in the checkpoint, and no "
        "gradient flows to the previous step), or an input with samples on another axis "
        "(`x=axis:1`). Training models take samples only, on the first axis; the inference "
        "template keeps all inputs.",
        key="inputs", read=_read_inputs, flag="--input", metavar="NAME=VALUE", example="sr=16000",
    )  # fmt: skip
    sizes: tuple[str, ...] = option(
        (),
        "Fixed size of a dynamic axis, by name (`batch=4`), or of all axes of an input "
        "(`input=1,512`).",
        key="sizes", flag="--size", metavar="NAME=N[,N...]", example="tokens=512",
    )  # fmt: skip
    outputs: tuple[str, ...] = option(
        (), "Further values that the training and evaluation models return.",
        key="outputs", flag="--output", metavar="NAME",
    )  # fmt: skip
    prediction: bool = option(
        True, "Return the prediction from the evaluation model, for accuracy.",
        key="prediction", flag="--prediction/--no-prediction",
    )  # fmt: skip
    optimizer_options: Mapping[str, Any] = option(
        {}, "Settings of the optimizer that are not the defaults.",
        key="optimizer", read=_read_options, example={"weight_decay": 0.01},
    )  # fmt: skip
    clip_norm: float | None = option(
        None, "Maximum norm of all gradients together. Larger gradients are scaled down to it.",
        above=0, key="clip.norm", flag="--clip-norm", metavar="X", manifest="clip", example=1.0,
        code="bad-hyperparameter",
    )  # fmt: skip
    clip_value: float | None = option(
        None, "Maximum magnitude of a gradient element. Larger elements are clipped.",
        above=0, key="clip.value", flag="--clip-value", metavar="X", manifest="clip", example=1.0,
        code="bad-hyperparameter",
    )  # fmt: skip
    privacy_clip: float | None = option(
        None,
        "Train privately (DP-SGD): clip the gradient of each sample to this norm, and add noise.",
        above=0, key="privacy.clip_norm", flag="--privacy-clip", metavar="C", manifest="privacy",
        example=1.0, code="private-training",
    )  # fmt: skip
    privacy_noise: float | None = option(
        None,
        "Standard deviation of the noise as a multiple of the norm, 1 by default; `odtpack "
        "privacy` computes epsilon.",
        example=2.0, least=0, key="privacy.noise_multiplier", flag="--privacy-noise", metavar="S",
        manifest="privacy", code="private-training",
    )  # fmt: skip
    groups: tuple[Group, ...] = option(
        (),
        "Parameter group with a factor of the learning rate or a weight decay. The first "
        "pattern that matches applies.",
        key="groups", flag="--group", metavar="GLOB:lr=X,decay=X", parse=_parse_group,
        read=_read_groups, manifest="groups", example=("head.*", 10.0, None),
    )  # fmt: skip
    decay_vectors: bool = option(
        True, "Apply weight decay to biases, scales of normalizations and other vectors too.",
        key="optimizer.decay_vectors", flag="--vector-decay/--no-vector-decay",
    )  # fmt: skip
    accumulation_steps: int = option(
        1, "Batches accumulated for one optimizer step.",
        whole=True, least=1, key="batch.accumulation_steps", flag="--accumulate", metavar="K",
        manifest="accumulation_steps", example=4, code="bad-accumulation",
    )  # fmt: skip
    schedule: Any = option(
        None, "Schedule of the learning rate: constant, linear, cosine, step or multistep, as in "
        "cosine:warmup=100,total=1000,floor=0.1,lr=0.003. Without total it runs over the whole "
        "training.",
        key="schedule", flag="--schedule", metavar="KIND[:KEY=X,...]", parse=_parse_schedule,
        read=_read_schedule, manifest="schedule", example="cosine:warmup=100",
    )  # fmt: skip
    runtime: choices.Runtime = option(
        choices.STOCK,
        "Runtime of the package: stock ONNX Runtime, the same on a GPU (`webgpu`: replaces "
        "operators that the WebGPU provider lacks), or onnxruntime-training 1.19 with its own "
        "operators.",
        key="target.runtime", flag="--target", manifest="target",
    )  # fmt: skip
    sessions: choices.Sessions = option(
        "fast", "Memory allocation for sessions: one arena for all of them (`fast`), or no arena "
        "(`small`), which takes about a tenth less memory and twice the time; on Linux with glibc "
        "only with `MALLOC_MMAP_THRESHOLD_=16384` in the app's environment, and else more memory.",
        key="target.sessions", flag="--sessions", manifest="session",
    )  # fmt: skip
    threads: int = option(
        1, "Threads within an operator, in every kit; each further one takes memory.",
        whole=True, least=1, most=256, key="target.threads", flag="--threads", metavar="N",
        manifest="session", example=2, code="bad-threads",
    )  # fmt: skip
    precision: choices.Precision = option(
        "model",
        "Number types of a training step: those of the model (`model`), or float16 for matrix "
        "products, convolutions and what follows them, with float32 parameters and a dynamic "
        "loss scale (`mixed`).",
        key="formats.precision", flag="--precision",
    )  # fmt: skip
    frozen_storage: choices.Storage | None = option(
        None, "Store large frozen weights in fewer bytes; the models compute in float32.",
        key="formats.frozen_dtype", flag="--frozen-dtype",
    )  # fmt: skip
    base: choices.BaseKind | None = option(
        None,
        "Store frozen matrices inside the models in 8 or 4 bits, which each step unpacks where it "
        "reads them; for adapters.",
        key="formats.base", flag="--base",
    )  # fmt: skip
    segments: bool = option(
        False, "Cut the model into segments that run one after the other and are recomputed in the "
        "backward pass, so that memory does not grow with depth; for adapters on large models.",
        key="memory.segments", flag="--segments/--no-segments", manifest="segments",
    )  # fmt: skip
    keep_products: int = option(
        0, "Number of segments, the last ones or all, that keep products with frozen matrices for "
        "the backward pass instead of computing them again: less time, more memory.",
        whole=True, least=0, key="memory.keep_products", flag="--keep-products", metavar="N",
        example=24, manifest="segments",
    )  # fmt: skip
    ort_format: choices.OrtFormat | None = option(
        None, "Variants in ORT format to write too, with the operators that a reduced build needs.",
        key="formats", read=_read_ort_format, example=choices.OrtFormat(),
    )  # fmt: skip
    nominal: bool = option(
        False, "Also write a checkpoint without values.",
        key="formats.nominal", flag="--nominal/--no-nominal",
    )  # fmt: skip
    self_check: bool = option(
        True,
            "Run the first training steps and record their losses, for the self-check on "
            "devices.",
        key="formats.self_check", flag="--self-check/--no-self-check", manifest="self_check",
    )  # fmt: skip
    memory_budget: str | None = option(
        None, "Peak memory that training may take, with a unit, as in '60 MB'; activations are "
        "recomputed until it fits. Without it, cheap activations are recomputed.",
        key="memory.budget", flag="--memory-budget", metavar="SIZE", check=_check_size,
        example="60 MB", code="bad-memory-budget",
    )  # fmt: skip
    step_model: choices.StepModel = option(
        "auto",
        "Also write a training model that updates each parameter with its gradient, for less "
        "memory and time: if gradients take a megabyte or more (`auto`), whenever the optimizer "
        "allows it (`always`), or `never`.",
        key="memory.step_model", flag="--step-model",
    )  # fmt: skip
    native: bool = option(
        False, "Write updates, depthwise convolutions, batch normalization in training mode, "
        "products with 4- and 8-bit matrices, gradients of weights, and the backward passes of "
        "normalizations, softmax and GELU as functions with native kernels. ONNX Runtime 1.12 and "
        "newer also trains without the library of kernels.",
        key="formats.native", flag="--native/--no-native",
    )  # fmt: skip
    memory_batch: int | None = option(
        None, "Batch size assumed for the memory budget. Without it, that of `[batch]`, or 8.",
        whole=True, least=1, key="memory.batch", flag="--memory-batch", metavar="N", example=8,
        code="bad-batch-size",
    )  # fmt: skip
    memory_sizes: tuple[str, ...] = option(
        (), "Size of another dynamic axis assumed for it, as in tokens=128; 64 if not given.",
        key="memory.sizes", flag="--memory-size", metavar="NAME=N", example="tokens=128",
    )  # fmt: skip
    onnxruntime: str | None = option(
        None,
        "Oldest version of ONNX Runtime that must load the package, as in 1.20. Without it, the "
        "oldest that has the kernels of the models; the manifest names it.",
        key="target.onnxruntime", flag="--onnxruntime", metavar="VERSION", check=_check_version,
        manifest="minimum_onnxruntime", example="1.20", code="bad-version",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if each.name == "inputs" and isinstance(value, Mapping):  # as a recipe has them
                object.__setattr__(self, each.name, _read_inputs(value))
            if each.name == "like" and isinstance(value, Path):
                object.__setattr__(self, each.name, str(value))
            if each.parse is not None and not each.many and value is not None:
                object.__setattr__(self, each.name, each.parse(value))
            elif each.parse is not None and isinstance(value, list | tuple):
                # Objects stand for their fields in order: GroupRule("head.*", 10.0).
                items = (each.parse(item) if isinstance(item, str) else item for item in value)
                plain = (
                    tuple(vars(i).values()) if dataclasses.is_dataclass(i) else i for i in items
                )
                object.__setattr__(self, each.name, tuple(plain))
        check_options(self)

    @classmethod
    def of(cls, recipe: Any) -> Self:
        """What a recipe asks for, see :func:`odtpack.recipe.read_recipe`."""
        values: dict[str, Any] = {"model": recipe.model}
        for each in options():
            value = recipe.table
            for part in each.key.split("."):
                value = getattr(value, part, None)
            if each.read is not None:
                value = each.read(value)
            if value is not None:
                values[each.name] = value
        if "like" in values:
            values["like"] = str(recipe.path.parent / values["like"])
        if "memory_budget" in values and "batch" in recipe.table.model_fields_set:
            values.setdefault("memory_batch", recipe.table.batch.at_once)
        return cls(**values)

    def said(self, table: str) -> dict[str, Any]:
        """The keys of a recipe's table with their values, but for those that are the defaults."""
        values = {key: (getattr(self, each.name), each.default) for key, each in keys_of(table)}
        return {key: value for key, (value, default) in values.items() if value != default}

    def canonical_json(self) -> str:
        """The values as text: equal ones give equal text, wherever the model lies."""
        content = dataclasses.asdict(dataclasses.replace(self, model=Path()))
        del content["model"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def adapter_spec(self) -> AdapterSpec | None:
        """The adapter that is asked for.

        Raises:
            OdtpackError: As :class:`AdapterSpec`; or there are settings and no kind.
        """
        given = {each.name: getattr(self, f"adapter_{each.name}") for each in _ADAPTER}
        if self.adapter is not None:
            return AdapterSpec(self.adapter, **given)
        for each in _ADAPTER:
            if given[each.name] != each.default:
                from odtpack.errors import OdtpackError

                what = f"{each.name!r} is a setting of an adapter, and no adapter is given"
                raise OdtpackError("option-not-used", what, hint="name its kind: --adapter lora")
        return None

    def memory_spec(self) -> MemorySpec:
        """The problem that is posed to the memory compiler.

        Raises:
            OdtpackError: A budget that cannot be kept or read, or its settings and no budget.
        """
        from odtpack.errors import OdtpackError
        from odtpack_simulator.values.units import parse_quantity

        if self.memory_budget is None:
            if self.memory_batch is not None or self.memory_sizes:
                what = "a batch size and sizes are given for a memory budget, and there is none"
                hint = "add --memory-budget, as in --memory-budget '60 MB'"
                raise OdtpackError("option-not-used", what, hint=hint)
            return MemorySpec()
        if self.runtime != choices.STOCK:
            raise OdtpackError(
                "target-cannot", "a memory budget is kept with stock ONNX Runtime only",
                hint="leave --memory-budget or --target out",
            )  # fmt: skip
        named = {}
        for text in self.memory_sizes:
            name, _, size = text.rpartition("=")
            if not name or not size.isascii() or not size.isdigit() or int(size) < 1:
                what = f"{text!r} is not NAME=SIZE with a size of 1 or more"
                raise OdtpackError("bad-memory-budget", what)
            named[name] = int(size)
        budget = int(parse_quantity(self.memory_budget, "bytes"))
        return MemorySpec(named, self.memory_batch or MemorySpec.batch, budget=budget)


_ADAPTER = options_of(AdapterSpec)[1:]


def options() -> tuple[Option, ...]:
    """The options that have a key in a recipe: all but the model."""
    return tuple(each for each in options_of(BuildSpec) if each.key)


def keys_of(table: str) -> list[tuple[str, Option]]:
    """The keys of a recipe's table that are options as they stand; ``""`` is above all tables."""
    parts = ((each.key.rpartition("."), each) for each in options() if each.flag)
    return [(key, each) for (above, _, key), each in parts if above == table and not each.read]
