/** The adapter of a package: ONNX Runtime's file of one, and PEFT's two files. */
import { platform } from '#platform';
import { type CheckpointState, open } from './checkpoint.js';
import { MAX_RANK, type Parameter } from './checkpoint_format.js';
import { attempt, demand, fail } from './errors.js';
import { INT32, Source, Writer } from './flatbuffer.js';
import { converted } from './inference.js';
import { isPath, isRecord, parseStrictJson } from './json.js';
import { trainable } from './manifest.js';
import type { TrainingPackage } from './package.js';
import { type FileSource, inMemory } from './platform.js';
import {
  ARRAYS, bytesOf, CODES, type DType, DTYPES, join, product, sameDims, type Stored,
  type TypedArray, view,
} from './tensors.js';

/** PEFT's files by their names, `adapter_model.safetensors` and `adapter_config.json`. */
export type PeftFiles = ReadonlyMap<string, Uint8Array>;

const SUFFIX = '.onnx_adapter';
const [TENSORS, CONFIG] = ['adapter_model.safetensors', 'adapter_config.json'];
const TABLE = '.base_layer.weight'; // beside an embedding's adapter PEFT saves it
const IDENTIFIER = 'TORT';
const FORMAT_VERSION = 1;
const SAFETENSORS: ReadonlyMap<unknown, DType> = new Map([
  ['F32', 'float32'], ['F64', 'float64'], ['F16', 'float16'], ['BF16', 'uint16'],
]);

// Settings that change what the tensors mean, unless they have one of the plain values.
const SETTINGS = [
  'alora_invocation_tokens', 'bias', 'layer_replication', 'lora_bias', 'megatron_config',
  'rank_pattern', 'alpha_pattern', 'target_parameters', 'trainable_token_indices', 'use_qalora',
  'use_bdlora', 'arrow_config', 'kasa_config', 'monteclora_config',
];
const PLAIN = new Set(['null', 'false', '"none"', '{}']);
const STARTS = new Set<unknown>([undefined, null, true, false, 'gaussian', 'orthogonal', 'eva']);

type Named = ReadonlyMap<string, Stored>;

/** The adapter of a state as the bytes of an `.onnx_adapter` file, for ONNX Runtime's adapters. */
export async function onnxAdapter(
  opened: TrainingPackage, state: CheckpointState,
): Promise<Uint8Array> {
  return state.alone(async () => layOnnxAdapter(await trainedOf(opened, state)));
}

/** The adapter of a state as PEFT's two files. */
export async function peftAdapter(
  opened: TrainingPackage, state: CheckpointState,
): Promise<PeftFiles> {
  return state.alone(async () => {
    const trained = await trainedOf(opened, state);
    const { config, nameOf } = peftOf(opened);
    const renamed = new Map([...trained].map(([name, value]) => [nameOf(name), value]));
    // The configuration comes first, as it says to the next save that the values are ours.
    return new Map([
      [CONFIG, new TextEncoder().encode(config)], [TENSORS, laySafetensors(renamed)],
    ]);
  });
}

/**
 * Write the adapter of a state (Node): to a file whose name ends in `.onnx_adapter`, or to a
 * folder, made if needed, with PEFT's two files. An adapter that is there is replaced, no other
 * file, nor what PEFT wrote itself.
 */
export async function saveAdapter(
  opened: TrainingPackage, state: CheckpointState, target: string | URL,
): Promise<void> {
  if (isFile(target)) {
    const bytes = await onnxAdapter(opened, state);
    checkReplaced(target, (start) => String.fromCharCode(...start.subarray(4, 8)) === IDENTIFIER);
    return platform.writeFile(target, [bytes]);
  }
  const files = await peftAdapter(opened, state);
  await platform.makeFolder(target);
  const isOurs = isOwnConfig(platform.fileAt(inFolder(target, CONFIG)), files.get(CONFIG)!);
  for (const name of files.keys()) checkReplaced(inFolder(target, name), () => isOurs);
  for (const [name, bytes] of files) await platform.writeFile(inFolder(target, name), [bytes]);
}

/** Refuses to replace a file, unless it is ours. */
function checkReplaced(path: string | URL, isOurs: (bytes: Uint8Array) => boolean): void {
  const bytes = platform.fileAt(path);
  demand(!bytes || isOurs(bytes), 'file-not-written',
    `${path} would be replaced, and it is not an adapter of this package.`, '',
    'move the file, or choose another name or a new folder');
}

