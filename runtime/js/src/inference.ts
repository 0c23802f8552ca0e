/** A trained inference model: the package's template, followed by the parameters. */
import type { CheckpointState } from './checkpoint.js';
import { demand, fail } from './errors.js';
import type { Manifest, ParameterInfo } from './manifest.js';
import { bytesOf, CODES, type DType, product, type Stored, type TypedArray } from './tensors.js';

const MAX_BYTES = 2 ** 31 - 2 ** 20;
const INFINITE = 65520; // the least number that float16 rounds to infinity

/** Protobuf merges messages that are concatenated, so the parts together are one ONNX model. */
export function inferenceModel(
  manifest: Manifest, template: Uint8Array, state: CheckpointState, outputs?: readonly string[],
): Uint8Array[] {
  const parts = [outputs ? withOutputs(template, outputs) : template];
  const known = new Map(manifest.parameters.map((each) => [each.name, each]));
  for (const name of manifest.inference?.parameters ?? []) {
    const info = known.get(name)!;
    const { dtype, dims, data } = exported(info, state);
    const label = new TextEncoder().encode(name);
    const bytes = bytesOf(data);
    const head = Uint8Array.from([
      ...dims.flatMap((size) => [0x08, ...varint(size)]), 0x10, CODES[dtype],
      0x42, ...varint(label.length), ...label, 0x4a, ...varint(bytes.length),
    ]);
    const tensor = head.length + bytes.length;
    const initializer = [0x2a, ...varint(tensor)];
    const length = varint(initializer.length + tensor);
    parts.push(Uint8Array.from([GRAPH, ...length, ...initializer]), head, bytes);
  }
  const size = parts.reduce((sum, part) => sum + part.length, 0);
  demand(size <= MAX_BYTES, 'model-too-large',
    `The model would have ${size} bytes, and ${MAX_BYTES} are allowed.`);
  return parts;
}

/** The value of a parameter in the type in which the inference model holds it. */
function exported(info: ParameterInfo, state: CheckpointState): Stored {
  const { dtype, dims, data } = state.parameters.get(info.name)!;
  if (info.scale !== undefined) {
    const scale = state.parameters.get(info.scale)!;
    const axis = Math.max(scale.dims.findIndex((size) => size !== 1), 0);
    const inner = product(dims.slice(axis + 1));
    const factors = scale.data as Float32Array;
    const scaled = Float32Array.from(data as Int8Array, (value, i) =>
      value * factors[Math.floor(i / inner) % factors.length]!);
    return { dtype: 'float32', dims, data: scaled };
  }
  const target: DType = info.model_dtype ?? dtype;
  demand(target === dtype || [target, dtype].every((each) => each.startsWith('float')),
    'parameter-type', `'${info.name}' cannot be converted from ${dtype} to ${target}.`);
  return { dtype: target, dims, data: converted({ dtype, data }, target, `'${info.name}'`) };
}

/**
 * Real numbers as those of another type; an array that has it already stays.
 *
 * @throws OdtpackError `value-out-of-range` if a finite number would be infinite in float16.
 */
export function converted(
  { dtype, data }: Pick<Stored, 'dtype' | 'data'>, wanted: DType, name = 'A parameter',
): TypedArray {
  if (dtype === wanted) return data;
  const wide = dtype === 'float16' ? widen(data as Uint16Array) : (data as Float32Array);
  if (wanted === 'float16') {
    const lost = wide.find((value) => Number.isFinite(value) && Math.abs(value) >= INFINITE);
    demand(lost === undefined, 'value-out-of-range',
      `${name} holds ${lost}, which float16 cannot.`, '',
      'train with a lower learning rate, or from a float32 model');
    return Uint16Array.from(wide, float16Bits);
  }
  if (wanted === 'float64') return Float64Array.from(wide);
  return dtype === 'float16' ? wide : Float32Array.from(wide);
}

/** float16 as bits to float32, exactly. */
export function widen(data: Uint16Array): Float32Array {
  return Float32Array.from(data, (bits) => {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const size =
      exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? (1024 + fraction) * 2 ** (exponent - 25)
      : fraction * 2 ** -24;
    return bits & 0x8000 ? -size : size;
  });
}

