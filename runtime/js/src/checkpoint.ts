/** The state of a training: parameters, properties, and what the optimizer carries. */
import { platform } from '#platform';
import {
  type CheckpointData, type OptimizerState, type Parameter, type Property, type PropertyKind,
  externalRegion, layCheckpoint, OPTIMIZER_PROPERTY, payloadBytes, readCheckpoint, readStep,
} from './checkpoint_format.js';
import { attempt, demand, fail, OdtpackError, requireArgument } from './errors.js';
import { isPath, isRecord, LONE } from './json.js';
import { type FileSource, inMemory, type OpenedCheckpoint } from './platform.js';
import { bytesOf, type Layout, sameDims } from './tensors.js';

/** Bytes of tensors up to which a checkpoint is one file; a flatbuffer ends below 2 GiB. */
const DATA_FILE_ABOVE = 1800 * 2 ** 20;
const MOST_ATTEMPTS = 8; // to read a file that is replaced again and again
/** What the save before can help against. */
const HARMED = new Set(['checkpoint-corrupt', 'checkpoint-not-found', 'checkpoint-unreadable',
  'checkpoint-version', 'checkpoint-dtype']);

export interface SaveOptions {
  /**
   * Keep the file that is replaced: in Node as `<path>.previous`, which `load` goes back to if this
   * one comes to harm; in a browser in the file that is given here.
   */
  keepPrevious?: boolean | FileSystemFileHandle;
  /** Bytes of tensors above which they go to a second file, `<path>.data` (Node). */
  dataFileAbove?: number;
}

/** Values that the user attaches: int64, float32 or text. */
export class Properties {
  constructor(readonly values: Map<string, Property>) {}

  /** A number, a bigint for integers that a number cannot hold, or text; undefined if absent. */
  get(name: string): bigint | number | string | undefined {
    const value = this.values.get(name)?.value;
    return typeof value === 'bigint' && Number.isSafeInteger(Number(value)) ? Number(value) : value;
  }

  /** Attach a value. Whole numbers become int64, others float32, unless `kind` says otherwise. */
  set(name: string, value: bigint | number | string, kind?: PropertyKind): void {
    const whole = typeof value === 'bigint' || Number.isSafeInteger(value);
    const chosen = kind ?? (typeof value === 'string' ? 'text' : whole ? 'int' : 'float');
    const right = typeof value === 'string' ? chosen === 'text'
      : ['number', 'bigint'].includes(typeof value) && ['int', 'float'].includes(chosen);
    const isName = typeof name === 'string' && name !== '';
    demand(isName && right && (whole || chosen !== 'int'), 'property-type',
      `Property '${String(name)}' cannot be a ${typeof value} of this kind.`);
    demand(name !== OPTIMIZER_PROPERTY, 'property-type',
      `'${name}' is reserved: files keep the optimizer's kind there.`);
    demand(![name, value].some((each) => typeof each === 'string' && LONE.test(each)),
      'property-not-text', 'A property holds half a surrogate pair, which is no text.');
    const kept =
      chosen === 'text' ? value : chosen === 'int' ? BigInt(value) : Math.fround(Number(value));
    const fits = typeof kept === 'bigint' ? BigInt.asIntN(64, kept) === kept
      : typeof kept === 'string' || Math.abs(kept) < Infinity || !Number.isFinite(Number(value));
    if (!fits) fail('property-out-of-range', `Property '${name}' cannot hold ${value}.`);
    this.values.set(name, { kind: chosen, value: kept });
  }

  delete(name: string): boolean {
    return this.values.delete(name);
  }
}

/** The memory of a state after a training session placed it. */
export interface FlatState {
  readonly layout: Layout;
  readonly parameters: ArrayBuffer;
  readonly gradients: ArrayBuffer;
  /** The gradients are of no use: the step that was to make them is void. */
  spoiled: boolean;
}

/** A training on a GPU, whose memory is ahead of the arrays. */
export interface Resident {
  refresh(): Promise<void>;
  wrote(): void;
}

export class CheckpointState {
  readonly parameters: Map<string, Parameter>;
  readonly properties: Properties;
  optimizer: OptimizerState | undefined;
  flat: FlatState | undefined;
  /** Where it is trained, if that is not in its arrays. */
  device: Resident | undefined;
  /**
   * True if the file carried a digest of all that it holds, which was right. Those of ONNX
   * Runtime's own training carry none, and load unchecked.
   */
  readonly checked: boolean;
  /** What is wrong with the file, if the save before it was loaded instead. */
  recovered: string | undefined;
  /** The file that was loaded or saved last, which is whole; in a browser with its handle. */
  #whole: string | undefined;
  #handle: FileSystemFileHandle | undefined;
  #nominal: boolean;
  #busy = false;

