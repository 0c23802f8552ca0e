/**
 * A network that is trained segment by segment (docs/formats/package.md): its models run one after
 * the other and, in training, back. Those that are alike share a session, so that neither memory
 * nor the time of loading grows with depth.
 */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { platform } from '#platform';
import { fail } from './errors.js';
import type { FileEntry, SegmentsInfo } from './manifest.js';
import type { TrainingPackage } from './package.js';
import type { OnnxRuntime, OpenedFile } from './platform.js';
import {
  BUFFER, type Feeds, GRADIENT, Graph, type Model, openSession, tensorOver,
} from './runtime.js';
import {
  aligned, ALIGNMENT, ARRAYS, byName, type Dims, type DType, product, sameDims, type Slot,
  type TypedArray, view,
} from './tensors.js';

const COTANGENT = '.cotangent';

function wrongSegments(problem: string): never {
  fail('segments-invalid',
    `The package's segments are not valid: ${problem}.`, '', 'build the package again');
}

function must(holds: boolean, problem: string): void {
  if (!holds) wrongSegments(problem);
}

/** The frozen weights of all segments, read from their file when a segment runs. */
class Weights {
  readonly #weights = new Map<string, Slot>();
  #most = 0;
  #buffer: ArrayBuffer | undefined;

  /** @param file What the manifest's `segments` describe; undefined if there are no weights. */
  constructor(readonly file: OpenedFile | undefined, { tensors }: SegmentsInfo) {
    let end = 0;
    for (const { name, dtype, shape, offset } of tensors) {
      if (!file || !Object.hasOwn(ARRAYS, dtype)) wrongSegments(`nothing can hold '${name}'`);
      if (offset < end || offset % ALIGNMENT) wrongSegments(`the place of '${name}'`);
      const nbytes = product(shape) * ARRAYS[dtype as DType].BYTES_PER_ELEMENT;
      // Of sizes that are too large for numbers the product may be NaN.
      must(offset + nbytes <= file.size, `the weight '${name}' ends after the file of weights`);
      end = offset + nbytes;
      if (this.#weights.has(name)) wrongSegments(`two weights are called '${name}'`);
      this.#weights.set(name, { name, dtype: dtype as DType, dims: shape, offset, nbytes });
    }
  }

  has(name: string): boolean {
    return this.#weights.has(name);
  }

  /** Check that a weight is what a model takes, as far as the binding tells: 1.22 was the first. */
  check(name: string, taken: InferenceSession.ValueMetadata | undefined): void {
    const { dtype, dims } = this.#weights.get(name)!;
    if (!taken) return; // ONNX Runtime refuses it when it runs
    must(taken.isTensor && taken.type === dtype && sameDims(taken.shape as Dims, dims),
      `a model takes another '${name}' than the file of weights holds`);
  }

  /** Let there be room for some weights at once. */
  fit(names: readonly string[]): void {
    const sizes = names.map((name) => aligned(this.#weights.get(name)!.nbytes));
    this.#most = Math.max(this.#most, sizes.reduce((sum, size) => sum + size, 0));
  }

  /** Tensors of weights that fit, until they are read anew. */
  read(ort: OnnxRuntime, names: readonly string[]): Tensor[] {
    let at = 0;
    return names.map((name) => {
      const { dtype, dims, offset, nbytes } = this.#weights.get(name)!;
      const { bytes } = this.file!;
      if (bytes && bytes.byteOffset % ALIGNMENT === 0) {
        const data = view(bytes.buffer, dtype, bytes.byteOffset + offset, nbytes);
        return tensorOver(ort, dtype, data, dims);
      }
      this.#buffer ??= platform.allocate(this.#most);
      this.file!.fill(new Uint8Array(this.#buffer, at, nbytes), offset);
      const data = view(this.#buffer, dtype, at, nbytes);
      at += aligned(nbytes);
      return tensorOver(ort, dtype, data, dims);
    });
  }

  close(): void {
    this.file?.close();
    this.#buffer = undefined;
  }
}

/** A model as one segment sees it, which calls its inputs and outputs by `names`. */
interface Part {
  readonly session: InferenceSession;
  readonly names: Readonly<Record<string, string>>;
}

/** An input or output: its name in the model, and in the network. */
type End = readonly [own: string, name: string];

/** One run of a model: what it takes and makes beside parameters and their gradients. */
interface Run {
  readonly graph: Graph;
  readonly weights: readonly End[];
  /** Of the batch, or made before. */
  readonly taken: readonly End[];
  readonly made: readonly End[];
  readonly returned: readonly string[];
  /** Names of what was made and is not read after this run. */
  done: string[];
}

/** The models of a package's segments, but those that end the network. */
export class Segments {
  private constructor(
    readonly weights: Weights, readonly forward: readonly Part[],
    /** In the order in which they run. */
    readonly backward: readonly Part[],
  ) {}

  /**
   * Open the models of segments, and the file of their weights.
   *
   * @throws OdtpackError `segments-invalid` if they contradict themselves or their files.
   */
  static async open(
    ort: OnnxRuntime, opened: TrainingPackage, info: SegmentsInfo,
    options: InferenceSession.SessionOptions,
  ): Promise<Segments> {
    const entry = (name: string): FileEntry =>
      opened.manifest.files.extra.find(({ path }) => path === name) ??
      wrongSegments(`'${name}' is not a file of the package`);
    const sessions = new Map<string, InferenceSession>();
    const open = async (name: string): Promise<InferenceSession> => {
      const session = sessions.get(name) ??
        (await openSession(ort, await opened.file(entry(name)), name, options));
      sessions.set(name, session);
      return session;
    };
    const file = info.weights === undefined ? undefined : await opened.open(entry(info.weights));
    try {
      const weights = new Weights(file, info);
      const [forward, backward]: [Part[], Part[]] = [[], []];
      for (const { forward: there, backward: back, names } of info.segments) {
        forward.push({ session: await open(there), names });
        if (back !== undefined) backward.unshift({ session: await open(back), names });
      }
      return new Segments(weights, forward, backward);
    } catch (error) {
      for (const session of sessions.values()) await session.release();
      file?.close();
      throw error;
    }
  }

  /** Free the models and the weights. */
  async release(): Promise<void> {
    const sessions = [...this.forward, ...this.backward].map(({ session }) => session);
    for (const session of new Set(sessions)) await session.release();
    this.weights.close();
  }
}

/** A training or evaluation model: one, or segments that run one after the other, it among them. */
export class Network implements Model {
  readonly feeds: Feeds = byName();
  readonly #runs: readonly Run[];

  /**
   * @param given Names of `feeds`.
   * @param bound What is fed besides: parameters, and where their gradients are added.
   * @param memory Outputs that belong into memory; a training has some, and goes back.
   * @throws OdtpackError `segments-invalid` if the segments do not fit together.
   */
  constructor(
    readonly ort: OnnxRuntime, last: InferenceSession, given: readonly string[],
    outputs: readonly string[], bound: Feeds, memory: Feeds, trains: boolean,
    readonly segments: Segments | undefined,
  ) {
    const { weights: stored, forward = [], backward = [] } = segments ?? {};
    const parts = [...forward, { session: last, names: {} }, ...(trains ? backward : [])];
    const there = new Set(given);
    this.#runs = parts.map((part): Run => {
      const [weights, taken, made]: [End[], End[], End[]] = [[], [], []];
      const [feeds, written]: [Feeds, Feeds] = [byName(), byName()];
      for (const [own, name] of ends(part, part.session.inputNames)) {
        if (stored?.has(name)) {
          stored.check(name, part.session.inputMetadata?.find((each) => each.name === own));
          weights.push([own, name]);
        } else if (there.has(name)) taken.push([own, name]);
        else feeds[own] = bound[name] ?? wrongSegments(`nothing gives '${name}' to a segment`);
      }
      stored?.fit(weights.map(([, name]) => name));
      const returned = part.session === last ? outputs : [];
      for (const [own, name] of ends(part, part.session.outputNames)) {
        if (returned.includes(name)) continue;
        if (memory[name]) written[own] = memory[name];
        else if (segments) {
          must(!name.endsWith(GRADIENT), `nothing takes '${name}' of a segment`);
          must(!name.endsWith(COTANGENT) || !forward.includes(part),
            `'${name}' is a name of a gradient`);
          must(!stored!.has(name) && !there.has(name), `'${name}' is made twice`);
          there.add(name);
          made.push([own, name]);
        }
      }
      const all = [...returned, ...made.map(([own]) => own)];
      const graph = new Graph(ort, part.session, feeds, written, all);
      return { graph, weights, taken, made, returned, done: [] };
    });
    const known = new Set(given);
    for (const run of this.#runs.toReversed()) {
      const names = [...run.taken, ...run.made].map(([, name]) => name);
      run.done = [...new Set(names)].filter((name) => !known.has(name));
      for (const name of names) known.add(name);
    }
  }

  async run(options?: InferenceSession.RunOptions): Promise<Feeds> {
    const given = new Map(Object.entries(this.feeds));
    const found: Feeds = byName();
    for (const { graph, weights, taken, made, returned, done } of this.#runs) {
      const read = this.segments?.weights.read(this.ort, weights.map(([, name]) => name));
      for (const [j, [own]] of weights.entries()) graph.feeds[own] = read![j]!;
      for (const [own, name] of taken) graph.feeds[own] = given.get(name)!;
      const results = await graph.run(options);
      for (const [own] of [...weights, ...taken]) delete graph.feeds[own];
      for (const [own, name] of made) given.set(name, results[own]!);
      for (const name of returned) found[name] = results[name]!;
      for (const name of done) {
        free(given.get(name)!);
        given.delete(name);
      }
    }
    return found;
  }
}

/** What a segment calls inputs or outputs; what belongs to a value, as its gradient, goes along. */
function ends({ names }: Part, own: readonly string[]): End[] {
  return own.map((each) => {
    const end = [COTANGENT, BUFFER, GRADIENT].find((suffix) => each.endsWith(suffix)) ?? '';
    const stem = each.slice(0, each.length - end.length);
    return [each, (Object.hasOwn(names, stem) ? names[stem]! : stem) + end];
  });
}

/** Give memory back now, where an engine can (Node 22, Chrome 114): else it is found in time. */
function free({ data }: Tensor): void {
  const buffer = (data as TypedArray).buffer as { transfer?(nbytes: number): unknown } | undefined;
  buffer?.transfer?.(0);
}
