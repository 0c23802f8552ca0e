/** What a batch must be, and what is taken from its results. */
import type { Tensor } from 'onnxruntime-common';
import { fail, reason, requireArgument } from './errors.js';
import { widen } from './inference.js';
import { evaluationOutputs, type InputInfo, type Manifest } from './manifest.js';
import type { OnnxRuntime } from './platform.js';
import { type Feeds, tensorOver, writesInPlace } from './runtime.js';
import { isRecord } from './json.js';
import { allocating, ARRAYS, byName, type DType, product, type TypedArray } from './tensors.js';
import type { Batch } from './worker_calls.js';

/** A batch as the caller gave it, of which nothing but its own names count. */
export function batchOf(given: Batch): Feeds {
  if (isRecord(given)) return byName(Object.entries(given as Feeds));
  return fail('input-count', 'A batch is an object that has tensors by name.');
}

function isTensor(value: unknown): boolean {
  return isRecord(value) && typeof value['type'] === 'string' && Array.isArray(value['dims']);
}

/**
 * Check a batch against the inputs of the model, as Python does, with the same codes. Objects that
 * only have what a tensor consists of become tensors, if ONNX Runtime is given.
 */
export function checkBatch(specs: readonly InputInfo[], feeds: Feeds, ort?: OnnxRuntime): void {
  const missing = specs.find(({ name }) => feeds[name] === undefined);
  const odd = Object.keys(feeds).find((key) => !specs.some(({ name }) => name === key));
  if (missing || odd !== undefined) {
    fail('input-count',
      missing ? `The batch lacks the input '${missing.name}'.` : `The model has no input '${odd}'.`,
      '', `pass ${specs.map(describe).join(', ')}`);
  }
  const sizes = new Map<string, { size: number; owner: string }>();
  for (const spec of specs) {
    const refuse = (code: string, problem: string, hint = `it must be ${describe(spec)}`): never =>
      fail(code, `Input '${spec.name}' ${problem}.`, '', hint);
    if (!isTensor(feeds[spec.name])) refuse('input-type', 'is not a tensor');
    const given = feeds[spec.name]!;
    const { type, dims } = given;
    if (given.location === 'none') refuse('input-type', 'was disposed of');
    if (type !== spec.dtype) refuse('input-type', `has elements of ${type}`);
    const fits = spec.shape.every((size, axis) => typeof size !== 'number' || size === dims[axis]);
    if (spec.shape.length && (dims.length !== spec.shape.length || !fits)) {
      refuse('input-shape', `has the shape [${dims}]`);
    }
    const isPlain = !('location' in given);
    if (ort && (isPlain || given.location === 'cpu')) {
      const { data } = given as Tensor;
      const size = data?.length;
      if (size !== product(dims)) {
        refuse('input-shape', `has ${size ?? 'no'} elements for [${dims}]`, size === 0
          ? 'an array that was transferred to a worker has none: pass a copy, array.slice()'
          : undefined);
      }
      const buffer = String((data as TypedArray).buffer);
      if (writesInPlace(ort) && buffer === '[object SharedArrayBuffer]') {
        refuse('input-type', 'lies in a SharedArrayBuffer, which ONNX Runtime cannot read in Node',
          'pass a copy: array.slice()');
      }
      const [own, wanted] = [arrayName(data), ARRAYS[type as DType]?.name];
      const other = { float16: 'Float16Array', uint8: 'Uint8ClampedArray' }[type as string];
      if (isPlain && own !== undefined && own !== wanted && own !== other) {
        refuse('input-type', `has ${own} data`, `pass ${wanted} data`);
      }
      try {
        if (isPlain) feeds[spec.name] = tensorOver(ort, type as DType, data as TypedArray, dims);
      } catch (error) {
        refuse('input-type', `is not a tensor: ${reason(error).replace(/\.$/, '')}`);
      }
    }
    for (const [axis, dim] of spec.shape.entries()) {
      const size = dims[axis]!;
      if (size === 0 && dim !== 0) refuse('empty-batch', `is empty: its shape is [${dims}]`);
      if (typeof dim !== 'string') continue;
      const known = sizes.get(dim) ?? { size, owner: spec.name };
      sizes.set(dim, known);
      if (known.size !== size) {
        const { size: before, owner } = known;
        refuse('input-sizes-differ', `has ${size} for '${dim}', which is ${before} in '${owner}'`);
      }
    }
  }
  for (const { name, dtype, class_count: classes, ignore_index: ignored } of specs) {
    if (dtype !== 'int64') continue;
    const given = feeds[name]!;
    const isFar = !(given.location ?? 'cpu').startsWith('cpu');
    if (classes !== undefined) {
      if (isFar) {
        fail('input-type',
          `Input '${name}' lies in a ${given.location}, where labels cannot be checked.`, '',
          'pass an array, or what await tensor.getData() gives');
      }
      checkLabels(name, given, classes, ignored);
    }
    if (isFar || (name !== 'input_ids' && name !== 'decoder_input_ids')) continue;
    // ONNX's Gather counts negative ones from the end of its table.
    const token = (given.data as BigInt64Array).find((each) => each < 0);
    if (token === undefined) continue;
    fail('bad-prompt', `Input '${name}' holds ${token}, and tokens are numbered from 0.`, '',
      'pass the numbers that the tokenizer gives: -100 is for labels only');
  }
}

