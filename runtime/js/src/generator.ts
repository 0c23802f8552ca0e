/** Tokens that follow a prompt: the decoder of a package, with adapters trained for it. */
import type { InferenceSession } from 'onnxruntime-common';
import { type PeftFiles, readAdapter, trainedOf } from './adapter.js';
import { CheckpointState } from './checkpoint.js';
import { attempt, demand, fail } from './errors.js';
import { widen, withoutInitializers } from './inference.js';
import { isIterable } from './json.js';
import { trainable } from './manifest.js';
import { importRuntime } from './opening.js';
import type { TrainingPackage } from './package.js';
import type { FileSource, OnnxRuntime } from './platform.js';
import { type Feeds, openSession, sessionOptions, tensorOver } from './runtime.js';
import { ARRAYS, byName, type DType, product, type Stored } from './tensors.js';

/** How tokens are chosen, and when a sequence ends. */
export interface GenerateOptions {
  /** Name of the adapter that counts; without one the decoder is as it was exported. */
  adapter?: string | undefined;
  /** How many follow at most; 256 if nothing is said. */
  maxTokens?: number;
  /** Tokens that end the sequence, and are not in it. */
  stop?: Iterable<number>;
  /** 0, the default, for the likeliest token; otherwise the logits are divided by it. */
  temperature?: number;
  /** One of that many likeliest tokens is drawn; 0 for all. */
  topK?: number;
  /** Of the likeliest that have this probability together. */
  topP?: number;
  /** The same one draws the same tokens, as in Python. */
  seed?: number | bigint;
}

const [PAST, PRESENT] = ['past_key_values.', 'present.'];
const WEIGHTS = new Set<string>(['segment_weights', 'decoder_weights']);
const AT_ONCE = 32; // tokens of a prompt: the logits of each are as many numbers as there are words

/**
 * The inference model of a decoder that was trained in segments, loaded once. Any number of
 * adapters may be beside it, and each call says which one counts.
 */
export class Generator {
  readonly #adapters = new Map<string, () => Promise<Feeds>>();
  #running: Promise<unknown> = Promise.resolve(); // all runs so far
  #released: Promise<void> | undefined;

  private constructor(
    readonly ort: OnnxRuntime, readonly opened: TrainingPackage,
    readonly session: InferenceSession,
  ) {}

  /**
   * Load the decoder and its weights.
   *
   * @param options Options of ONNX Runtime in the place of the package's, and ONNX Runtime itself.
   * @throws OdtpackError `no-decoder` if the package has none.
   */
  static async open(
    opened: TrainingPackage,
    { ort, ...overrides }: InferenceSession.SessionOptions & { ort?: OnnxRuntime } = {},
  ): Promise<Generator> {
    const { files: { extra }, adapter } = opened.manifest;
    const model = extra.find(({ role }) => role === 'decoder_model') ?? fail('no-decoder',
      'The package has no model for generation.', '',
      'build it with --segments and --adapter lora, of a decoder that was exported with its ' +
        'key-value cache');
    const externalData = await Promise.all(extra.filter(({ role }) => WEIGHTS.has(role))
      .map(async (each) => ({ path: each.path, data: await opened.file(each) })));
    // These have values there, and would not be among the inputs that JavaScript may feed.
    const bytes = withoutInitializers(await opened.file(model), new Set(adapter?.parameters));
    const runtime = ort ?? (await importRuntime());
    const own = sessionOptions(opened.manifest, runtime, overrides);
    const session = await openSession(runtime, bytes, model.path, { ...own, externalData });
    return new Generator(runtime, opened, session);
  }

