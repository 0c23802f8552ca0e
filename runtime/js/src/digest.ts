/** Whether a checkpoint still holds what was saved: "The digest" of docs/formats/checkpoint.md. */
import { platform } from '#platform';
import type { CheckpointData, OptimizerState, PropertyKind } from './checkpoint_format.js';
import { bytesOf, CODES, type Stored } from './tensors.js';

export const PREFIX = 'sha256:';
export const TEXT_BYTES = PREFIX.length + 64;

/** As a file lists them. */
export const KINDS: readonly PropertyKind[] = ['int', 'float', 'text'];
const NOTHING = new Uint8Array();
const ENCODER = new TextEncoder();

/** The groups of a file: names of which there are moments, in one group if nothing else is said. */
export function groupsOf(optimizer: OptimizerState | undefined): string[][] {
  if (!optimizer) return [];
  const { groups, moments } = optimizer;
  const all = groups.length ? groups : [[...moments.keys()]];
  return all.map((names) => names.filter((name) => moments.has(name)));
}

/** What the digest of a whole checkpoint is made from, in the order of the file. */
export class Outline {
  /** What a message calls the tensors. */
  readonly names: string[] = [];
  #bytes = new Uint8Array(4096);
  #size = 0;
  #numbers = new DataView(this.#bytes.buffer);
  readonly #digests: number[] = []; // where those of tensors stand
  readonly #elements: ArrayBufferView[] = [];

  /** @param bits Those of properties that are NaN, which a number of JavaScript loses. */
  constructor(readonly data: CheckpointData, bits: ReadonlyMap<string, number> = new Map()) {
    const { parameters, optimizer, properties } = data;
    this.#size = ENCODER.encodeInto('odtpack.checkpoint.1', this.#bytes).written;
    this.#bytes[this.#size++] = Number(data.nominal);
    for (const trained of [true, false]) {
      const own = [...parameters.values()].filter(({ requiresGrad }) => requiresGrad === trained);
      this.#number('Uint32', own.length);
      for (const each of own) this.#tensor(each.name, each);
    }
    const groups = groupsOf(optimizer);
    this.#number('Uint32', groups.length);
    for (const [index, owners] of groups.entries()) {
      this.#text(`group${index}`);
      this.#int64(BigInt(optimizer!.step));
      this.#number('Float32', optimizer!.learningRate);
      this.#number('Uint32', owners.length);
      for (const owner of owners) {
        const moments = optimizer!.moments.get(owner)!;
        this.#text(owner);
        this.#number('Uint32', moments.length);
        moments.forEach((each, i) => this.#tensor(`momentum${i}`, each, ` of ${owner}`));
      }
    }
    for (const wanted of KINDS) {
      const count = this.#room(4); // known at the end: a copy of the entries would take memory
      let found = 0;
      for (const [name, { kind, value }] of properties) {
        if (kind !== wanted) continue;
        found += 1;
        this.#text(name);
        if (typeof value === 'string') this.#text(value);
        else if (typeof value === 'bigint') this.#int64(value);
        else if (bits.has(name)) this.#number('Uint32', bits.get(name)!);
        else this.#number('Float32', value);
      }
      this.#numbers.setUint32(count, found, true);
    }
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

  /** A number of 32 bits; a negative zero is a zero. */
  #number(kind: 'Uint32' | 'Int32' | 'Float32', value: number): void {
    const at = this.#room(4);
    this.#numbers[`set${kind}`](at, value + 0, true);
  }

  #int64(value: bigint): void {
    const at = this.#room(8);
    this.#numbers.setBigInt64(at, value, true);
  }

  #text(text: string): void {
    const at = this.#room(4 + 3 * text.length); // as many bytes as it can have
    const { written } = ENCODER.encodeInto(text, this.#bytes.subarray(at + 4));
    this.#numbers.setUint32(at, written, true);
    this.#size = at + 4 + written;
  }

  /** The elements are not copied; in a nominal checkpoint there are none. */
  #tensor(name: string, { dtype, dims, data }: Stored, owner = ''): void {
    const { nominal } = this.data;
    this.#text(name);
    this.#number('Int32', CODES[dtype]);
    const shape = nominal ? [] : dims;
    this.#number('Uint32', shape.length);
    for (const size of shape) this.#int64(BigInt(size));
    this.names.push(name + owner);
    this.#digests.push(this.#room(32));
    this.#elements.push(nominal ? NOTHING : data);
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

export function hex(digest: Uint8Array): string {
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