/** The name of an array's class; that of a Buffer's own. */
function arrayName(data: unknown): string | undefined {
  return ArrayBuffer.isView(data) ? (data as TypedArray)[Symbol.toStringTag] : undefined;
}

function describe({ name, dtype, shape }: InputInfo): string {
  return `${name}: ${dtype}[${shape.map((size) => size ?? '?').join(', ')}]`;
}

function checkLabels(
  name: string, labels: Tensor, classes: number, ignored: number | undefined,
): void {
  const data = labels.data as BigInt64Array;
  // Halves of 32 bits, since a BigInt for every label would cost more than a small step.
  const halves = new Int32Array(data.buffer, data.byteOffset, data.length * 2);
  for (let i = 0; i < data.length; i++) {
    const low = halves[2 * i]!;
    const fits = halves[2 * i + 1] === 0 && low >= 0 && low < classes;
    if (fits || (ignored !== undefined && data[i] === BigInt(ignored))) continue;
    fail('label-out-of-range',
      `Input '${name}' holds the label ${data[i]} at element ${i}, and the model's ${classes} ` +
        `classes are numbered 0 to ${classes - 1}.`, '',
      'number the classes from 0, or set ignore_index for labels to skip');
  }
}

/** The batch with zeros for labels and targets that it lacks: what a prediction does not read. */
export function withoutAnswers(ort: OnnxRuntime, specs: readonly InputInfo[], feeds: Feeds): Feeds {
  const sizes = new Map<string, number>();
  for (const { name, shape } of specs) {
    for (const [axis, size] of shape.entries()) {
      const found = feeds[name]?.dims?.[axis];
      if (typeof size === 'string' && found !== undefined) sizes.set(size, found);
    }
  }
  const whole = byName(Object.entries(feeds));
  for (const spec of specs.filter(({ name, role }) => role !== 'data' && !feeds[name])) {
    const dims = spec.shape.map((size) =>
      typeof size === 'number' ? size : sizes.get(size ?? ''));
    if (dims.includes(undefined) || spec.dtype === 'string') continue; // checkBatch names it
    const dtype = spec.dtype as DType;
    const zeros = allocating(
      'input-shape', `the input '${spec.name}'`, () => new ARRAYS[dtype](product(dims as number[])),
    );
    whole[spec.name] = tensorOver(ort, dtype, zeros, dims as number[]);
  }
  return whole;
}

/** The loss as a number, of what a step returned. */
export function lossOf(manifest: Manifest, results: Feeds): number {
  const { name } = manifest.outputs[0]!;
  const loss = isRecord(results) ? results[name] : undefined;
  requireArgument(loss !== undefined, `The results do not hold the loss, '${name}'.`,
    'name it among the outputs that the step is to return');
  return numbersOf(loss)[0]!;
}

/** The numbers of a tensor; those of float16 may come as bits. */
function numbersOf({ type, data }: Tensor): Float32Array {
  const bits = type === 'float16' && data instanceof Uint16Array;
  return bits ? widen(data) : (data as Float32Array);
}

/** Counts right classes of a batch; undefined where the model has no scores for each class. */
export function countRight(
  manifest: Manifest, feeds: Batch, results: Feeds,
): { right: number; counted: number } | undefined {
  const labels = manifest.inputs.find((input) => input.role === 'labels' && input.class_count);
  const scores = evaluationOutputs(manifest).find(
    ({ role, dtype, shape }) =>
      role === 'prediction' && dtype.startsWith('float') &&
      shape.length === (labels?.shape.length ?? 0) + 1 && shape[1] === labels?.class_count,
  );
  if (!labels || !scores) return undefined;
  const truth = feeds[labels.name]!.data as BigInt64Array | Int32Array;
  const found = results[scores.name];
  if (!found) return undefined; // of the evaluation model alone
  const { dims } = found;
  const values = numbersOf(found);
  const classes = dims[1]!;
  const inner = product(dims.slice(2));
  let right = 0;
  let counted = 0;
  for (let i = 0; i < truth.length; i++) {
    const label = Number(truth[i]);
    if (label === labels.ignore_index) continue;
    const start = Math.floor(i / inner) * classes * inner + (i % inner);
    let best = 0;
    for (let c = 1; c < classes; c++) {
      // As numpy: of equal ones the first, and NaN before all others.
      const most = values[start + best * inner]!;
      if (!(values[start + c * inner]! <= most) && !Number.isNaN(most)) best = c;
    }
    counted += 1;
    right += Number(best === label);
  }
  return { right, counted };
}
