/** Whether a checkpoint still holds what was saved: "The digest" of docs/formats/checkpoint.md. */
import { platform } from '#platform';
import { fail } from './errors.js';
import { bytesOf, type Dims } from './tensors.js';

export const PREFIX = 'sha256:';
export const TEXT_BYTES = PREFIX.length + 64;

const NOTHING = new Uint8Array();
const ENCODER = new TextEncoder();

/** What the digest of a whole checkpoint is made from, in the order of the file. */
export class Outline {
  #bytes = new Uint8Array(4096);
  #size = 0;
  #numbers = new DataView(this.#bytes.buffer);
  readonly #digests: number[] = []; // where those of tensors stand
  readonly #elements: ArrayBufferView[] = [];

  constructor(readonly nominal: boolean) {
    this.#append(ENCODER.encode('odtpack.checkpoint.1'));
    this.#append(Uint8Array.of(Number(nominal)));
  }

  count(entries: number): void {
    this.number('Uint32', entries);
  }

  /** A number of 32 bits; a negative zero is a zero. */
  number(kind: 'Uint32' | 'Int32' | 'Float32', value: number): void {
    const at = this.#room(4);
    this.#numbers[`set${kind}`](at, value + 0, true);
  }

  int64(value: bigint): void {
    const at = this.#room(8);
    this.#numbers.setBigInt64(at, value, true);
  }

  text(text: string): void {
    const at = this.#room(4 + 3 * text.length); // as many bytes as it can have
    const { written } = ENCODER.encodeInto(text, this.#bytes.subarray(at + 4));
    this.#numbers.setUint32(at, written, true);
    this.#size = at + 4 + written;
  }

  group(index: number, step: bigint, learningRate: number): void {
    this.text(`group${index}`);
    this.int64(step);
    this.number('Float32', learningRate);
  }

  /** @param bits Those of a NaN in float32, which a number of JavaScript loses. */
  property(name: string, value: bigint | number | string, bits?: number): void {
    this.text(name);
    if (typeof value === 'string') this.text(value);
    else if (typeof value === 'bigint') this.int64(value);
    else if (bits === undefined) this.number('Float32', value);
    else this.number('Uint32', bits);
  }

  /** A tensor by its type's number in ONNX; the elements are not copied. */
  tensor(name: string, code: number, dims: Dims, elements: ArrayBufferView): void {
    this.text(name);
    this.number('Int32', code);
    const shape = this.nominal ? [] : dims;
    this.count(shape.length);
    for (const size of shape) this.int64(BigInt(size));
    this.#digests.push(this.#room(32));
    this.#elements.push(this.nominal ? NOTHING : elements);
  }

  /** The digest of the whole, as a file holds it; those of tensors can be had after that. */
  async digest(): Promise<string> {
    const ofNothing = await platform.sha256(NOTHING);
    for (const [i, elements] of this.#elements.entries()) {
      const digest = elements.byteLength ? await platform.sha256(bytesOf(elements)) : ofNothing;
      this.#bytes.set(digest, this.#digests[i]!);
    }
    return PREFIX + hex(await platform.sha256(this.#bytes.subarray(0, this.#size)));
  }

  /** The digest of a tensor, in the order of the file, as it holds it. */
  ofTensor(index: number): string {
    const at = this.#digests[index]!;
    return PREFIX + hex(this.#bytes.subarray(at, at + 32));
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
      this.#numbers = new DataView(larger.buffer);
    }
    return at;
  }
}

/** What browsers compute digests and check signatures with. */
export function subtle(): SubtleCrypto {
  return (globalThis.crypto?.subtle as SubtleCrypto | undefined) ?? fail('no-web-crypto',
    'A package or checkpoint cannot be checked here: there is no crypto.subtle.', '',
    'serve the page by https or from localhost; in React Native install a polyfill');
}

export function hex(digest: Uint8Array): string {
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