  /**
   * Put an adapter beside the decoder, or in the place of the one of that name.
   *
   * @param source A state, as it is at each later call, or what `loadAdapter` takes.
   */
  async addAdapter(name: string, source: CheckpointState | FileSource | PeftFiles): Promise<void> {
    const { ort, opened } = this;
    if (source instanceof CheckpointState) {
      const read = (): Promise<Feeds> => source.alone(async () => {
        const trained = await trainedOf(opened, source);
        return byName([...trained].map(([label, { dtype, data, dims }]) =>
          [label, tensorOver(ort, dtype, data.slice(), dims)] as const));
      });
      await read(); // which says what is wrong with it
      this.#adapters.set(name, read);
      return;
    }
    const shapes = this.#zeros();
    const values = await readAdapter(opened, shapes, source);
    const feeds = byName([...shapes].map(([label, { dtype, dims }]) =>
      [label, tensorOver(ort, dtype, values.get(label)!, dims)] as const));
    this.#adapters.set(name, async () => feeds);
  }

  /** Forget an adapter, if it is there. */
  removeAdapter(name: string): void {
    this.#adapters.delete(name);
  }

  /** The logits of the token after a sequence, one for each word. */
  async logits(tokens: Iterable<number>, adapter?: string): Promise<Float32Array> {
    return this.#read(await this.#begin(adapter), 0, isIterable(tokens) ? [...tokens] : []);
  }

  /** The tokens that follow a prompt, each as soon as it is there. */
  async *generate(prompt: Iterable<number>, options: GenerateOptions = {}): AsyncGenerator<number> {
    const { maxTokens = 256, temperature = 0, topK = 0, topP = 1, seed = 0 } = options;
    const whole = typeof seed === 'bigint' || Number.isInteger(seed);
    const fitsStop = options.stop === undefined || isIterable(options.stop);
    const stop = new Set(fitsStop ? options.stop : []);
    const fits = fitsStop && topK >= 0 && [topK, ...stop].every(Number.isSafeInteger) && whole;
    demand(temperature >= 0 && fits && topP > 0 && topP <= 1 && maxTokens >= 0, 'bad-argument',
      'temperature, topK and maxTokens must be 0 or more, topP above 0 and ' +
      'at most 1, topK, seed and the tokens of stop whole numbers.');
    const uniform = splitMix(BigInt(seed));
    const feeds = await this.#begin(options.adapter);
    let tokens = isIterable(prompt) ? [...prompt] : []; // which is refused
    let count = 0;
    for (let made = 0; made < maxTokens; made++) {
      const logits = await this.#read(feeds, count, tokens);
      count += tokens.length;
      demand(Number.isFinite(logits.reduce((most, each) => Math.max(most, each))), 'run-failed',
        `The decoder's logits after ${count} tokens are not finite.`,
        '', 'use an adapter from before its training diverged');
      const token = temperature
        ? draw(logits, temperature, topK, topP, uniform()) : likeliest(logits);
      if (stop.has(token)) return;
      yield token;
      tokens = [token];
    }
  }

  /** Free the decoder, once the runs of now have ended: every later one is the error `closed`. */
  release(): Promise<void> {
    return (this.#released ??= this.#running.then(() => this.session.release()));
  }

  #zeros(): Map<string, Stored> {
    return new Map(trainable(this.opened.manifest).map(({ name, dtype, shape }) =>
      [name, { dtype, dims: shape, data: new ARRAYS[dtype](product(shape)) }] as const));
  }