/** Whether a configuration has no other settings than `own`; PEFT itself writes more. */
function isOwnConfig(bytes: Uint8Array | undefined, own: Uint8Array): boolean {
  if (!bytes) return false;
  try {
    const settings = Object.keys(parsed(CONFIG, bytes));
    const known = parsed(CONFIG, own);
    return settings.includes('peft_type') && settings.every((key) => Object.hasOwn(known, key));
  } catch {
    return false;
  }
}

/**
 * Set the trained parameters of a state to those of an adapter, all of them or none. What the
 * optimizer carries stays as it is.
 *
 * @param source A path or address of a file that ends in `.onnx_adapter` or of a folder with PEFT's
 *   files, the content of such a file, or PEFT's files by name.
 * @throws OdtpackError `adapter-not-found`, `adapter-corrupt`, `peft-not-found`, `peft-invalid` or
 *   `peft-unsupported` if it cannot be read, `adapter-mismatch` if it does not fit.
 */
export async function loadAdapter(
  opened: TrainingPackage, state: CheckpointState, source: FileSource | PeftFiles,
): Promise<void> {
  await state.alone(async () => {
    const trained = await trainedOf(opened, state);
    const values = await readAdapter(opened, trained, source);
    trained.forEach(({ data }, name) => bytesOf(data).set(bytesOf(values.get(name)!)));
    state.complete();
  });
}

/** What a package trains with an adapter, in the memory of the state. */
export async function trainedOf(
  { manifest, source }: TrainingPackage, state: CheckpointState,
): Promise<ReadonlyMap<string, Parameter>> {
  demand(manifest.adapter, 'no-adapter', 'The package was built without an adapter.',
    typeof source === 'string' ? source : '', "build it with --adapter lora --on '*.q_proj'");
  state.requireValues();
  await state.refresh();
  const all = [...state.parameters].filter(([, { requiresGrad }]) => requiresGrad);
  const trained = new Map(all.sort(([a], [b]) => (a < b ? -1 : 1)));
  const own = new Map([...trained].map(([name, { dtype, dims }]) => [name, `${dtype}[${dims}]`]));
  const wanted = new Map(trainable(manifest).map(({ name, dtype, shape }) =>
    [name, `${dtype}[${shape}]`]));
  const odd = [...wanted.keys(), ...own.keys()].find((name) => own.get(name) !== wanted.get(name));
  demand(odd === undefined, 'adapter-mismatch',
    `State and package do not train the same '${odd}'.`, '',
    'use a checkpoint that was trained with this package');
  return trained;
}

function peftOf({ manifest }: TrainingPackage): {
  config: string; nameOf: (name: string) => string;
} {
  const peft = manifest.adapter?.peft ?? fail('peft-without-kind',
    'PEFT has no file for what this package trains.', '', `use a file that ends in ${SUFFIX}`);
  const names = new Map(Object.entries(peft.names));
  return { config: peft.config, nameOf: (name) => names.get(name) ?? name };
}

/** The values of an adapter by the names of what is trained, in the types of that. */
export async function readAdapter(
  opened: TrainingPackage, trained: Named, source: FileSource | PeftFiles,
): Promise<Map<string, TypedArray>> {
  const path = isPath(source) ? source : undefined;
  const where = path === undefined ? '' : String(path);
  const inPeft = source instanceof Map || (path !== undefined && !isFile(path));
  const mismatch = (problem: string): never => fail('adapter-mismatch', problem, where,
    "build the package with the adapter's kind, rank, alpha and layers");
  let nameOf = (name: string): string => name;
  let found: Map<string, Stored>;
  if (inPeft) {
    const peft = peftOf(opened);
    nameOf = peft.nameOf;
    const part = (name: string): Promise<Uint8Array> =>
      content(path === undefined ? (source as PeftFiles).get(name) : inFolder(path, name),
        'peft-not-found', name, 'pass what model.save_pretrained(folder) wrote');
    const [own, theirs] = [new TextEncoder().encode(peft.config), await part(CONFIG)].map(meaning);
    if (own !== theirs) mismatch(`The adapter is ${theirs}, the package's ${own}.`);
    found = readSafetensors(await part(TENSORS));
  } else {
    const bytes = await content(source as FileSource, 'adapter-not-found', where || 'The adapter',
      'pass a file that saveAdapter wrote');
    found = readOnnxAdapter(bytes, where || 'The adapter');
  }
  const values = new Map<string, TypedArray>();
  for (const [name, own] of trained) {
    const label = nameOf(name);
    const value = found.get(label) ?? mismatch(`The adapter has no '${label}'.`);
    if (!sameDims(value.dims, own.dims) || !value.dtype.startsWith('float')) {
      mismatch(`'${label}' is ${value.dtype}[${value.dims}] in the adapter, and ` +
        `${own.dtype}[${own.dims}] in the package.`);
    }
    const taken = converted(value, own.dtype, `'${label}'`);
    if (!(converted({ ...own, data: taken }, 'float32') as Float32Array).every(Number.isFinite)) {
      fail(inPeft ? 'peft-invalid' : 'adapter-corrupt', `'${label}' holds NaN or infinity.`, where,
        'use an adapter from before its training diverged');
    }
    values.set(name, taken);
    found.delete(label);
  }
  const odd = [...found.keys()].find((name) => !inPeft || !name.endsWith(TABLE));
  if (odd !== undefined) mismatch(`The adapter has '${odd}', which the package does not train.`);
  return values;
}

