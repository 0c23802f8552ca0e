/**
 * Writes flatbuffers, and reads unverified ones: every offset and length is checked against the
 * size before it is used, and no table counts twice, so a damaged or hostile file ends in an error
 * and never in a wild read, an endless loop or an allocation larger than the file. The format is
 * described at https://flatbuffers.dev/internals/.
 */
import { Builder, type Offset } from 'flatbuffers';
import { fail } from './errors.js';
import type { Bytes } from './platform.js';

const MAX_SIZE = 2 ** 31 - 1;
const MAX_TABLES = 1_000_000;
const MAX_FIELDS = 32;
const BLOCK = 2 ** 14; // bytes that are read at once, for numbers and short texts
const DECODER = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** A kind of number: its bytes, and how a view reads it. */
type Kind<T> = readonly [width: number, read: (view: DataView, at: number) => T];
export const UINT8: Kind<number> = [1, (view, at) => view.getUint8(at)];
export const UINT16: Kind<number> = [2, (view, at) => view.getUint16(at, true)];
export const INT32: Kind<number> = [4, (view, at) => view.getInt32(at, true)];
export const UINT32: Kind<number> = [4, (view, at) => view.getUint32(at, true)];
export const FLOAT32: Kind<number> = [4, (view, at) => view.getFloat32(at, true)];
export const INT64: Kind<bigint> = [8, (view, at) => view.getBigInt64(at, true)];

/** A field that is written: its kind, its value, and the value that it need not be written for. */
type Field =
  | readonly ['Offset' | 'Int8' | 'Int32' | 'Float32', number]
  | readonly ['Int64', bigint, bigint?];

/** Writes tables and vectors, of offsets of what was written before. */
export class Writer extends Builder {
  table(...fields: readonly (Field | undefined)[]): Offset {
    this.startObject(fields.length);
    for (const [number, field] of fields.entries()) {
      if (field?.[0] === 'Int64') this.addFieldInt64(number, field[1], field[2] ?? 0n);
      else if (field) this[`addField${field[0]}`](number, field[1], 0);
    }
    return this.endObject();
  }

  offsets(all: readonly Offset[], width = 4): Offset {
    this.startVector(width, all.length, 4);
    for (const offset of all.toReversed()) this.addOffset(offset);
    return this.endVector();
  }

  int64s(numbers: readonly number[]): Offset {
    this.startVector(8, numbers.length, 8);
    for (const number of numbers.toReversed()) this.addInt64(BigInt(number));
    return this.endVector();
  }
}

export class Source {
  readonly #tables = new Set<number>(); // where they begin
  readonly #blocks = new Map<number, DataView>(); // by where they begin; together one file at most
  #view: DataView = new DataView(new ArrayBuffer(0));
  #tableBytes = 0;
  #text = 0;
  #elements = 0;

  constructor(
    readonly bytes: Bytes, readonly where: string, limit = MAX_SIZE,
    readonly kind: 'checkpoint' | 'adapter' = 'checkpoint',
  ) {
    if (bytes.size > limit) this.fail(`it has ${bytes.size} bytes, and ${limit} are allowed`);
  }

  fail(problem: string): never {
    fail(`${this.kind}-corrupt`, `${this.where} is not a readable ${this.kind}: ${problem}.`,
      this.where, 'copy or download the file again, or fall back to an earlier one');
  }

  /** Fail unless something holds. The message is made in any case: not for long loops. */
  demand(holds: unknown, problem: string): asserts holds {
    if (!holds) this.fail(problem);
  }

  check(position: number, length: number): void {
    if (position >= 0 && length >= 0 && position + length <= this.bytes.size) return;
    this.fail(`${length} bytes at ${position} lie outside its ${this.bytes.size} bytes`);
  }

  read(position: number, length: number): Uint8Array {
    this.check(position, length);
    const data = this.bytes.read(position, length);
    if (data.length !== length) this.fail('it became shorter while it was read');
    return data;
  }

