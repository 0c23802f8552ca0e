/**
 * The manifest: what a kit reads of it, checked. Keys that it does not read are ignored, but those
 * of `session`, which goes to ONNX Runtime: none but odtpack's own may stand there.
 */
import { fail } from './errors.js';
import { isRecord, parseStrictJson } from './json.js';
import { checkSchedule } from './schedules.js';
import { ARRAYS, type DType, product } from './tensors.js';

const MAX_BYTES = 4 * 2 ** 20;
const SPINNING = 'session.force_spinning_stop';
const MAX_RANK = 32;
const MAX_ELEMENTS = 2 ** 40;
const MAX_SELF_CHECK_ELEMENTS = 2 ** 26;

type Check<T> = (value: unknown, at: string) => T;
type Checked<C> = C extends Check<infer T> ? T : never;

function invalid(problem: string): never {
  fail('manifest-invalid', `The manifest is not valid: ${problem.slice(0, 300)}.`, 'manifest.json',
    'build the package again with odtpack');
}

function must(holds: boolean, problem: string): void {
  if (!holds) invalid(problem);
}

function check<T>(what: string, good: (value: unknown) => boolean): Check<T> {
  return (value, at) => (good(value) ? (value as T) : invalid(`${at} must be ${what}`));
}

function optional<T>(inner: Check<T>): Check<T | undefined>;
function optional<T, F>(inner: Check<T>, fallback: F, nullable?: boolean): Check<T | F>;
/** @param nullable Whether null stands for the fallback as well, as where that is nothing. */
function optional(inner: Check<unknown>, fallback?: unknown,
  nullable = (fallback ?? null) === null,
): Check<unknown> {
  return (value, at) =>
    value === undefined || (nullable && value === null) ? fallback : inner(value, at);
}

function list<T>(inner: Check<T>, most = Infinity): Check<T[]> {
  return (value, at) => {
    if (!Array.isArray(value)) return invalid(`${at} must be a list`);
    if (value.length > most) invalid(`${at} has ${value.length} entries, and ${most} are allowed`);
    return value.map((item, index) => inner(item, `${at}[${index}]`));
  };
}

/** @param strict Refuse keys that are not among the fields. */
function object<F extends Record<string, Check<unknown>>>(
  fields: F, strict = false,
): Check<{ [K in keyof F]: Checked<F[K]> }> {
  return (value, at) => {
    if (!isRecord(value)) return invalid(`${at || 'it'} must be an object`);
    const odd = strict && Object.keys(value).find((key) => !Object.hasOwn(fields, key));
    if (typeof odd === 'string') invalid(`${at} may not have the key ${JSON.stringify(odd)}`);
    const entries = Object.entries(fields).map(([key, inner]) => {
      const own = Object.hasOwn(value, key) ? value[key] : undefined;
      return [key, inner(own, at ? `${at}.${key}` : key)];
    });
    return Object.fromEntries(entries) as { [K in keyof F]: Checked<F[K]> };
  };
}

function oneOf<const T>(...choices: readonly T[]): Check<T> {
  return check(`one of ${choices.join(', ')}`, (value) => choices.includes(value as T));
}

const text = check<string>('text', (value) => typeof value === 'string' && value !== '');
const truth = check<boolean>('true or false', (value) => typeof value === 'boolean');
const real = check<number>('a number', (value) => Number.isFinite(value));
const isBetween = (least: number, most: number) => (v: unknown): boolean =>
  Number.isSafeInteger(v) && (v as number) >= least && (v as number) <= most;
const whole = (least = 0, most = Number.MAX_SAFE_INTEGER): Check<number> =>
  check(`a whole number from ${least} to ${most}`, isBetween(least, most));
const count = whole();
/** What multiplies gradients is above 0 and finite, also as float32. */
const rate = check<number>('a number above 0 in float32', (v) => {
  const near = typeof v === 'number' ? Math.fround(v) : NaN;
  return near > 0 && near < Infinity;
});
const sha256 = check<string>('a SHA-256', (v) => typeof v === 'string' && /^[0-9a-f]{64}$/.test(v));
const size = check<number | string | null>(
  'a size', (v) => v === null || (typeof v === 'string' && v !== '') || isBetween(0, Infinity)(v),
);
const texts = check<Record<string, string>>(
  'text by name', (v) => isRecord(v) && Object.values(v).every((each) => typeof each === 'string'),
);
const dtype = oneOf<DType | 'string'>(...(Object.keys(ARRAYS) as DType[]), 'string');
/** Sizes of which the fixed ones together are no more than memory could ever hold. */
function shape<T extends number | string | null>(inner: Check<T>, most = MAX_ELEMENTS): Check<T[]> {
  const sizes = list(inner, MAX_RANK);
  return (value, at) => {
    const found = sizes(value, at);
    const fixed: number[] = found.filter((each) => typeof each === 'number');
    if (product(fixed) > most) invalid(`${at} has more than ${most} elements`);
    return found;
  };
}
const output = object({
  name: text, dtype, shape: shape(size), role: oneOf('loss', 'additional', 'prediction'),
});
const stored = oneOf<DType>(...(Object.keys(ARRAYS) as DType[]));
const file = { path: text, size_bytes: count, sha256 };
const level = oneOf('disabled', 'basic', 'extended', 'all');
/** What ONNX Runtime is told by text: entries can write files, so a package may ask for one. */
const config = check<Record<string, string>>(
  `empty, or have the one entry ${SPINNING} = 1`,
  (v) => isRecord(v) && Object.entries(v).every(([key, to]) => key === SPINNING && to === '1'),
);
const arenaBytes = optional(whole(256, 2 ** 30));
const extraRole = oneOf('ort_model', 'inference_model', 'operators_config',
  'operators_and_types_config', 'recipe', 'segment_model', 'segment_weights',
  'decoder_model', 'decoder_weights');
