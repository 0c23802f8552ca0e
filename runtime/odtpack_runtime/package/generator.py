"""Generates tokens with the decoder of a package and the adapters that were trained for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime

from odtpack_runtime.apart.child import alive
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_runtime.package.adapter import adapter_of, read_adapter, trained_of
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.options import session_of
from odtpack_runtime.session.options import session_options as make_options
from odtpack_runtime.session.session import first_line

_PAST, _PRESENT = "past_key_values.", "present."
_AT_ONCE = 32  # tokens of a prompt: the logits of each take as many numbers as there are words

_NUMBERS = (int, float, np.integer, np.floating)

DECODER_ROLES: Final = ("decoder_model", "decoder_weights")
DECODER_RUNS: Final = "odtpack_runtime.package.generator:decoder_runs"


def decoder_runs(manifest: str) -> None:
    """Generate two tokens with the decoder of a package; to be called apart, as it may do anything.

    Raises:
        OdtpackError: It does not load, or does not run.
    """
    for _ in Generator(Package.open(Path(manifest))).generate([0], max_tokens=2):
        alive()


class Generator:
    """The inference model of a decoder that was trained in segments, loaded once.

    Its weights are those of the training, mapped from the same file. Adapters are arrays beside
    them: any number may be there, and each call says which one counts.

    Args:
        package: A package with a decoder: one of segments that trains LoRA, built of a decoder
            that was exported with its key-value cache.
        session_options: Options of ONNX Runtime; the package's if None. Their entry
            ``odtpack.packed_weights`` names a folder for the weights as ONNX Runtime packs them:
            they are written once, and mapped from then on.

    Raises:
        OdtpackError: The package has no decoder (``no-decoder``), or it does not load, or packed
            weights cannot be kept (``packed-not-written``).
    """

    def __init__(
        self, package: Package, session_options: onnxruntime.SessionOptions | None = None
    ) -> None:
        from odtpack_runtime.package.packed import open_decoder

        self._package = package
        options = session_options
        if options is None:
            manifest = package.manifest
            options = make_options(manifest.session or session_of(None, package.decoder))
        level = options.log_severity_level
        if level < 0:  # none is chosen; an adapter's inputs have values, which is meant
            options.log_severity_level = 3
        try:
            self._session = open_decoder(
                package.decoder, options, package.decoder_weights, package.manifest_sha256
            )
        finally:
            options.log_severity_level = level
        inputs = {node.name: node for node in self._session.get_inputs()}
        self._given = {*inputs} & {"input_ids", "attention_mask", "position_ids"}
        self._states = {}
        for name in sorted({*inputs} - self._given):
            heads, size = inputs[name].shape[1], inputs[name].shape[3]
            dtype = np.float16 if "float16" in inputs[name].type else np.float32
            self._states[name] = np.zeros((1, heads, 0, size), dtype)
        self._words = next(o.shape[-1] for o in self._session.get_outputs() if o.name == "logits")
        present = (_PRESENT + name.removeprefix(_PAST) for name in self._states)
        self._outputs = ["logits", *present]
        self._adapters: dict[str, Callable[[], Mapping[str, Array]]] = {}  # as each is now

    def add_adapter(self, name: str, source: CheckpointState | str | os.PathLike[str]) -> None:
        """Put an adapter beside the decoder, under a name of the caller's choice.

        Args:
            name: What later calls name it by; an adapter of that name is replaced.
            source: A state, as it is at each later call, which is ``busy`` if another thread's
                call of the state runs when it begins; or a file or folder that
                :func:`~odtpack_runtime.save_adapter` or PEFT wrote.

        Raises:
            OdtpackError: As of :func:`~odtpack_runtime.load_adapter`.
        """
        names = adapter_of(self._package).parameters
        if isinstance(source, CheckpointState):
            state = source

            def read() -> Mapping[str, Array]:
                with state.lock:
                    arrays = trained_of(self._package, state)
                return {each: arrays[each] for each in names}
        else:
            values = read_adapter(self._package, Path(source))
            own = {each: values[each] for each in names}

            def read() -> Mapping[str, Array]:
                return own

        read()  # says what is wrong with it
        self._adapters[name] = read

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            UnknownNameError: ``unknown-adapter``.
        """
        self._known(name)
        del self._adapters[name]

    def logits(self, tokens: Sequence[int] | Array, adapter: str | None = None) -> Array:
        """Return the logits [tokens, words] of a sequence, in float32.

        Args:
            tokens: The sequence, from its begin.
            adapter: Name of the adapter that counts; None for the decoder as it was exported.

        Raises:
            OdtpackError: ``bad-prompt``, ``unknown-adapter``, ``run-failed``.
        """
        return np.concatenate([*self._run(adapter).read(self._checked(tokens))])

    def generate(
        self,
        prompt: Sequence[int] | Array,
        *,
        adapter: str | None = None,
        max_tokens: int = 256,
        stop: Collection[int] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """Yield the tokens that follow a prompt, each as soon as it is there.

        Args:
            prompt: Numbers of tokens.
            adapter: As of :meth:`logits`.
            max_tokens: How many follow at most.
            stop: Tokens that end the sequence; they are not yielded.
            temperature: 0 for the likeliest token each time; otherwise one is drawn of the
                softmax of the logits divided by it.
            top_k: Draw of that many likeliest tokens; 0 for all.
            top_p: Draw of the likeliest tokens that have this probability together.
            seed: Of the drawing: the same one draws the same tokens.

        Raises:
            OdtpackError: ``bad-prompt``, ``unknown-adapter``, ``bad-argument``; ``run-failed``,
                where the decoder takes no more tokens, or its logits are not finite.
        """
        ended = isinstance(stop, Collection) and all(map(_is_whole, stop))
        whole = ended and all(map(_is_whole, (top_k, max_tokens, seed)))
        numbers = whole and all(isinstance(n, _NUMBERS) for n in (temperature, top_p))
        if not (numbers and temperature >= 0 <= top_k and 0 < top_p <= 1 and max_tokens >= 0):
            raise OdtpackError(
                "bad-argument",
                "temperature and top_k must be 0 or more, top_p above 0 and at most 1, max_tokens "
                "0 or more, and stop a list; top_k, max_tokens, seed and stop are whole numbers.",
            )
        return _follow(self._run(adapter), self._checked(prompt), max_tokens, frozenset(stop),
                       _Draw(temperature, top_k, top_p, seed))  # fmt: skip

    def _run(self, adapter: str | None) -> _Run:
        arrays = dict(self._states)
        if adapter is not None:
            arrays |= self._known(adapter)()
        return _Run(self, arrays)

    def _checked(self, tokens: Sequence[int] | Array) -> Array:
        array: Array = np.asarray(tokens)
        whole = array.ndim == 1 and array.size and array.dtype.kind in "iu"
        if not whole or array.min() < 0 or array.max() > np.iinfo(np.int64).max:
            what = "A prompt is a sequence of one token or more, as whole numbers from 0 on."
            raise OdtpackError("bad-prompt", what)
        # Some kernels take a token beyond the vocabulary for a vector of zeros.
        if isinstance(self._words, int) and array.max() >= self._words:
            what = f"The token {array.max()} is not below the {self._words} of the vocabulary."
            raise OdtpackError("bad-prompt", what)
        return array.astype(np.int64)

    def _known(self, name: str) -> Callable[[], Mapping[str, Array]]:
        if name not in self._adapters:
            what = f"There is no adapter {name!r:.80}."
            hint = f"those that were added: {', '.join(sorted(self._adapters)) or 'none'}"
            raise UnknownNameError("unknown-adapter", what, hint=hint)
        return self._adapters[name]


def _follow(
    run: _Run, prompt: Array, most: int, stop: Collection[int], draw: _Draw
) -> Iterator[int]:
    tokens = prompt
    for _ in range(most):
        for part in run.read(tokens):
            last = part[-1]
        if not np.isfinite(last.max()):
            what = f"The decoder's logits after {run.count} tokens are not finite."
            hint = "use an adapter from before its training diverged"
            raise OdtpackError("run-failed", what, hint=hint)
        token = draw(last)
        if token in stop:
            return
        yield token
        tokens = np.array([token])


class _Run:
    """A sequence: the decoder's cache after the tokens that it has read."""

    def __init__(self, decoder: Generator, arrays: dict[str, Array]) -> None:
        # `arrays`: the states at first, in the order of their outputs, and then the adapter's.
        self._decoder = decoder
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._feeds = {name: value(array) for name, array in arrays.items()}
        self._states = [*arrays][: len(decoder._outputs) - 1]
        self.count = 0

    def read(self, tokens: Array) -> Iterator[Array]:
        """Read further tokens; yields their logits [tokens, words], some at a time."""
        decoder = self._decoder
        for start in range(0, len(tokens), _AT_ONCE):
            part = tokens[start : start + _AT_ONCE]
            end = self.count + len(part)
            own = {
                "input_ids": part,
                "attention_mask": np.ones(end, np.int64),
                "position_ids": np.arange(self.count, end),
            }
            for name in decoder._given:
                array = np.ascontiguousarray(own[name][None], np.int64)
                self._feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            try:
                logits, *states = decoder._session.run_with_ort_values(
                    decoder._outputs, self._feeds
                )
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                what = f"The decoder failed after {self.count} tokens: {first_line(error)}"
                hint = "if its context ends there, pass a shorter prompt or smaller max_tokens"
                raise OdtpackError("run-failed", what, hint=hint) from error
            self._feeds.update(zip(self._states, states, strict=True))
            self.count = end
            yield logits.numpy()[0].astype(np.float32, copy=False)


class _Draw:
    """Chooses a token by its logits; kits that are given the same seed draw the same."""

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int) -> None:
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._state = seed % 2**64

    def __call__(self, logits: Array) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self._top_k or None]
        ordered = logits[order].astype(np.float64)
        with np.errstate(over="ignore"):  # of a very low temperature, whose others count as zero
            total = np.cumsum(np.exp((ordered - ordered[0]) / self._temperature))
        kept = int(np.searchsorted(total, self._top_p * total[-1])) + 1
        total = total[:kept]
        place = int(np.searchsorted(total, self._uniform() * total[-1], side="right"))
        return int(order[min(place, len(total) - 1)])

    def _uniform(self) -> float:
        """The next number of SplitMix64, from 0 to below 1."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        mixed = self._state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return float((mixed ^ (mixed >> 31)) >> 11) / 2**53


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer)