function isFile(path: string | URL): boolean {
  return String(path).endsWith(SUFFIX);
}

function inFolder(folder: string | URL, name: string): string | URL {
  if (typeof folder === 'string') return `${folder}/${name}`;
  return new URL(name, folder.href.replace(/\/?$/, '/'));
}

async function content(
  source: FileSource | undefined, code: string, what: string, hint: string,
): Promise<Uint8Array> {
  const read = async (): Promise<Uint8Array> => {
    if (source === undefined) throw new Error('it is not there');
    const { bytes, close } = await open(source);
    try {
      return bytes.read(0, bytes.size);
    } finally {
      close();
    }
  };
  return attempt(read, code, `${what} cannot be read`, '', hint);
}

/**
 * As onnxruntime/lora has it: Parameter { name: string; dims: [int64]; data_type: int32;
 * raw_data: [uint8]; } and Adapter { format_version: int32; adapter_version: int32;
 * model_version: int32; parameters: [Parameter]; }.
 */
function layOnnxAdapter(tensors: Named): Uint8Array {
  const writer = new Writer(4096);
  const tables = [...tensors].map(([name, { dtype, dims, data }]) => {
    writer.prep(8, data.byteLength);
    const raw = writer.createByteVector(bytesOf(data));
    const shape = writer.int64s(dims);
    const label = writer.createString(name);
    const code = CODES[dtype];
    return writer.table(['Offset', label], ['Offset', shape], ['Int32', code], ['Offset', raw]);
  });
  const version = ['Int32', FORMAT_VERSION] as const;
  const root = writer.table(version, version, version, ['Offset', writer.offsets(tables)]);
  writer.finish(root, IDENTIFIER);
  return writer.asUint8Array();
}

function readOnnxAdapter(bytes: Uint8Array, where: string): Map<string, Stored> {
  const source = new Source(inMemory(bytes), where, undefined, 'adapter');
  const root = source.root(IDENTIFIER);
  const format = root.number(INT32, 0, 0);
  if (format !== FORMAT_VERSION) source.fail(`its format is ${format}, and 1 is known`);
  const tensors = new Map<string, Stored>();
  for (const table of root.tables(3)) {
    const name = table.string(0);
    const raw = table.vector(3, 1);
    const data = raw && source.elements(raw.position, raw.length);
    const dtype = DTYPES.get(table.number(INT32, 2, 0));
    const tensor = data && tensorOf(dtype, table.int64s(1, MAX_RANK), data);
    if (!tensor || tensors.has(name)) return source.fail('a parameter is not a tensor of numbers');
    tensors.set(name, tensor);
  }
  return tensors;
}

/** A copy of bytes as a tensor of that type and shape, if they are as many as it has. */
function tensorOf(dtype: DType | undefined, dims: unknown, data: Uint8Array): Stored | undefined {
  if (!dtype || !Array.isArray(dims) || dims.length > MAX_RANK) return undefined;
  const isSize = (size: unknown): boolean => Number.isSafeInteger(size) && (size as number) >= 0;
  const nbytes = product(dims as number[]) * ARRAYS[dtype].BYTES_PER_ELEMENT;
  if (!dims.every(isSize) || nbytes !== data.length) return undefined;
  const copy = Uint8Array.from(data);
  return { dtype, dims: dims as number[], data: view(copy.buffer, dtype, 0, nbytes) };
}