const session = object({
  optimization_level: level, memory_pattern: optional(truth, true),
  arena: optional(truth, true), prepacking: optional(truth, true),
  shared_allocator: optional(truth, false), initial_chunk_size_bytes: arenaBytes,
  max_dead_bytes_per_chunk: arenaBytes, threads: optional(whole(1, 256)),
  config: optional(config, {}),
}, true);

const schema = object({
  files: object({
    training_model: object(file),
    eval_model: object(file),
    optimizer_model: object(file),
    checkpoint: object(file),
    step_model: optional(object(file)),
    checkpoint_data: optional(object(file)),
    nominal_checkpoint: optional(object(file)),
    inference_template: optional(object(file)),
    extra: optional(list(object({
      ...file, role: extraRole, of: optional(text, null), style: optional(text, null),
      platform: optional(text, null),
    })), []),
  }),
  target: optional(text),
  privacy: optional(check<object>('an object', isRecord)),
  adapter: optional(object({
    parameters: optional(list(text), []),
    peft: optional(object({ config: text, names: optional(texts, {}) })),
  })),
  segments: optional(object({
    weights: optional(text),
    tensors: optional(list(object({
      name: text, dtype: text, shape: shape(count), offset: count,
    })), []),
    segments: list(object({ forward: text, backward: optional(text), names: optional(texts, {}) })),
  })),
  inputs: list(object({
    name: text, dtype, shape: shape(size), role: oneOf('data', 'labels', 'target'),
    class_count: optional(whole(1, 2 ** 31 - 1)),
    ignore_index: optional(whole(-Number.MAX_SAFE_INTEGER)),
  }), 1024),
  outputs: list(output, 1024),
  evaluation_outputs: optional(list(output, 1024), []),
  parameters: list(object({
    name: text, shape: shape(count), dtype: stored, model_dtype: optional(stored),
    scale: optional(text), role: oneOf('trainable', 'frozen', 'state'),
    size_bytes: optional(count), offset: optional(count),
  }), 100_000),
  optimizer: object({ kind: text, learning_rate: optional(rate) }),
  session: optional(session, session({
    optimization_level: 'extended', memory_pattern: false, config: { [SPINNING]: '1' },
  }, 'session'), true),
  layout: optional(object({
    dtype: oneOf('float32', 'float64'), elements: count,
    run: oneOf('chunks', 'whole', 'parameters'),
    chunk_elements: whole(1024, 2 ** 30), inputs: list(text),
    state: optional(list(object({ name: text, axes: optional(list(oneOf(0, 1), 2)) })), []),
  })),
  groups: optional(
    list(object({ learning_rate_scale: rate, weight_decay: real, parameters: list(text) })), [],
  ),
  accumulation_steps: optional(whole(1, 2 ** 20), 1),
  schedule: optional(object({
    kind: text, settings: optional(check<Settings>('an object', isRecord), {}),
    learning_rate: optional(rate),
  })),
  inference: optional(object({ inputs: list(text), outputs: list(text), parameters: list(text) })),
  self_check: optional(object({
    reason: optional(text),
    inputs: optional(list(object({
      name: text, shape: shape(count, MAX_SELF_CHECK_ELEMENTS), bound: optional(whole(1)),
    })), []),
    learning_rate: optional(rate), losses: optional(list(real), []),
    evaluation_loss: optional(real), tolerances: optional(list(real), []),
  })),
});

export type Settings = Record<string, number | readonly number[]>;
type Content = Checked<typeof schema>;
/** A package may have no layout, and then there is no session: `checkParameters`. */
export type Manifest = Content & { layout: NonNullable<Content['layout']> };
export type FileEntry = Manifest['files']['training_model'];
export type SegmentsInfo = NonNullable<Manifest['segments']>;
export type SelfCheckInfo = NonNullable<Manifest['self_check']>;
export type InputInfo = Manifest['inputs'][number];
export type ParameterInfo = Manifest['parameters'][number];