/** A float32 as bits of float16, rounded to the nearest, ties to even. */
export function float16Bits(value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= INFINITE) return sign | 0x7c00;
  // In units of the last place: below 2^-14 that of the subnormals.
  const exponent = Math.max(Math.floor(Math.log2(size || 2 ** -24)), -14);
  const units = size * 2 ** (10 - exponent);
  let rounded = Math.floor(units);
  const rest = units - rounded;
  if (rest > 0.5 || (rest === 0.5 && rounded % 2)) rounded += 1;
  return sign | (((exponent + 14) << 10) + rounded);
}

export function varint(value: number): number[] {
  const bytes: number[] = [];
  while (value >= 128) {
    bytes.push((value % 128) | 128);
    value = Math.floor(value / 128);
  }
  return [...bytes, value];
}

/** A field of a protobuf message: its tag, where it begins, its content begins, and it ends. */
type Field = { tag: number; start: number; body: number; end: number };

function* fields(bytes: Uint8Array): Generator<Field> {
  let at = 0;
  const number = (): number => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[at++];
      if (byte === undefined || scale > 2 ** 42) return notAMessage();
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const start = at;
    const tag = number();
    const kind = tag % 8;
    if (kind === 0) number();
    else if (kind === 1) at += 8;
    else if (kind === 5) at += 4;
    const size = kind === 2 ? number() : 0;
    const body = at;
    at += size;
    if (at > bytes.length || ![0, 1, 2, 5].includes(kind)) notAMessage();
    yield { tag, start, body, end: at };
  }
}

function notAMessage(): never {
  fail('package-changed', 'The inference template is not a protobuf message.');
}

const DECODER = new TextDecoder();
const [GRAPH, OUTPUT, NAME] = [0x3a, 0x62, 0x0a];
const [INITIALIZER, INITIALIZER_NAME] = [0x2a, 0x42];

/** The template with these outputs only. */
function withOutputs(template: Uint8Array, wanted: readonly string[]): Uint8Array {
  demand(wanted.length && new Set(wanted).size === wanted.length, 'no-outputs',
    'Pass a list of outputs: at least one, and each once.');
  const left = new Set(wanted);
  const found = filtered(template, (tag, content) =>
    tag !== OUTPUT || left.delete(nameOf(content, NAME)));
  if (left.size) fail('unknown-output', `The inference model has no output '${[...left][0]}'.`);
  return found;
}

/** A model in which these inputs have no values of their own. */
export function withoutInitializers(model: Uint8Array, names: ReadonlySet<string>): Uint8Array {
  return filtered(model, (tag, content) =>
    tag !== INITIALIZER || !names.has(nameOf(content, INITIALIZER_NAME)));
}

/** A model with the fields of its graph that are kept. */
function filtered(
  template: Uint8Array, keeps: (tag: number, content: Uint8Array) => boolean,
): Uint8Array {
  const copy = new Uint8Array(template.length); // without a field it is not longer
  let size = 0;
  const keep = (bytes: Uint8Array, start: number, end: number): void => {
    copy.set(bytes.subarray(start, end), size);
    size += end - start;
  };
  for (const { tag, start, body, end } of fields(template)) {
    if (tag !== GRAPH) {
      keep(template, start, end);
      continue;
    }
    const graph = template.subarray(body, end);
    const begin = size;
    const content = (size += body - start); // its length, known at the end, takes no more
    for (const field of fields(graph)) {
      if (keeps(field.tag, graph.subarray(field.body, field.end))) {
        keep(graph, field.start, field.end);
      }
    }
    const head = [GRAPH, ...varint(size - content)];
    copy.copyWithin(begin + head.length, content, size);
    copy.set(head, begin);
    size += begin + head.length - content;
  }
  return copy.subarray(0, size);
}

function nameOf(message: Uint8Array, wanted: number): string {
  for (const { tag, body, end } of fields(message)) {
    if (tag === wanted) return DECODER.decode(message.subarray(body, end));
  }
  return '';
}
