"""The models, what they are fed and how each is trained."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exported import sequence, vision

Data = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and its task."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Data]  # draws a batch, by the name of the forward's argument
    loss: str | None = "cross_entropy"  # None where the model returns its loss
    target: Callable[[Data], Tensor] | None = None  # draws the target, from the inputs
    dynamic: Mapping[str, Mapping[int, str]] | None = None  # axes exported without a length
    norms: bool = False  # batch normalizations, to be exported in training mode as well
    rate: float = 0.05  # of SGD
    # Besides the exporter's default.
    other_opset: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"torchscript": 13, "dynamo": 18}
    )


TORCH_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}


def _images(channels: int, size: int, count: int = 4) -> Callable[[], Data]:
    return lambda: {"x": torch.randn(count, channels, size, size)}


def _labels(classes: int, *shape: int) -> Callable[[Data], Tensor]:
    return lambda _: torch.randint(classes, shape)


def _tokens(vocabulary: int, length: int, count: int = 4) -> Tensor:
    return torch.randint(1, vocabulary, (count, length))


def _text() -> Data:
    tokens, mask = _tokens(30, 8), torch.ones(4, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    mask[2, 2:] = 0
    return {"tokens": tokens * mask, "segments": torch.randint(2, (4, 8)), "mask": mask}


def _padded() -> Data:
    text = _text()
    return {"tokens": text["tokens"], "padding": text["mask"] == 0}


def _visits() -> Data:
    sizes = {"user": (12, (8,)), "item": (15, (8,)), "tags": (9, (8, 3))}
    return {name: torch.randint(most, shape) for name, (most, shape) in sizes.items()}


def _pairs() -> Data:
    same = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return {"left": torch.randn(4, 1, 11, 11), "right": torch.randn(4, 1, 11, 11), "same": same}


BATCH = {0: "batch"}
# The older exporter knows fused attention from 14 on; from 23 on it is an operator.
ATTENTION = {"torchscript": 14, "dynamo": 23}

SUBJECTS = {
    "keyword-gru": Subject(sequence.KeywordSpotter, lambda: {"x": torch.randn(4, 9, 6)},
                           target=_labels(5, 4), dynamic={"x": BATCH}, rate=0.2),
    "lstm": Subject(sequence.LstmClassifier, lambda: {"tokens": _tokens(20, 7)},
                    target=_labels(4, 4), rate=0.5),
    "unet": Subject(vision.UNet, _images(2, 8), target=_labels(3, 4, 8, 8), dynamic={"x": BATCH},
                    norms=True, rate=2.0),
    "mobilenet-v3": Subject(vision.MobileNetV3, _images(3, 16, 6), target=_labels(5, 6),
                            dynamic={"x": BATCH}, norms=True, rate=0.2),
    "efficientnet": Subject(vision.EfficientNet, _images(3, 16, 6), target=_labels(5, 6),
                            norms=True, rate=0.2),
    "convnext": Subject(vision.ConvNeXt, _images(3, 16), target=_labels(5, 4),
                        dynamic={"x": BATCH}),
    "vit": Subject(vision.VisionTransformer, _images(3, 8), target=_labels(5, 4),
                   dynamic={"x": BATCH}, other_opset=ATTENTION),
    "bert": Subject(
        sequence.Bert, _text, target=_labels(3, 4),
        dynamic={name: {0: "batch", 1: "length"} for name in ("tokens", "segments", "mask")}),
    "padding-mask": Subject(sequence.MaskedEncoder, _padded, target=_labels(3, 4),
                            dynamic={"tokens": BATCH, "padding": BATCH}, other_opset=ATTENTION),
    "causal-lm": Subject(sequence.CausalLanguageModel, lambda: {"tokens": _tokens(24, 8)},
                         target=lambda data: data["tokens"].roll(-1, dims=1),
                         dynamic={"tokens": {0: "batch", 1: "length"}}, other_opset=ATTENTION),
    "causal-lm-masked": Subject(lambda: sequence.CausalLanguageModel(attention="masked"),
                                lambda: {"tokens": _tokens(24, 10)},
                                target=lambda data: data["tokens"].roll(-1, dims=1),
                                other_opset=ATTENTION),
    "recommender": Subject(sequence.Recommender, _visits, loss="bce_with_logits",
                           target=lambda _: torch.randint(2, (8,)).float()),
    "autoencoder": Subject(vision.Autoencoder, lambda: {"x": torch.rand(4, 1, 16, 16)}, loss="mse",
                           target=lambda data: data["x"], rate=0.5, dynamic={"x": BATCH}),
    "siamese": Subject(vision.Siamese, _pairs, loss=None),
    "translator": Subject(
        sequence.Translator, lambda: {"source": _tokens(20, 7), "target": _tokens(20, 5)},
        target=_labels(20, 4, 5), dynamic={"source": BATCH, "target": BATCH}, rate=0.5),
    "t5": Subject(
        lambda: sequence.pretrained("T5", d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
                                    feed_forward_proj="gated-gelu"),
        lambda: {"source": _tokens(20, 7), "target": _tokens(20, 5)}, target=_labels(20, 4, 5),
        dynamic={"source": BATCH | {1: "read"}, "target": BATCH | {1: "written"}},
    ),
    "whisper": Subject(
        lambda: sequence.pretrained(
            "Whisper", d_model=16, num_mel_bins=6, max_source_positions=8, max_target_positions=9,
            **{f"{half}_{what}": count for half in ("encoder", "decoder")
               for what, count in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))},
        ),
        lambda: {"source": torch.randn(4, 6, 16), "target": _tokens(20, 5)},
        target=_labels(20, 4, 5), dynamic={"source": BATCH, "target": BATCH | {1: "written"}},
    ),
    "window-transformer": Subject(vision.WindowTransformer, _images(3, 16), target=_labels(5, 4),
                                  dynamic={"x": BATCH}),
}  # fmt: skip