  constructor(data: CheckpointData) {
    this.parameters = data.parameters;
    this.properties = new Properties(data.properties);
    this.optimizer = data.optimizer;
    this.#nominal = data.nominal;
    this.checked = data.checked ?? false;
  }

  /**
   * Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19. If it is damaged or
   * missing and the save before it was kept, that one is loaded; `recovered` then says so.
   *
   * @param previous The save before, where it is not `<path>.previous` in Node.
   */
  static async load(source: FileSource, previous?: FileSource): Promise<CheckpointState> {
    const before = previous ?? (isPath(source) ? platform.previousOf(source) : undefined);
    try {
      const found = await identity(source);
      const state = new CheckpointState(await readAgain(source));
      state.#whole = (await identity(source)) === found ? found : undefined;
      state.#handle = isHandle(source) ? source : undefined;
      return state;
    } catch (error) {
      if (!before || !(error instanceof OdtpackError) || !HARMED.has(error.code)) throw error;
      const state = await read(before).then((data) => new CheckpointState(data), () => undefined);
      if (!state) throw error;
      const step = state.optimizer?.step ?? 0;
      const last = Number((await open(source).then(readStep, () => undefined)) ?? 0);
      const lost = last > step ? `${last - step} optimizer steps made` : 'what was trained';
      state.recovered =
        `${error.what} The save before it was loaded, of optimizer step ${step}: ${lost} since ` +
        `${last > step ? 'are' : 'is'} lost.`;
      return state;
    }
  }

  /** Throw `busy` while something uses the state: parameters are changed where they lie. */
  requireIdle(): void {
    demand(!this.#busy, 'busy',
      'Another call on this state is running.', '', 'await every call before the next');
  }

  /** One use at a time. */
  async alone<T>(work: () => Promise<T>): Promise<T> {
    this.requireIdle();
    this.#busy = true;
    try {
      return await work();
    } finally {
      this.#busy = false;
    }
  }

  /** True as long as the parameters have names and no values. */
  get isNominal(): boolean {
    return this.#nominal;
  }

  /** Throw `nominal-state` if the parameters have no values. */
  requireValues(problem = 'its parameters have no values'): void {
    demand(!this.#nominal, 'nominal-state', `The checkpoint is nominal: ${problem}.`, '',
      'load a complete checkpoint, or all parameters by loadParametersBuffer(values, false)');
  }

  /** Let the arrays of parameters and moments hold what was trained on a GPU. */
  async refresh(): Promise<void> {
    await this.device?.refresh();
  }

  /** The values in memory are the state's own from now on. */
  complete(): void {
    this.device?.wrote();
    this.#nominal = false;
  }

  /** Set all parameters to the values in a complete checkpoint of the same model. */
  async loadParameters(source: FileSource): Promise<void> {
    await this.alone(async () => {
      const other = new CheckpointState(await read(source));
      const { parameters: found } = other;
      await this.refresh();
      other.requireValues('there are no values in it to load');
      const shapeless = this.#nominal && !this.flat;
      const odd = [...new Set([...found.keys(), ...this.parameters.keys()])].find((name) => {
        const [have, next] = [this.parameters.get(name), found.get(name)];
        if (!have || !next || have.dtype !== next.dtype) return true;
        return !shapeless && !sameDims(have.dims, next.dims);
      });
      demand(odd === undefined, 'checkpoint-mismatch',
        `The checkpoint does not go with this state: '${odd}' is missing in one of them, or has ` +
          'another shape or type.',
        typeof source === 'string' ? source : '', 'load a checkpoint of the same model');
      for (const [name, { dims, data }] of found) {
        const own = this.parameters.get(name)!;
        if (shapeless) Object.assign(own, { dims, data });
        else bytesOf(own.data).set(bytesOf(data));
      }
      this.complete();
    });
  }