/** Parse and check the bytes of a `manifest.json`. */
export function parseManifest(bytes: Uint8Array): Manifest {
  if (bytes.length > MAX_BYTES) invalid(`it has more than ${MAX_BYTES} bytes`);
  const content = parseStrictJson(bytes, invalid);
  const version = isRecord(content) ? content['schema_version'] : undefined;
  if (version !== 1) {
    if (!Number.isInteger(version)) invalid('schema_version must be 1');
    fail('manifest-version',
      `The manifest has schema version ${version}, and this odtpack reads 1.`, 'manifest.json',
      'update odtpack, or build the package again');
  }
  const manifest = schema(content, '') as Manifest;
  checkSense(manifest);
  return manifest;
}

/** Files of the package, by the name of their entry or their path. */
export function entries(manifest: Manifest): FileEntry[] {
  const { extra, ...named } = manifest.files;
  return [...Object.values(named).filter((each) => each !== undefined), ...extra];
}

/** Outputs of the evaluation model: those of training and, after them, what it alone returns. */
export function evaluationOutputs(manifest: Manifest): Manifest['outputs'] {
  return [...manifest.outputs, ...manifest.evaluation_outputs];
}

/** Check what several keys say together. */
function checkSense(manifest: Manifest): void {
  const { parameters, groups } = manifest;
  const outputs = evaluationOutputs(manifest);
  for (const items of [manifest.inputs, outputs, parameters]) {
    must(new Set(items.map(({ name }) => name)).size === items.length, 'a name occurs twice');
  }
  must(manifest.outputs[0]?.role === 'loss', 'the first output must be the loss');
  if (manifest.layout) checkLayout(manifest);
  if (manifest.schedule) checkSchedule(manifest.schedule, invalid);
  const known = new Set(parameters.map(({ name }) => name));
  const scales = parameters.flatMap((parameter) => parameter.scale ?? []);
  const named = [...scales, ...(manifest.inference?.parameters ?? [])];
  const stranger = named.find((name) => !known.has(name));
  must(stranger === undefined, `'${stranger}' is not one of the parameters`);
  const grouped = groups.flatMap((group) => group.parameters).sort();
  const names = trainable(manifest).map(({ name }) => name).sort();
  must(!groups.length || JSON.stringify(grouped) === JSON.stringify(names),
    'the groups do not hold each trainable parameter once');
  const { checkpoint, checkpoint_data: data } = manifest.files;
  must(!data || data.path === `${checkpoint.path}.data`,
    'checkpoint_data must be named after the checkpoint');
  must(!manifest.inference === !manifest.files.inference_template,
    'an inference template needs both its file and the key inference');
  const odd = parameters.find(({ shape, dtype: type, size_bytes: bytes }) =>
    bytes !== undefined && bytes !== product(shape) * ARRAYS[type].BYTES_PER_ELEMENT);
  must(!odd, `the size of '${odd?.name}' is not that of its shape and type`);
  checkSelfCheck(manifest);
}

function checkLayout(manifest: Manifest): void {
  const { dtype, elements } = manifest.layout;
  const step = 64 / ARRAYS[dtype].BYTES_PER_ELEMENT;
  let end = 0;
  for (const { name, shape, offset } of trainedParameters(manifest)) {
    must(offset % step === 0 && offset >= end,
      `the offset of '${name}' does not go with the layout`);
    end = offset + product(shape);
  }
  must(elements === Math.ceil(end / step) * step,
    'layout.elements is not where the last parameter ends, rounded up to 64 bytes');
}

/** It holds a reason, or everything else. */
function checkSelfCheck({ self_check: check }: Manifest): void {
  if (!check) return;
  const { reason: why, inputs, learning_rate, losses, evaluation_loss, tolerances } = check;
  const given = [learning_rate, evaluation_loss].filter((each) => each !== undefined);
  const whole =
    inputs.length > 0 && given.length === 2 && losses.length === 5 && tolerances.length === 6;
  const nothing = !(inputs.length + given.length + losses.length + tolerances.length);
  must(why === undefined ? whole : nothing, 'self_check must hold a reason, or everything else');
}

export function trainable({ parameters }: Manifest): ParameterInfo[] {
  return parameters.filter(({ role }) => role === 'trainable');
}

/** Trainable parameters in the order in which they lie in memory. */
export function trainedParameters(manifest: Manifest): (ParameterInfo & { offset: number })[] {
  return trainable(manifest)
    .map((each) => ({ ...each, offset: each.offset ?? invalid(`'${each.name}' has no offset`) }))
    .sort((a, b) => a.offset - b.offset || product(a.shape) - product(b.shape));
}
