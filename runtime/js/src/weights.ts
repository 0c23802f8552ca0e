/** The frozen weights of a network in segments, read from their file when a segment runs. */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { platform } from '#platform';
import { OdtpackError } from './errors.js';
import type { SegmentsInfo } from './manifest.js';
import type { OnnxRuntime, OpenedFile } from './platform.js';
import { tensorOver } from './runtime.js';
import { ARRAYS, type Dims, type DType, product, sameDims, view } from './tensors.js';

const ALIGNMENT = 64;

export function wrongSegments(problem: string): never {
  throw new OdtpackError('segments-invalid',
    `The package's segments are not valid: ${problem}.`, '', 'build the package again');
}

interface Weight {
  readonly dtype: DType;
  readonly dims: Dims;
  readonly offset: number;
  readonly nbytes: number;
}

export class Weights {
  readonly #weights = new Map<string, Weight>();
  #most = 0;
  #buffer: ArrayBuffer | undefined;

  /** @param file What the manifest's `segments` describe; undefined if there are no weights. */
  constructor(readonly file: OpenedFile | undefined, { tensors }: SegmentsInfo) {
    let end = 0;
    for (const { name, dtype, shape, offset } of tensors) {
      if (!file || !Object.hasOwn(ARRAYS, dtype)) wrongSegments(`nothing can hold '${name}'`);
      if (offset < end || offset % ALIGNMENT) wrongSegments(`the place of '${name}'`);
      const nbytes = product(shape) * ARRAYS[dtype as DType].BYTES_PER_ELEMENT;
      // Of sizes that are too large for numbers the product may be NaN.
      if (shape.some((size) => size < 0) || !(offset + nbytes <= file.size)) {
        wrongSegments(`the weight '${name}' ends after the file of weights`);
      }
      end = offset + nbytes;
      if (this.#weights.has(name)) wrongSegments(`two weights are called '${name}'`);
      this.#weights.set(name, { dtype: dtype as DType, dims: shape, offset, nbytes });
    }
  }

  has(name: string): boolean {
    return this.#weights.has(name);
  }

  /** Check that a weight is what a model takes, as far as the binding tells: 1.22 was the first. */
  check(name: string, taken: InferenceSession.ValueMetadata | undefined): void {
    const { dtype, dims } = this.#weights.get(name)!;
    if (!taken) return; // ONNX Runtime refuses it when it runs
    if (!taken.isTensor || taken.type !== dtype || !sameDims(taken.shape as Dims, dims)) {
      wrongSegments(`a model takes another '${name}' than the file of weights holds`);
    }
  }

  /** Let there be room for some weights at once. */
  fit(names: readonly string[]): void {
    const sizes = names.map((name) => aligned(this.#weights.get(name)!.nbytes));
    this.#most = Math.max(this.#most, sizes.reduce((sum, size) => sum + size, 0));
  }

  /** Tensors of weights that fit, until they are read anew. */
  read(ort: OnnxRuntime, names: readonly string[]): Tensor[] {
    let at = 0;
    return names.map((name) => {
      const { dtype, dims, offset, nbytes } = this.#weights.get(name)!;
      const { bytes } = this.file!;
      if (bytes && bytes.byteOffset % ALIGNMENT === 0) {
        const data = view(bytes.buffer, dtype, bytes.byteOffset + offset, nbytes);
        return tensorOver(ort, dtype, data, dims);
      }
      this.#buffer ??= platform.allocate(this.#most);
      this.file!.fill(new Uint8Array(this.#buffer, at, nbytes), offset);
      const data = view(this.#buffer, dtype, at, nbytes);
      at += aligned(nbytes);
      return tensorOver(ort, dtype, data, dims);
    });
  }

  close(): void {
    this.file?.close();
    this.#buffer = undefined;
  }
}

function aligned(nbytes: number): number {
  return Math.ceil(nbytes / ALIGNMENT) * ALIGNMENT;
}