function laySafetensors(tensors: Named): Uint8Array {
  const kinds = new Map([...SAFETENSORS].map(([kind, dtype]) => [dtype, kind]));
  let end = 0;
  const entries = [...tensors].sort(([a], [b]) => (a < b ? -1 : 1));
  const fields = entries.map(([name, { dtype, dims, data }]) => {
    const data_offsets = [end, (end += data.byteLength)];
    return `${JSON.stringify(name)}:` +
      JSON.stringify({ dtype: kinds.get(dtype), shape: dims, data_offsets });
  });
  const all = ['"__metadata__":{"format":"pt"}', ...fields].join();
  const header = new TextEncoder().encode(`{${all}}`);
  const head = new Uint8Array(8 + Math.ceil(header.length / 8) * 8).fill(0x20);
  new DataView(head.buffer).setBigUint64(0, BigInt(head.length - 8), true);
  head.set(header, 8);
  return join([head, ...entries.map(([, { data }]) => bytesOf(data))]);
}

function invalid(name: string, problem: string): never {
  fail('peft-invalid', `${name} cannot be read: ${problem}.`, '',
    'save the adapter again: model.save_pretrained(folder)');
}

function parsed(name: string, bytes: Uint8Array): Record<string, unknown> {
  const found = parseStrictJson(bytes, (problem) => invalid(name, problem));
  return isRecord(found) ? found : invalid(name, 'it is not an object');
}

function readSafetensors(bytes: Uint8Array): Map<string, Stored> {
  const numbers = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const size = bytes.length < 10 ? Infinity : Number(numbers.getBigUint64(0, true));
  if (size > bytes.length - 8) invalid(TENSORS, `its header has ${size} bytes`);
  const data = bytes.subarray(8 + size);
  const places = Object.entries(parsed(TENSORS, bytes.subarray(8, 8 + size)))
    .filter(([name]) => name !== '__metadata__')
    .map(([name, entry]) => {
      const { dtype, shape, data_offsets: at } = isRecord(entry) ? entry : invalid(TENSORS, name);
      if (!Array.isArray(at) || at.length !== 2 || !at.every(Number.isSafeInteger)) {
        return invalid(TENSORS, `'${name}' is nowhere`);
      }
      return { name, dtype, shape, start: at[0] as number, stop: at[1] as number };
    });
  let end = 0;
  const tensors = new Map<string, Stored>();
  for (const { name, dtype, shape, start, stop } of
    places.sort((a, b) => a.start - b.start || a.stop - b.stop)) {
    const tensor = start === end && stop >= start && stop <= data.length
      && tensorOf(SAFETENSORS.get(dtype), shape, data.subarray(start, stop));
    if (!tensor) return invalid(TENSORS, `its tensor '${name}' is not where or what it should be`);
    const { dims, data: values } = tensor;
    tensors.set(name, dtype !== 'BF16' ? tensor : {
      dtype: 'float32', dims, data: new Float32Array(Uint32Array.from(values as Uint16Array,
        (bits) => bits << 16).buffer),
    });
    end = stop;
  }
  if (end !== data.length) invalid(TENSORS, 'it is longer or shorter than its tensors');
  return tensors;
}

/** What a configuration says of the values: their kind, rank and factor. */
function meaning(bytes: Uint8Array): string {
  const config = parsed(CONFIG, bytes);
  const { peft_type: kind, init_lora_weights: start } = config;
  const [rank, alpha] = [config['r'] ?? 1, config['lora_alpha'] ?? 1];
  if (typeof kind !== 'string' || typeof rank !== 'number' || typeof alpha !== 'number') {
    return invalid(CONFIG, 'peft_type, r or lora_alpha is not what it should be');
  }
  const odd = SETTINGS.find((key) => !PLAIN.has(JSON.stringify(config[key] ?? null)));
  if (odd) fail('peft-unsupported', `The adapter has ${odd}.`);
  if (!STARTS.has(start)) {
    const name = JSON.stringify(start).replaceAll('"', "'");
    fail('peft-unsupported', `init_lora_weights=${name} changes the base weights.`);
  }
  const factor = Math.fround(alpha / (config['use_rslora'] ? Math.sqrt(rank) : rank));
  return `${kind}${config['use_dora'] ? ' with DoRA' : ''}, rank ${rank}, factor ${factor}`;
}
