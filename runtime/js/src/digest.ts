/** Whether a checkpoint still holds what was saved: "The digest" of docs/formats/checkpoint.md. */
import { platform } from '#platform';
import { OdtpackError } from './errors.js';
import { bytesOf, type Dims } from './tensors.js';

export const PREFIX = 'sha256:';
export const TEXT_BYTES = PREFIX.length + 64;

const NOTHING = new Uint8Array();
const ENCODER = new TextEncoder();

/** What the digest of a whole checkpoint is made from, in the order of the file. */
export class Outline {
  #bytes = new Uint8Array(4096);
  #size = 0;
  /** Tensors, and where the digest of their elements stands. */
  readonly #tensors: { readonly at: number; readonly elements: ArrayBufferView }[] = [];

  constructor(readonly nominal: boolean) {
    this.#append(ENCODER.encode('odtpack.checkpoint.1'));
    this.#append(Uint8Array.of(Number(nominal)));
  }

  count(entries: number): void {
    const at = this.#room(4);
    this.#view().setUint32(at, entries, true);
  }

  int32(value: number): void {
    const at = this.#room(4);
    this.#view().setInt32(at, value, true);
  }

  int64(value: bigint): void {
    const at = this.#room(8);
    this.#view().setBigInt64(at, value, true);
  }

  float32(value: number): void {
    const at = this.#room(4);
    this.#view().setFloat32(at, value + 0, true); // a negative zero is a zero
  }

  /** A float32 of a file by its bits: a number of JavaScript loses those of a NaN. */
  float32Bits(bits: number): void {
    this.count(bits === 0x80000000 ? 0 : bits);
  }

  text(text: string): void {
    const encoded = ENCODER.encode(text);
    this.count(encoded.length);
    this.#append(encoded);
  }

  /** A tensor by its type's number in ONNX; the elements are not copied. */
  tensor(name: string, code: number, dims: Dims, elements: ArrayBufferView): void {
    this.text(name);
    this.int32(code);
    const shape = this.nominal ? [] : dims;
    this.count(shape.length);
    for (const size of shape) this.int64(BigInt(size));
    this.#tensors.push({ at: this.#room(32), elements: this.nominal ? NOTHING : elements });
  }

  /** The digests as a file holds them: of the tensors that have values, then of the whole. */
  async digests(): Promise<string[]> {
    const found: string[] = [];
    const ofNothing = await platform.sha256(NOTHING);
    for (const { at, elements } of this.#tensors) {
      const digest = elements.byteLength ? await platform.sha256(bytesOf(elements)) : ofNothing;
      this.#bytes.set(digest, at);
      if (!this.nominal) found.push(PREFIX + hex(digest));
    }
    const whole = await platform.sha256(this.#bytes.subarray(0, this.#size));
    return [...found, PREFIX + hex(whole)];
  }

  #append(bytes: Uint8Array): void {
    const at = this.#room(bytes.length); // which may move what there is
    this.#bytes.set(bytes, at);
  }

  /** Where some more bytes go. */
  #room(size: number): number {
    const at = this.#size;
    this.#size += size;
    if (this.#size > this.#bytes.length) {
      const larger = new Uint8Array(2 * this.#size);
      larger.set(this.#bytes);
      this.#bytes = larger;
    }
    return at;
  }

  #view(): DataView {
    return new DataView(this.#bytes.buffer);
  }
}

/** What browsers compute digests and check signatures with. */
export function subtle(): SubtleCrypto {
  const found = globalThis.crypto?.subtle as SubtleCrypto | undefined;
  if (found) return found;
  throw new OdtpackError('no-web-crypto',
    'A package or checkpoint cannot be checked here: there is no crypto.subtle.', '',
    'serve the page by https or from localhost; in React Native install a polyfill');
}

export function hex(digest: Uint8Array): string {
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
