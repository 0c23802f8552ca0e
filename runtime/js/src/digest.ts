/** Whether a checkpoint still holds what was saved: "The digest" of docs/formats/checkpoint.md. */
import { platform } from '#platform';
import { OdtpackError } from './errors.js';
import { type Dims, join } from './tensors.js';

export const PREFIX = 'sha256:';
export const TEXT_BYTES = PREFIX.length + 64;

const NOTHING = new Uint8Array();

/** What the digest of a whole checkpoint is made from, piece by piece, in the order of the file. */
export class Outline {
  readonly #pieces: (Uint8Array | { elements: Uint8Array })[] = [];

  constructor(readonly nominal: boolean) {
    this.#pieces.push(new TextEncoder().encode('odtpack.checkpoint.1'));
    this.#number(1, (view) => view.setUint8(0, Number(nominal)));
  }

  count(entries: number): void {
    this.#number(4, (view) => view.setUint32(0, entries, true));
  }

  int32(value: number): void {
    this.#number(4, (view) => view.setInt32(0, value, true));
  }

  int64(value: bigint): void {
    this.#number(8, (view) => view.setBigInt64(0, value, true));
  }

  float32(value: number): void {
    this.#number(4, (view) => view.setFloat32(0, value + 0, true)); // a negative zero is a zero
  }

  /** A float32 of a file by its bits: a number of JavaScript loses those of a NaN. */
  float32Bits(bits: number): void {
    this.count(bits === 0x80000000 ? 0 : bits);
  }

  text(text: string): void {
    const encoded = new TextEncoder().encode(text);
    this.count(encoded.length);
    this.#pieces.push(encoded);
  }

  /** A tensor by its type's number in ONNX; the elements are not copied. */
  tensor(name: string, code: number, dims: Dims, elements: Uint8Array): void {
    this.text(name);
    this.int32(code);
    const shape = this.nominal ? [] : dims;
    this.count(shape.length);
    for (const size of shape) this.int64(BigInt(size));
    this.#pieces.push({ elements: this.nominal ? NOTHING : elements });
  }

  /** The digests as a file holds them: of the tensors that have values, then of the whole. */
  async digests(): Promise<string[]> {
    const found: string[] = [];
    const outline: Uint8Array[] = [];
    for (const piece of this.#pieces) {
      if (piece instanceof Uint8Array) {
        outline.push(piece);
      } else {
        const digest = await platform.sha256(piece.elements);
        outline.push(digest);
        if (!this.nominal) found.push(PREFIX + hex(digest));
      }
    }
    return [...found, PREFIX + hex(await platform.sha256(join(outline)))];
  }

  #number(size: number, set: (view: DataView) => void): void {
    const bytes = new Uint8Array(size);
    set(new DataView(bytes.buffer));
    this.#pieces.push(bytes);
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
