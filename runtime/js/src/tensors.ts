/** Element types, tensors in memory, and where each lies inside one flat buffer. */
import { demand, fail } from './errors.js';

export type TypedArray =
  | Float32Array | Float64Array | Uint8Array | Int8Array | Uint16Array | Int16Array
  | Int32Array | Uint32Array | BigInt64Array | BigUint64Array;

/** Array of every element type; float16 as bits, bool as bytes. */
export const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
} as const;

export type DType = keyof typeof ARRAYS;

/** onnx.TensorProto.DataType */
export const CODES: Record<DType, number> = {
  float32: 1, uint8: 2, int8: 3, uint16: 4, int16: 5, int32: 6, int64: 7, bool: 9,
  float16: 10, float64: 11, uint32: 12, uint64: 13,
};
export const DTYPES = new Map(Object.entries(CODES).map(([name, code]) => [code, name as DType]));

export type Dims = readonly number[];

/** A tensor in memory; `data` in row-major order. */
export interface Stored {
  readonly dtype: DType;
  readonly dims: Dims;
  readonly data: TypedArray;
}

/** The place of one tensor: `offset` and `nbytes` in bytes from the buffer's start. */
export interface Slot {
  readonly name: string;
  readonly dtype: DType;
  readonly dims: Dims;
  readonly offset: number;
  readonly nbytes: number;
}

export interface Layout {
  readonly slots: readonly Slot[];
  readonly nbytes: number;
}

export const ALIGNMENT = 64;

export function aligned(nbytes: number): number {
  return Math.ceil(nbytes / ALIGNMENT) * ALIGNMENT;
}

export function product(dims: Dims): number {
  return dims.includes(0) ? 0 : dims.reduce((size, dim) => size * dim, 1);
}

/** Take memory of a size that comes from outside: `code` if there is none. */
export function allocating<T>(code: string, what: string, take: () => T): T {
  try {
    return take();
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return fail(code, `There is no memory for ${what}.`, '', 'use a smaller package or batch',
      error);
  }
}

/** Values by names that come from outside, of which one may be `__proto__`: no prototype. */
export function byName<T>(entries: Iterable<readonly [string, T]> = []): Record<string, T> {
  const found = Object.create(null) as Record<string, T>;
  for (const [name, value] of entries) found[name] = value;
  return found;
}

/** Lay tensors one after the other, each at a multiple of 64 bytes; the gaps hold zeros. */
export function pack(tensors: Iterable<{ name: string; dtype: DType; dims: Dims }>): Layout {
  const slots: Slot[] = [];
  let offset = 0;
  for (const { name, dtype, dims } of tensors) {
    const nbytes = product(dims) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    slots.push({ name, dtype, dims, offset, nbytes });
    offset = aligned(offset + nbytes);
  }
  return { slots, nbytes: offset };
}

/** A typed array over `nbytes` bytes of a buffer: no copy. */
export function view(
  buffer: ArrayBufferLike, dtype: DType, offset: number, nbytes: number,
): TypedArray {
  const size = nbytes / ARRAYS[dtype].BYTES_PER_ELEMENT;
  return new ARRAYS[dtype](buffer as ArrayBuffer, offset, size);
}

export function bytesOf(array: ArrayBufferView): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

export function sameDims(a: Dims, b: Dims): boolean {
  return a.length === b.length && a.every((size, axis) => size === b[axis]);
}

/** Throw `parameter-type` unless a vector of `wanted` holds every value of type `have`. */
export function requireFits(have: DType, wanted: DType): void {
  const [own, other] = [ARRAYS[have], ARRAYS[wanted]].map((array) => array.BYTES_PER_ELEMENT);
  demand(have.startsWith('float') && own! <= other!, 'parameter-type',
    `A parameter does not fit into a vector of ${wanted} throughout.`, '',
    'pass trainableOnly = true');
}

export function join(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