  /** What is fed for a sequence, with the cache of no tokens. */
  async #begin(adapter: string | undefined): Promise<Feeds> {
    const { ort, session } = this;
    const values = adapter === undefined ? undefined
      : await (this.#adapters.get(adapter) ?? fail('unknown-adapter',
        `There is no adapter '${adapter}'.`, '', 'add it first: addAdapter(name, source)'))();
    const zeros = this.#zeros();
    const feeds: Feeds = byName();
    for (const each of session.inputMetadata) {
      const own = zeros.get(each.name);
      if (own) {
        feeds[each.name] = values?.[each.name] ?? tensorOver(ort, own.dtype, own.data, own.dims);
      } else if (each.isTensor && each.name.startsWith(PAST)) {
        const [, heads, , size] = each.shape;
        const dtype = each.type as DType;
        const dims = [1, Number(heads), 0, Number(size)];
        feeds[each.name] = tensorOver(ort, dtype, new ARRAYS[dtype](0), dims);
      }
    }
    return feeds;
  }

  /** Reads the tokens after so many others, some at a time; the logits of the last. */
  async #read(feeds: Feeds, before: number, tokens: readonly number[]): Promise<Float32Array> {
    demand(tokens.length && tokens.every((token) => Number.isSafeInteger(token) && token >= 0),
      'bad-prompt',
      'A prompt is a sequence of one token or more, as whole numbers from 0 on.');
    // Some kernels take a token beyond the vocabulary for a vector of zeros.
    const words = this.opened.manifest.inputs.find((each) => each.class_count)?.class_count;
    const beyond = tokens.find((token) => words !== undefined && token >= words);
    demand(beyond === undefined, 'bad-prompt',
      `The token ${beyond} is not below the ${words} of the vocabulary.`);
    const { ort, session } = this;
    const whole = (values: ArrayLike<number>) =>
      tensorOver(ort, 'int64', BigInt64Array.from(values as number[], BigInt), [1, values.length]);
    let last = new Float32Array(0);
    for (let start = 0; start < tokens.length; start += AT_ONCE) {
      const part = tokens.slice(start, start + AT_ONCE);
      const count = before + start;
      const own: Feeds = {
        input_ids: whole(part),
        attention_mask: whole(new Array<number>(count + part.length).fill(1)),
        position_ids: whole(part.map((_, i) => count + i)),
      };
      for (const name of session.inputNames) if (own[name]) feeds[name] = own[name];
      if (this.#released) fail('closed', 'The generator is closed.');
      const run = session.run(feeds);
      this.#running = Promise.allSettled([this.#running, run]).then(() => undefined);
      const made = (await attempt(() => run, 'run-failed',
        `The decoder failed after ${count} tokens`, '',
        'pass fewer tokens, of those that the decoder knows')) as Feeds;
      for (const name of session.inputNames) {
        if (name.startsWith(PAST)) feeds[name] = made[PRESENT + name.slice(PAST.length)]!;
      }
      const { data, dims } = made['logits']!;
      const row = (data as Float32Array).slice(-dims.at(-1)!);
      last = made['logits']!.type === 'float16'
        ? widen(new Uint16Array(row.buffer as ArrayBuffer)) as typeof last : row as typeof last;
    }
    return last;
  }
}

function likeliest(logits: Float32Array): number {
  return logits.reduce((best, value, i) => (value > logits[best]! ? i : best), 0);
}

function draw(
  logits: Float32Array, temperature: number, topK: number, topP: number, uniform: number,
): number {
  const sorted = [...logits.keys()].sort((a, b) => logits[b]! - logits[a]! || a - b);
  const order = sorted.slice(0, topK || undefined);
  let sum = 0;
  const highest = logits[order[0]!]!;
  const totals = order.map((token) => (sum += Math.exp((logits[token]! - highest) / temperature)));
  const last = totals.findIndex((total) => total >= topP * sum);
  const kept = totals.slice(0, last + 1);
  const place = kept.findIndex((total) => total > uniform * kept.at(-1)!);
  return order.at(place < 0 ? kept.length - 1 : place)!;
}

/** Numbers of SplitMix64, from 0 to below 1. */
function splitMix(state: bigint): () => number {
  const cut = (value: bigint): bigint => BigInt.asUintN(64, value);
  return () => {
    state = cut(state + 0x9e3779b97f4a7c15n);
    let mixed = cut((state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    mixed = cut((mixed ^ (mixed >> 27n)) * 0x94d049bb133111ebn);
    return Number((mixed ^ (mixed >> 31n)) >> 11n) / 2 ** 53;
  };
}