  /** Elements of a tensor: all of them together are no more than there are bytes. */
  elements(position: number, length: number): Uint8Array {
    if ((this.#elements += length) > this.bytes.size) this.fail('its tensors overlap');
    return this.read(position, length);
  }

  /** Lets `#view` hold some bytes, and returns where in it they begin: files are read in blocks. */
  #seek(position: number, length: number): number {
    this.check(position, length);
    const at = position % BLOCK;
    const start = position - at;
    if (at + length > BLOCK) {
      this.#view = asView(this.read(position, length));
      return 0;
    }
    this.#view = this.#blocks.get(start) ??
      asView(this.read(start, Math.min(BLOCK, this.bytes.size - start)));
    this.#blocks.set(start, this.#view);
    return at;
  }

  number<T>([width, read]: Kind<T>, position: number): T {
    const at = this.#seek(position, width);
    return read(this.#view, at);
  }

  /** A table that something refers to, for the first time. */
  table(position: number): Table {
    if (this.#tables.size === MAX_TABLES) this.fail(`it holds more than ${MAX_TABLES} tables`);
    if (this.#tables.has(position)) this.fail(`the table at ${position} occurs twice`);
    this.#tables.add(position);
    const table = new Table(this, position);
    if ((this.#tableBytes += table.size) > this.bytes.size) this.fail('its tables overlap');
    return table;
  }

  /** The table that the offset at `slot` leads to. */
  follow(slot: number): Table {
    return this.table(slot + this.number(UINT32, slot));
  }

  text(position: number, length: number): string {
    this.check(position, length + 1); // a zero byte ends it
    this.#text += length;
    if (this.#text > this.bytes.size) this.fail('its strings overlap');
    if (this.number(UINT8, position + length)) this.fail(`the text at ${position} does not end`);
    const at = this.#seek(position, length);
    const { buffer, byteOffset } = this.#view;
    try {
      return DECODER.decode(new Uint8Array(buffer, byteOffset + at, length).slice());
    } catch {
      return this.fail(`the text at ${position} is not UTF-8`);
    }
  }

  root(identifier: string): Table {
    if (this.bytes.size < 8) this.fail(`it has ${this.bytes.size} bytes`);
    this.demand(String.fromCharCode(...this.read(4, 4)) === identifier,
      `it does not carry the identifier ${identifier}`);
    return this.table(this.number(UINT32, 0));
  }
}

function asView(bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

/** A table; fields are addressed by their number in the schema. */
export class Table {
  /** How many fields the vtable has room for. */
  readonly fields: number;
  readonly #vtable: number;
  readonly size: number;

  constructor(readonly source: Source, readonly position: number) {
    const vtable = (this.#vtable = position - source.number(INT32, position));
    const vtableSize = source.number(UINT16, vtable);
    this.size = source.number(UINT16, vtable + 2);
    if (vtableSize < 4 || vtableSize % 2 || this.size < 4) {
      source.fail(`the table at ${position} has a malformed vtable`);
    }
    source.check(position, this.size);
    source.check(vtable, vtableSize);
    this.fields = Math.min(vtableSize / 2 - 2, MAX_FIELDS);
  }

  /** Position of a field of `width` bytes; undefined if it is absent. */
  field(number: number, width: number): number | undefined {
    if (number >= this.fields) return undefined;
    const offset = this.source.number(UINT16, this.#vtable + 4 + 2 * number);
    if (offset === 0) return undefined;
    if (offset < 4 || offset + width > this.size) {
      this.source.fail(`a field of the table at ${this.position} lies outside the table`);
    }
    return this.position + offset;
  }

  number<T>(kind: Kind<T>, number: number, absent: T): T {
    const at = this.field(number, kind[0]);
    return at === undefined ? absent : this.source.number(kind, at);
  }

  boolean(number: number): boolean {
    return this.number(UINT8, number, 0) !== 0;
  }

  /** Where a vector of elements of `width` bytes lies; undefined if it is absent. */
  vector(number: number, width: number): { position: number; length: number } | undefined {
    const slot = this.field(number, 4);
    if (slot === undefined) return undefined;
    const position = slot + this.source.number(UINT32, slot);
    const length = this.source.number(UINT32, position);
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
    const all = new Array<number>(found.length); // of that size and no larger: there may be many
    for (let i = 0; i < all.length; i++) {
      all[i] = Number(this.source.number(INT64, found.position + 8 * i));
    }
    return all;
  }

  table(number: number): Table | undefined {
    const slot = this.field(number, 4);
    return slot === undefined ? undefined : this.source.follow(slot);
  }

  /** The tables of a vector, which are read one after the other. */
  *tables(number: number): Generator<Table> {
    const { position, length } = this.vector(number, 4) ?? { position: 0, length: 0 };
    for (let i = 0; i < length; i++) yield this.source.follow(position + 4 * i);
  }
}
