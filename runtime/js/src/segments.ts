/**
 * A network that is trained segment by segment (docs/formats/package.md): its models run one after
 * the other and, in training, back. Those that are alike share a session, so that neither memory
 * nor the time of loading grows with depth.
 */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { platform } from '#platform';
import { fail } from './errors.js';
import {
  evaluationOutputs, type FileEntry, type Manifest, type SegmentsInfo,
} from './manifest.js';
import type { TrainingPackage } from './package.js';
import type { OnnxRuntime, OpenedFile } from './platform.js';
import {
  BUFFER, type Feeds, GRADIENT, Graph, type Model, openSession, tensorOver,
} from './runtime.js';
import {
  ARRAYS, byName, type Dims, type DType, product, sameDims, type Slot, type TypedArray, view,
} from './tensors.js';

const ALIGNMENT = 64;
const COTANGENT = '.cotangent';

function wrongSegments(problem: string): never {
  fail('segments-invalid',
    `The package's segments are not valid: ${problem}.`, '', 'build the package again');
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
      if (shape.some((size) => size < 0) || !(offset + nbytes <= file.size)) {
        wrongSegments(`the weight '${name}' ends after the file of weights`);
      }
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
    if (!taken.isTensor || taken.type !== dtype || !sameDims(taken.shape as Dims, dims)) {
      wrongSegments(`a model takes another '${name}' than the file of weights holds`);
    }
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

function aligned(nbytes: number): number {
  return Math.ceil(nbytes / ALIGNMENT) * ALIGNMENT;
}

/** A model as one segment sees it, which calls its inputs and outputs by `names`. */
interface Part {
  readonly session: InferenceSession;
  readonly names: Readonly<Record<string, string>>;
}

/** An input or output: its name in the model, and in the network. */
type End = readonly [own: string, name: string];

/** One run of a model: what it takes and makes. */
interface Run {
  readonly session: InferenceSession;
  readonly weights: End[];
  /** Parameters and their gradients, whose memory is the same in all steps. */
  readonly bound: End[];
  /** Of the batch, or made before. */
  readonly taken: End[];
  readonly accumulated: End[];
  readonly made: End[];
  readonly returned: readonly string[];
  /** Names of what was made and is not read after this run. */
  done: string[];
}

/** The models of a package's segments, and the runs of them that make a step. */
export class Segments {
  readonly #training: readonly Run[];
  readonly #evaluation: readonly Run[];

  private constructor(
    readonly ort: OnnxRuntime, manifest: Manifest,
    readonly weights: Weights, readonly forward: readonly Part[],
    /** In the order in which they run. */
    readonly backward: readonly Part[],
    training: InferenceSession, evaluation: InferenceSession | undefined,
  ) {
    const inputs = manifest.inputs.map(({ name }) => name);
    const bound = new Set(manifest.parameters.flatMap(({ name, role }) =>
      role === 'trainable' ? [name, name + BUFFER, name + GRADIENT] : [name]));
    bound.add('lazy_reset_grad');
    const runs = (last: InferenceSession, outputs: Manifest['outputs'], back: readonly Part[]) =>
      this.#runs(last, inputs, outputs.map(({ name }) => name), bound, back);
    this.#training = runs(training, manifest.outputs, backward);
    this.#evaluation = evaluation ? runs(evaluation, evaluationOutputs(manifest), []) : [];
  }

  /**
   * Open the models of segments, and the file of their weights.
   *
   * @param training Ends the network in training, and `evaluation` in evaluation.
   * @throws OdtpackError `segments-invalid` if they contradict themselves or their files.
   */
  static async open(
    ort: OnnxRuntime, opened: TrainingPackage, info: SegmentsInfo,
    options: InferenceSession.SessionOptions,
    training: InferenceSession, evaluation: InferenceSession | undefined,
  ): Promise<Segments> {
    const { manifest } = opened;
    const entry = (name: string): FileEntry =>
      manifest.files.extra.find(({ path }) => path === name) ??
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
      return new Segments(ort, manifest, weights, forward, backward, training, evaluation);
    } catch (error) {
      for (const session of sessions.values()) await session.release();
      file?.close();
      throw error;
    }
  }

  /** The model that computes gradients; `memory` has what is bound, and where those belong. */
  training(memory: Feeds): Model {
    return new SegmentedGraph(this.ort, this.weights, this.#training, memory);
  }

  evaluation(memory: Feeds): Model {
    return new SegmentedGraph(this.ort, this.weights, this.#evaluation, memory);
  }

  /** Free the models and the weights, but not the models that end the network. */
  async release(): Promise<void> {
    const sessions = [...this.forward, ...this.backward].map(({ session }) => session);
    for (const session of new Set(sessions)) await session.release();
    this.weights.close();
  }

  /** What runs in a step whose forward pass ends with `last`, and then goes `back`. */
  #runs(
    last: InferenceSession, inputs: readonly string[], returned: readonly string[],
    bound: ReadonlySet<string>, back: readonly Part[],
  ): Run[] {
    const there = new Set(inputs);
    const end: Part = { session: last, names: {} };
    const runs = [...this.forward, end, ...back].map((part): Run => {
      const run: Run = {
        session: part.session, weights: [], bound: [], taken: [], accumulated: [], made: [],
        returned: part === end ? returned : [], done: [],
      };
      for (const [own, name] of ends(part, part.session.inputNames)) {
        if (this.weights.has(name)) {
          this.weights.check(name, part.session.inputMetadata?.find((each) => each.name === own));
          run.weights.push([own, name]);
        } else if (there.has(name)) {
          run.taken.push([own, name]);
        } else {
          if (!bound.has(name)) wrongSegments(`nothing gives '${name}' to a segment`);
          run.bound.push([own, name]);
        }
      }
      this.weights.fit(run.weights.map(([, name]) => name));
      for (const [own, name] of ends(part, part.session.outputNames)) {
        if (run.returned.includes(name)) continue;
        if (name.endsWith(GRADIENT)) {
          if (!bound.has(name)) wrongSegments(`nothing takes '${name}' of a segment`);
          run.accumulated.push([own, name]);
          continue;
        }
        if (name.endsWith(COTANGENT) && this.forward.includes(part)) {
          wrongSegments(`'${name}' is a name of a gradient`);
        }
        if (this.weights.has(name) || there.has(name)) wrongSegments(`'${name}' is made twice`);
        there.add(name);
        run.made.push([own, name]);
      }
      return run;
    });
    const known = new Set(inputs);
    for (const run of [...runs].reverse()) {
      const names = [...run.taken, ...run.made].map(([, name]) => name);
      run.done = [...new Set(names)].filter((name) => !known.has(name));
      for (const name of names) known.add(name);
    }
    return runs;
  }
}

/** Segments as one training or evaluation model. */
class SegmentedGraph implements Model {
  readonly session: InferenceSession;
  readonly feeds: Feeds = byName();
  readonly #graphs: readonly Graph[];

  constructor(
    readonly ort: OnnxRuntime, readonly weights: Weights, readonly runs: readonly Run[],
    memory: Feeds,
  ) {
    this.session = runs.find(({ returned }) => returned.length)!.session;
    const chosen = (each: readonly End[]): Feeds =>
      byName(each.map(([own, name]) => [own, memory[name]!] as const));
    this.#graphs = runs.map(({ session, bound, accumulated, made, returned }) => {
      const outputs = [...returned, ...made.map(([own]) => own)];
      return new Graph(ort, session, chosen(bound), chosen(accumulated), outputs);
    });
  }

  async run(options?: InferenceSession.RunOptions): Promise<Feeds> {
    const given = new Map(Object.entries(this.feeds));
    const found: Feeds = byName();
    for (const [i, { weights, taken, made, returned, done }] of this.runs.entries()) {
      const graph = this.#graphs[i]!;
      const read = this.weights.read(this.ort, weights.map(([, name]) => name));
      for (const [j, [own]] of weights.entries()) graph.feeds[own] = read[j]!;
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
