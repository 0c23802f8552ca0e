/**
 * Reads flatbuffers that nobody has verified: every offset and length is checked against the
 * size before it is used, and no table counts twice, so a damaged or hostile file ends in an error
 * and never in a wild read, an endless loop or an allocation larger than the file. The format is
 * described at https://flatbuffers.dev/internals/.
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
const BLOCK = 2 ** 14; // bytes that are read at once, for numbers and short texts
const SHORT = 256; // bytes of a text that is worth no decoder
const DECODER = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

export function inMemory(bytes: Uint8Array): Bytes {
  return { size: bytes.length, read: (at, length) => bytes.subarray(at, at + length) };
}

export class Source {
  readonly #seen = new Map<number, Uint8Array>(); // where tables begin, as bits, by block
  #tables = 0;
  readonly #blocks = new Map<number, DataView>(); // by where they begin; together one file at most
  #last = -1;
  #view: DataView = new DataView(new ArrayBuffer(0));
  #tableBytes = 0;
  #text = 0;

  constructor(
    readonly bytes: Bytes, readonly where: string, limit = MAX_SIZE,
    readonly what: 'checkpoint' | 'adapter' = 'checkpoint',
  ) {
    if (bytes.size > limit) this.fail(`it has ${bytes.size} bytes, and ${limit} are allowed`);
  }

  fail(problem: string): never {
    const code = this.what === 'adapter' ? 'adapter-corrupt' : 'checkpoint-corrupt';
    throw new OdtpackError(code,
      `${this.where} is not a readable ${this.what}: ${problem}.`, this.where,
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

  /** Lets `#view` hold some bytes, and returns where in it they begin: files are read in blocks. */
  #seek(position: number, length: number): number {
    this.check(position, length);
    const start = position - (position % BLOCK);
    if (start === this.#last && position + length <= start + BLOCK) return position - start;
    if (position + length > start + BLOCK) {
      this.#view = asView(this.read(position, length));
      this.#last = -1;
      return 0;
    }
    this.#view = this.#blocks.get(start) ??
      asView(this.read(start, Math.min(BLOCK, this.bytes.size - start)));
    this.#blocks.set(start, this.#view);
    this.#last = start;
    return position - start;
  }

  uint8(position: number): number {
    const at = this.#seek(position, 1);
    return this.#view.getUint8(at);
  }

  uint16(position: number): number {
    const at = this.#seek(position, 2);
    return this.#view.getUint16(at, true);
  }

  int32(position: number): number {
    const at = this.#seek(position, 4);
    return this.#view.getInt32(at, true);
  }

  uint32(position: number): number {
    const at = this.#seek(position, 4);
    return this.#view.getUint32(at, true);
  }

  float32(position: number): number {
    const at = this.#seek(position, 4);
    return this.#view.getFloat32(at, true);
  }

  int64(position: number): bigint {
    const at = this.#seek(position, 8);
    return this.#view.getBigInt64(at, true);
  }

  /** A table that something refers to, for the first time. */
  table(position: number): Table {
    if (this.#tables++ === MAX_TABLES) this.fail(`it holds more than ${MAX_TABLES} tables`);
    if (this.#occurs(position)) this.fail(`the table at ${position} occurs twice`);
    const table = new Table(this, position);
    if ((this.#tableBytes += table.size) > this.bytes.size) this.fail('its tables overlap');
    return table;
  }

  /** The table that the offset at `slot` leads to. */
  follow(slot: number): Table {
    return this.table(slot + this.uint32(slot));
  }

  /** Whether it was asked for this position before. */
  #occurs(position: number): boolean {
    const at = position % BLOCK;
    const start = position - at;
    const bits = this.#seen.get(start) ?? new Uint8Array(BLOCK / 8);
    this.#seen.set(start, bits);
    const bit = 1 << (at & 7);
    const before = bits[at >> 3]! & bit;
    bits[at >> 3]! |= bit;
    return before !== 0;
  }

  text(position: number, length: number): string {
    this.check(position, length + 1); // a zero byte ends it
    this.#text += length;
    if (this.#text > this.bytes.size) this.fail('its strings overlap');
    if (this.uint8(position + length)) this.fail(`the text at ${position} does not end`);
    const at = this.#seek(position, length);
    if (length <= SHORT) {
      const codes: number[] = [];
      for (let i = 0; i < length; i++) codes.push(this.#view.getUint8(at + i));
      if (codes.every((code) => code < 0x80)) return String.fromCharCode(...codes);
    }
    const { buffer, byteOffset } = this.#view;
    try {
      return DECODER.decode(new Uint8Array(buffer, byteOffset + at, length).slice());
    } catch {
      return this.fail(`the text at ${position} is not UTF-8`);
    }
  }

  root(identifier: string): Table {
    if (this.bytes.size < 8) this.fail(`it has ${this.bytes.size} bytes`);
    if (String.fromCharCode(...this.read(4, 4)) !== identifier) {
      this.fail(`it does not carry the identifier ${identifier}`);
    }
    return this.table(this.uint32(0));
  }
}

function asView(bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

/** The tables of a vector, which are read one after the other. */
export class Tables {
  constructor(readonly source: Source, readonly position: number, readonly length: number) {}

  *[Symbol.iterator](): Iterator<Table> {
    for (let i = 0; i < this.length; i++) yield this.source.follow(this.position + 4 * i);
  }
}

/** A table; fields are addressed by their number in the schema. */
export class Table {
  /** How many fields the vtable has room for. */
  readonly fields: number;
  readonly #vtable: number;
  readonly size: number;

  constructor(readonly source: Source, readonly position: number) {
    const vtable = (this.#vtable = position - source.int32(position));
    const vtableSize = source.uint16(vtable);
    this.size = source.uint16(vtable + 2);
    if (vtableSize < 4 || vtableSize % 2 || this.size < 4) {
      source.fail(`the table at ${position} has a malformed vtable`);
    }
    source.check(position, this.size);
    source.check(vtable, vtableSize);
    this.fields = Math.min(vtableSize / 2 - 2, MAX_FIELDS);
  }

  /** Position of a field of `width` bytes; undefined if it is absent. */
  field(number: number, width: number): number | undefined {
    const offset = number < this.fields ? this.source.uint16(this.#vtable + 4 + 2 * number) : 0;
    if (offset === 0) return undefined;
    if (offset < 4 || offset + width > this.size) {
      this.source.fail(`a field of the table at ${this.position} lies outside the table`);
    }
    return this.position + offset;
  }

  int32(number: number): number {
    const at = this.field(number, 4);
    return at === undefined ? 0 : this.source.int32(at);
  }

  int64(number: number, absent = 0n): bigint {
    const at = this.field(number, 8);
    return at === undefined ? absent : this.source.int64(at);
  }

  uint32(number: number): number {
    const at = this.field(number, 4);
    return at === undefined ? 0 : this.source.uint32(at);
  }

  float32(number: number): number {
    const at = this.field(number, 4);
    return at === undefined ? 0 : this.source.float32(at);
  }

  boolean(number: number): boolean {
    const at = this.field(number, 1);
    return at !== undefined && this.source.uint8(at) !== 0;
  }

  /** Where a vector of elements of `width` bytes lies; undefined if it is absent. */
  vector(number: number, width: number): { position: number; length: number } | undefined {
    const slot = this.field(number, 4);
    if (slot === undefined) return undefined;
    const position = slot + this.source.uint32(slot);
    const length = this.source.uint32(position);
    this.source.check(position + 4, length * width);
    return { position: position + 4, length };
  }

  string(number: number): string {
    const found = this.vector(number, 1);
    return found ? this.source.text(found.position, found.length) : '';
  }

  /** Numbers of 64 bits, as near as a number of JavaScript comes. */
  int64s(number: number, limit: number): number[] {
    const found = this.vector(number, 8);
    if (!found) return [];
    if (found.length > limit) {
      this.source.fail(`the vector at ${found.position} has more than ${limit} elements`);
    }
    const { position, length } = found;
    const all = new Array<number>(length); // of that size and no larger: there may be many
    for (let i = 0; i < length; i++) {
      const at = position + 8 * i;
      all[i] = this.source.int32(at + 4) * 2 ** 32 + this.source.uint32(at);
    }
    return all;
  }

  table(number: number): Table | undefined {
    const slot = this.field(number, 4);
    return slot === undefined ? undefined : this.source.follow(slot);
  }

  tables(number: number): Tables {
    const { position, length } = this.vector(number, 4) ?? { position: 0, length: 0 };
    return new Tables(this.source, position, length);
  }
}