  /** The contents of a file; the arrays are the live ones. */
  snapshot(includeOptimizerState: boolean): CheckpointData {
    const all = [...this.parameters.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    return {
      parameters: new Map(all.map((each) => [each.name, each])),
      nominal: this.#nominal,
      optimizer: includeOptimizerState && !this.#nominal ? this.optimizer : undefined,
      properties: new Map(this.properties.values), // as of now: a file is written later
    };
  }

  /**
   * Save to one file, whole or not at all: a path in Node, a FileSystemFileHandle in a browser.
   * Gradients are not part of it: save after `runOptimizerStep()` and `lazyResetGrad()`.
   *
   * @throws OdtpackError `file-not-written`; if it says that the file was written, but may not
   *   survive a power cut, the new file is in place.
   */
  async save(
    target: string | URL | FileSystemFileHandle, includeOptimizerState = false,
    { keepPrevious = false, dataFileAbove = DATA_FILE_ABOVE }: SaveOptions = {},
  ): Promise<void> {
    requireArgument(isPath(target) || isHandle(target),
      'A checkpoint is saved to a path in Node, and to a FileSystemFileHandle in a browser.');
    const data = this.snapshot(includeOptimizerState);
    await this.alone(async () => {
      await this.refresh();
      const isWhole = async (): Promise<boolean> => read(target).then(() => true, () => false);
      if (isPath(target)) {
        this.#whole = await platform.writeCheckpoint(target, {
          nbytes: payloadBytes(data), lay: (from) => layCheckpoint(data, from), isWhole,
          regionOf: externalRegion, dataFileAbove, keep: Boolean(keepPrevious), known: this.#whole,
        });
        this.#handle = undefined;
        return;
      }
      demand(keepPrevious !== true, 'file-not-written', 'The file to keep has no folder here.',
        target.name, 'pass the FileSystemFileHandle to keep it in: { keepPrevious: handle }');
      const content = await blob(data);
      if (keepPrevious) {
        const same = await this.#handle?.isSameEntry(target);
        const known = same && (await identity(target)) === this.#whole;
        if (known || (await isWhole())) await replace(keepPrevious, await target.getFile());
      }
      await replace(target, content);
      this.#whole = await identity(target);
      this.#handle = target;
    });
  }

  /** The bytes of the file, for a download or an upload. */
  async toBlob(includeOptimizerState = false): Promise<Blob> {
    return this.alone(async () => {
      await this.refresh();
      return blob(this.snapshot(includeOptimizerState));
    });
  }
}

async function blob(data: CheckpointData): Promise<Blob> {
  const { file, digests } = layCheckpoint(data);
  const parts = [...file, ...(await digests())] as BlobPart[];
  return new Blob(parts, { type: 'application/octet-stream' });
}

function isHandle(source: FileSource): source is FileSystemFileHandle {
  return isRecord(source) && 'getFile' in source;
}

/** Which file it is, as far as that can be told. */
async function identity(source: FileSource): Promise<string | undefined> {
  if (isPath(source)) return platform.identity(source);
  if (!isHandle(source)) return undefined;
  const file = await source.getFile();
  return `${file.size}:${file.lastModified}`;
}

/** Reads a file, and again if it was replaced meanwhile: it and its data file are two. */
async function readAgain(source: FileSource): Promise<CheckpointData> {
  for (let attempt = 1; ; attempt++) {
    const found = await identity(source);
    try {
      return await read(source);
    } catch (error) {
      if (attempt === MOST_ATTEMPTS || (await identity(source)) === found) throw error;
    }
  }
}

/** The stream writes to a swap file, which takes the file's place when it is closed. */
async function replace(target: FileSystemFileHandle, content: Blob): Promise<void> {
  await attempt(async () => {
    const stream = await target.createWritable();
    await stream.write(content);
    await stream.close();
  }, 'file-not-written', `${target.name} could not be written`, target.name,
  'check the space left');
}

async function read(source: FileSource): Promise<CheckpointData> {
  return readCheckpoint(await open(source));
}

export async function open(source: FileSource): Promise<OpenedCheckpoint> {
  if (isPath(source)) return platform.openCheckpoint(source);
  const file = isHandle(source) ? await source.getFile() : source;
  const isBlob = isRecord(file) && 'arrayBuffer' in file;
  requireArgument(file instanceof Uint8Array || file instanceof ArrayBuffer || isBlob,
    'A file is given as a path, an address, bytes, a Blob or a FileSystemFileHandle.');
  const bytes = file instanceof Uint8Array ? file
    : new Uint8Array(file instanceof ArrayBuffer ? file : await file.arrayBuffer());
  const where = 'name' in source ? String(source.name) : 'checkpoint';
  return { where, bytes: inMemory(bytes), close: () => undefined };
}
