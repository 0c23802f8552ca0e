/** Sessions of ONNX Runtime, and runs whose parameters lie where they are trained. */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { attempt, fail, requireArgument } from './errors.js';
import { isRecord } from './json.js';
import type { Manifest } from './manifest.js';
import type { OnnxRuntime } from './platform.js';
import { byName, bytesOf, type Dims, type DType, type TypedArray } from './tensors.js';

export const BUFFER = '_grad.accumulation.buffer';
export const GRADIENT = '_grad.accumulation.out';
const MOST_THREADS = 256;

export type Feeds = Record<string, Tensor>;

/** Names of outputs, in a list or as keys; tensors to write into are refused. */
export type Fetches = readonly string[] | Readonly<Record<string, null>>;
export type RunOptions = InferenceSession.RunOptions;
/** Which outputs, if not all, and options; or options alone. */
export type RunArguments = [fetchesOrOptions?: Fetches | RunOptions, options?: RunOptions];

export function isFetches(value: unknown, outputs: readonly string[]): value is Fetches {
  if (!isRecord(value)) return Array.isArray(value);
  // Options have no null: a name that is no output is refused where names are checked.
  return Object.values(value).includes(null) || outputs.some((name) => Object.hasOwn(value, name));
}

/** Options of the package, with the caller's in their place. */
export function sessionOptions(
  manifest: Manifest, ort: OnnxRuntime, overrides: InferenceSession.SessionOptions,
): InferenceSession.SessionOptions {
  const { session } = manifest;
  const own = usualProvider(ort);
  const { intraOpNumThreads: threads = 0 } = overrides;
  requireArgument(Number.isInteger(threads) && threads >= 0 && threads <= MOST_THREADS,
    `A session has at most ${MOST_THREADS} threads, not ${threads}.`,
    'leave intraOpNumThreads out, and the package or ONNX Runtime chooses');
  return {
    graphOptimizationLevel: session.optimization_level,
    enableMemPattern: session.memory_pattern,
    // Segments cannot share an arena here, and one each would hold the peaks of all at once.
    enableCpuMemArena: session.arena && !manifest.segments,
    executionMode: 'sequential',
    ...(session.threads !== undefined && { intraOpNumThreads: session.threads }),
    ...overrides,
    extra: {
      session: {
        ...(Object.keys(session.config).length && { force_spinning_stop: '1' }),
        ...(!session.prepacking && { disable_prepacking: '1' }),
      },
      ...overrides.extra,
    },
    executionProviders: overrides.executionProviders ?? [own],
  };
}

export function usualProvider(ort: OnnxRuntime): string {
  return writesInPlace(ort) || 'react-native' in ort.env.versions ? 'cpu' : 'wasm';
}

/** The providers asked for besides the processor's: they must show that they train right. */
export function otherProviders(
  ort: OnnxRuntime, options: InferenceSession.SessionOptions,
): string[] {
  return (options.executionProviders ?? [])
    .map((each) => (typeof each === 'string' ? each : each.name))
    .filter((name) => name !== usualProvider(ort));
}

/** Only Node's binding writes into the tensors that it is given; the others ignore them. */
export function writesInPlace(ort: OnnxRuntime): boolean {
  return ort.env.versions.node !== undefined;
}

export async function openSession(
  ort: OnnxRuntime, bytes: Uint8Array, name: string, options: InferenceSession.SessionOptions,
): Promise<InferenceSession> {
  const session = await attempt(() => ort.InferenceSession.create(bytes, options),
    'model-not-loadable', `ONNX Runtime ${ort.env.versions.common} cannot load the ${name}`, name,
    'build the package again for this version of ONNX Runtime, or update it');
  if (!session.outputNames.includes('__proto__')) return session;
  await session.release();
  return fail('model-not-loadable',
    `The ${name} has an output '__proto__', which ONNX Runtime for JavaScript cannot return.`, name,
    'give the output another name, and build the package again');
}

/** A tensor over an array: no copy. */
export function tensorOver(ort: OnnxRuntime, dtype: DType, data: TypedArray, dims: Dims): Tensor {
  return new ort.Tensor(dtype as 'float32', data as Float32Array, dims);
}

/** One model, or what acts as one. */
export interface Model {
  readonly feeds: Feeds;
  run(options?: InferenceSession.RunOptions): Promise<Feeds>;
}

/** A session, what is always fed to it, and the outputs that belong into memory. */
export class Graph implements Model {
  readonly #fetches: Record<string, Tensor | null> | string[];
  readonly #inPlace: boolean;

  constructor(
    ort: OnnxRuntime, readonly session: InferenceSession, readonly feeds: Feeds,
    readonly memory: Feeds, outputs: readonly string[],
    readonly hint = 'nothing was changed by it',
  ) {
    this.#inPlace = writesInPlace(ort);
    this.#fetches = this.#inPlace
      ? byName([...outputs.map((name) => [name, null] as const), ...Object.entries(memory)])
      : [...outputs, ...Object.keys(memory)];
  }

  async run(options?: InferenceSession.RunOptions): Promise<Feeds> {
    return attempt(async () => {
      const results = (await this.session.run(
        this.feeds, this.#fetches as Record<string, Tensor | null>, options,
      )) as Feeds;
      for (const [name, target] of this.#inPlace ? [] : Object.entries(this.memory)) {
        const made = Object.hasOwn(results, name) ? bytesOf(results[name]!.data as TypedArray) : [];
        const own = bytesOf(target.data as TypedArray);
        if (made.length !== own.length) throw new Error(`'${name}' came back in another size`);
        own.set(made);
      }
      return results;
    }, 'run-failed', 'ONNX Runtime failed in the middle of a step', '', this.hint);
  }
}
