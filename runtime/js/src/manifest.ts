/** The manifest: what a kit reads of it, checked. Keys that it does not read are ignored. */
import { OdtpackError } from './errors.js';
import { ARRAYS, type DType, product } from './tensors.js';

type Check<T> = (value: unknown, at: string) => T;
type Checked<C> = C extends Check<infer T> ? T : never;

function invalid(problem: string): never {
  throw new OdtpackError('manifest-invalid',
    `The manifest is not valid: ${problem.slice(0, 300)}.`, 'manifest.json',
    'build the package again with odtpack');
}

function check<T>(what: string, good: (value: unknown) => boolean): Check<T> {
  return (value, at) => (good(value) ? (value as T) : invalid(`${at} must be ${what}`));
}

function optional<T, F>(inner: Check<T>, fallback: F): Check<T | F> {
  return (value, at) => (value === undefined || value === null ? fallback : inner(value, at));
}

function list<T>(inner: Check<T>): Check<T[]> {
  return (value, at) =>
    Array.isArray(value)
      ? value.map((item, index) => inner(item, `${at}[${index}]`))
      : invalid(`${at} must be a list`);
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function object<F extends Record<string, Check<unknown>>>(
  fields: F,
): Check<{ [K in keyof F]: Checked<F[K]> }> {
  return (value, at) => {
    if (!isRecord(value)) return invalid(`${at || 'it'} must be an object`);
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
const isCount = (v: unknown): boolean => Number.isSafeInteger(v) && (v as number) >= 0;
const count = check<number>('a whole number', isCount);
const positive = check<number>('1 or more', (v) => Number.isSafeInteger(v) && (v as number) >= 1);
const label = check<number>('a whole number', Number.isSafeInteger);
const sha256 = check<string>('a SHA-256', (v) => typeof v === 'string' && /^[0-9a-f]{64}$/.test(v));
const size = check<number | string | null>(
  'a size', (v) => v === null || (typeof v === 'string' && v !== '') || isCount(v),
);
const texts = check<Record<string, string>>(
  'text by name', (v) => isRecord(v) && Object.values(v).every((each) => typeof each === 'string'),
);
const dtype = oneOf<DType | 'string'>(...(Object.keys(ARRAYS) as DType[]), 'string');
const output = object({
  name: text, dtype, shape: list(size), role: oneOf('loss', 'additional', 'prediction'),
});
const stored = oneOf<DType>(...(Object.keys(ARRAYS) as DType[]));
const file = { path: text, size_bytes: count, sha256 };
const level = oneOf('disabled', 'basic', 'extended', 'all');

const schema = object({
  files: object({
    training_model: object(file),
    eval_model: object(file),
    optimizer_model: object(file),
    checkpoint: object(file),
    checkpoint_data: optional(object(file), undefined),
    nominal_checkpoint: optional(object(file), undefined),
    inference_template: optional(object(file), undefined),
    extra: optional(
      list(object({
        ...file, role: text, of: optional(text, null), style: optional(text, null),
        platform: optional(text, null),
      })),
      [],
    ),
  }),
  target: optional(text, undefined),
  privacy: optional(check<object>('an object', isRecord), undefined),
  segments: optional(
    object({
      weights: optional(text, undefined),
      tensors: optional(
        list(object({ name: text, dtype: text, shape: list(label), offset: count })), [],
      ),
      segments: list(object({
        forward: text, backward: optional(text, undefined), names: optional(texts, {}),
      })),
    }),
    undefined,
  ),
  inputs: list(object({
    name: text, dtype, shape: list(size), role: oneOf('data', 'labels', 'target'),
    class_count: optional(positive, undefined), ignore_index: optional(label, undefined),
  })),
  outputs: list(output),
  evaluation_outputs: optional(list(output), []),
  parameters: list(object({
    name: text, shape: list(count), dtype: stored, model_dtype: optional(stored, undefined),
    scale: optional(text, undefined), role: oneOf('trainable', 'frozen', 'state'),
    offset: optional(count, undefined),
  })),
  optimizer: object({ kind: text }),
  session: optional(
    object({
      optimization_level: optional(level, 'all' as const), memory_pattern: optional(truth, true),
      arena: optional(truth, true), prepacking: optional(truth, true),
      threads: optional(positive, undefined), config: optional(texts, {}),
    }),
    {
      optimization_level: 'extended' as const, memory_pattern: false, arena: true, prepacking: true,
      threads: undefined, config: { 'session.force_spinning_stop': '1' },
    },
  ),
  layout: object({
    dtype: oneOf('float32', 'float64'), elements: count,
    run: oneOf('chunks', 'whole', 'parameters'),
    chunk_elements: optional(positive, 131072), inputs: list(text),
    state: optional(list(object({ name: text, axes: optional(list(oneOf(0, 1)), undefined) })), []),
  }),
  groups: optional(
    list(object({ learning_rate_scale: real, weight_decay: real, parameters: list(text) })), [],
  ),
  accumulation_steps: optional(positive, 1),
  schedule: optional(
    object({
      kind: text, settings: optional(check<Settings>('an object', isRecord), {}),
      learning_rate: optional(real, undefined),
    }),
    undefined,
  ),
  inference: optional(
    object({ inputs: list(text), outputs: list(text), parameters: list(text) }), undefined,
  ),
  self_check: optional(
    object({
      reason: optional(text, undefined),
      inputs: optional(
        list(object({ name: text, shape: list(count), bound: optional(positive, undefined) })), [],
      ),
      learning_rate: optional(real, 0), losses: optional(list(real), []),
      evaluation_loss: optional(real, 0), tolerances: optional(list(real), []),
    }),
    undefined,
  ),
});

export type Settings = Record<string, number | readonly number[]>;
export type Manifest = Checked<typeof schema>;
export type FileEntry = Manifest['files']['training_model'];
export type SegmentsInfo = NonNullable<Manifest['segments']>;
export type InputInfo = Manifest['inputs'][number];
export type ParameterInfo = Manifest['parameters'][number];

/** Parse and check the bytes of a `manifest.json`. */
export function parseManifest(bytes: Uint8Array): Manifest {
  let content: unknown;
  try {
    content = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes));
  } catch {
    return invalid('it is not JSON in UTF-8');
  }
  const version = isRecord(content) ? content['schema_version'] : undefined;
  if (version !== 1) {
    if (!Number.isInteger(version)) invalid('schema_version must be 1');
    throw new OdtpackError('manifest-version',
      `The manifest has schema version ${version}, and this odtpack reads 1.`, 'manifest.json',
      'update odtpack, or build the package again');
  }
  const manifest = schema(content, '');
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

function checkSense(manifest: Manifest): void {
  const { layout, parameters, groups } = manifest;
  const outputs = evaluationOutputs(manifest);
  for (const items of [manifest.inputs, outputs, parameters, layout.state]) {
    if (new Set(items.map(({ name }) => name)).size < items.length) invalid('a name occurs twice');
  }
  if (manifest.outputs[0]?.role !== 'loss') invalid('the first output must be the loss');
  const itemsize = ARRAYS[layout.dtype].BYTES_PER_ELEMENT;
  let end = 0;
  const trained = trainedParameters(manifest);
  for (const { name, shape, dtype: type, offset } of trained) {
    if (type !== layout.dtype || offset * itemsize % 64 || offset < end) {
      invalid(`the offset or the type of '${name}' does not go with the layout`);
    }
    end = offset + product(shape);
  }
  if (end > layout.elements) invalid('the parameters exceed the layout');
  const known = new Set(parameters.map(({ name }) => name));
  const scales = parameters.flatMap((parameter) => parameter.scale ?? []);
  const named = [...scales, ...(manifest.inference?.parameters ?? [])];
  const stranger = named.find((name) => !known.has(name));
  if (stranger !== undefined) invalid(`'${stranger}' is not one of the parameters`);
  const grouped = groups.flatMap((group) => group.parameters).sort();
  const names = trained.map(({ name }) => name).sort();
  if (groups.length && JSON.stringify(grouped) !== JSON.stringify(names)) {
    invalid('the groups do not hold each trainable parameter once');
  }
  const taken = new Set(['manifest.json', 'manifest.sig']);
  for (const { path } of entries(manifest)) {
    const parts = path.split('/');
    const odd = /[\u0000-\u001f\u007f\\:<>"|?*]/.test(path);
    if (odd || parts.some((part) => ['', '.', '..'].includes(part))) {
      refusePath(path, 'does not lie inside the package');
    }
    const folded = path.normalize('NFC').toLowerCase();
    if (taken.has(folded)) refusePath(path, 'on some systems is the same file as another');
    taken.add(folded);
  }
}

function refusePath(path: string, problem: string): never {
  throw new OdtpackError('package-path',
    `The manifest names the file ${JSON.stringify(path)}, which ${problem}.`, 'manifest.json',
    'do not use this package: it was tampered with, or not written by odtpack');
}

/** Trainable parameters in the order in which they lie in memory. */
export function trainedParameters(manifest: Manifest): (ParameterInfo & { offset: number })[] {
  return manifest.parameters
    .filter(({ role }) => role === 'trainable')
    .map((each) => ({ ...each, offset: each.offset ?? invalid(`'${each.name}' has no offset`) }))
    .sort((a, b) => a.offset - b.offset);
}
