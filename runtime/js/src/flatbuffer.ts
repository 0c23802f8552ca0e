/**
 * Reads flatbuffers that nobody has verified: every offset and length is checked against the
 * size before it is used, so a damaged or hostile file ends in an error and never in a wild
 * read, an endless loop or an allocation larger than the file. The format is described at
 * https://flatbuffers.dev/internals/.
 */
import { OdtpackError } from './errors.js';

/** Random access to a file or to memory; `read` may return a view of shared memory. */
export interface Bytes {
  readonly size: number;
  read(position: number, length: number): Uint8Array;
}

const MAX_SIZE = 2 ** 31 - 1;
const MAX_TABLES = 1_000_000;
const MAX_FIELDS = 32;

export function inMemory(bytes: Uint8Array): Bytes {
  return { size: bytes.length, read: (at, length) => bytes.subarray(at, at + length) };
}

export class Source {
  #tables = 0;
  #text = 0;

  constructor(readonly bytes: Bytes, readonly where: string, limit = MAX_SIZE) {
    if (bytes.size > limit) this.fail(`it has ${bytes.size} bytes, and ${limit} are allowed`);
  }

  fail(problem: string): never {
    throw new OdtpackError('checkpoint-corrupt',
      `${this.where} is not a readable checkpoint: ${problem}.`, this.where,
      'copy or download the file again, or fall back to an earlier one');
  }

  check(position: number, length: number): void {
    if (position < 0 || length < 0 || position + length > this.bytes.size) {
      this.fail(`${length} bytes at ${position} lie outside its ${this.bytes.size} bytes`);
    }
  }

  read(position: number, length: number): Uint8Array {
    this.check(position, length);
    const data = this.bytes.read(position, length);
    if (data.length !== length) this.fail('it became shorter while it was read');
    return data;
  }

  view(position: number, length: number): DataView {
    const data = this.read(position, length);
    return new DataView(data.buffer, data.byteOffset, length);
  }

  offset(position: number): number {
    return this.view(position, 4).getUint32(0, true);
  }

  countTable(): void {
    if (++this.#tables > MAX_TABLES) this.fail(`it holds more than ${MAX_TABLES} tables`);
  }

  text(position: number, length: number): string {
    this.check(position, length + 1); // a zero byte ends it
    this.#text += length;
    if (this.#text > this.bytes.size) this.fail('its strings overlap');
    try {
      return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(
        this.read(position, length).slice(),
      );
    } catch (error) {
      if (error instanceof OdtpackError) throw error;
      return this.fail(`the text at ${position} is not UTF-8`);
    }
  }

  root(identifier: string): Table {
    if (this.bytes.size < 8) this.fail(`it has ${this.bytes.size} bytes`);
    if (String.fromCharCode(...this.read(4, 4)) !== identifier) {
      this.fail(`it does not carry the identifier ${identifier}`);
    }
    return new Table(this, this.offset(0));
  }
}

/** A table; fields are addressed by their number in the schema. */
export class Table {
  readonly #fields: number[] = [];
  readonly #size: number;

  constructor(readonly source: Source, readonly position: number) {
    source.countTable();
    const vtable = position - source.view(position, 4).getInt32(0, true);
    const head = source.view(vtable, 4);
    const vtableSize = head.getUint16(0, true);
    this.#size = head.getUint16(2, true);
    if (vtableSize < 4 || vtableSize % 2 || this.#size < 4) {
      source.fail(`the table at ${position} has a malformed vtable`);
    }
    source.check(position, this.#size);
    source.check(vtable, vtableSize);
    const count = Math.min(vtableSize / 2 - 2, MAX_FIELDS);
    const fields = source.view(vtable + 4, 2 * count);
    for (let i = 0; i < count; i++) this.#fields.push(fields.getUint16(2 * i, true));
  }

  /** Position of a field of `width` bytes; undefined if it is absent. */
  field(number: number, width: number): number | undefined {
    const offset = this.#fields[number] ?? 0;
    if (offset === 0) return undefined;
    if (offset < 4 || offset + width > this.#size) {
      this.source.fail(`a field of the table at ${this.position} lies outside the table`);
    }
    return this.position + offset;
  }

  #number<T>(number: number, width: number, absent: T, read: (view: DataView) => T): T {
    const at = this.field(number, width);
    return at === undefined ? absent : read(this.source.view(at, width));
  }

  int32(number: number): number {
    return this.#number(number, 4, 0, (at) => at.getInt32(0, true));
  }

  int64(number: number, absent = 0n): bigint {
    return this.#number(number, 8, absent, (at) => at.getBigInt64(0, true));
  }

  uint32(number: number): number {
    return this.#number(number, 4, 0, (at) => at.getUint32(0, true));
  }

  float32(number: number): number {
    return this.#number(number, 4, 0, (at) => at.getFloat32(0, true));
  }

  boolean(number: number): boolean {
    return this.#number(number, 1, false, (at) => at.getUint8(0) !== 0);
  }

  /** Where a vector of elements of `width` bytes lies; undefined if it is absent. */
  vector(number: number, width: number): { position: number; length: number } | undefined {
    const slot = this.field(number, 4);
    if (slot === undefined) return undefined;
    const position = slot + this.source.offset(slot);
    const length = this.source.offset(position);
    this.source.check(position + 4, length * width);
    return { position: position + 4, length };
  }

  string(number: number): string {
    const found = this.vector(number, 1);
    return found ? this.source.text(found.position, found.length) : '';
  }

  int64s(number: number, limit: number): bigint[] {
    const found = this.vector(number, 8);
    if (!found) return [];
    if (found.length > limit) {
      this.source.fail(`the vector at ${found.position} has more than ${limit} elements`);
    }
    const data = this.source.view(found.position, found.length * 8);
    return Array.from({ length: found.length }, (_, i) => data.getBigInt64(8 * i, true));
  }

  table(number: number): Table | undefined {
    const slot = this.field(number, 4);
    return slot === undefined ? undefined : this.#follow(slot);
  }

  *tables(number: number): Generator<Table> {
    const found = this.vector(number, 4);
    for (let i = 0; i < (found?.length ?? 0); i++) yield this.#follow(found!.position + 4 * i);
  }

  #follow(slot: number): Table {
    return new Table(this.source, slot + this.source.offset(slot));
  }
}
