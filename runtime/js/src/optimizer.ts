/** The optimizer of a package: its state in flat vectors, and the runs that make one step. */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { platform } from '#platform';
import type { CheckpointState, FlatState } from './checkpoint.js';
import type { OptimizerState } from './checkpoint_format.js';
import { demand, TAMPERED } from './errors.js';
import type { Manifest } from './manifest.js';
import type { OnnxRuntime } from './platform.js';
import { type Feeds, Graph, tensorOver } from './runtime.js';
import {
  ARRAYS, byName, type Dims, type DType, type Layout, pack, product, sameDims, type Slot,
  type Stored, type TypedArray, view,
} from './tensors.js';

export const DEFAULT_LEARNING_RATE = 0.001;

interface Vector {
  readonly name: string;
  readonly axes: readonly number[] | undefined;
  readonly layout: Layout;
  readonly buffer: ArrayBuffer;
}

type Place = Pick<Slot, 'offset' | 'nbytes' | 'dims'>;

export class Optimizer {
  readonly #state: OptimizerState;
  readonly #graphs: Graph[] = [];
  readonly #rates: { readonly value: Float32Array; readonly scale: number }[] = [];
  readonly #step = new BigInt64Array(1);
  readonly #norm: TypedArray | undefined;
  readonly #gradients: Float32Array | Float64Array;

  constructor(
    readonly ort: OnnxRuntime, readonly session: InferenceSession, readonly manifest: Manifest,
    readonly shared: CheckpointState, flat: FlatState,
  ) {
    const { layout, groups } = manifest;
    const taken = new Set([...session.inputNames, ...layout.state.map(({ name }) => name)]);
    const known = layout.inputs.every((name) => taken.has(name));
    demand(known && taken.size === session.inputNames.length, 'model-mismatch',
      'The manifest names inputs or a state of the optimizer that its model does not have.', '',
      TAMPERED);
    const { slots, nbytes: whole } = flat.layout;
    demand(slots.length, 'nothing-trainable', 'The package marks no parameter as trainable.');
    this.#gradients = view(flat.gradients, layout.dtype, 0, whole) as Float32Array;
    const kept = layout.state.map(({ name, axes }): Vector => {
      const own = !axes ? flat.layout
        : pack(slots.map((slot) => ({ ...slot, dims: storedDims(slot.dims, axes) })));
      return { name, axes, layout: own, buffer: platform.allocate(own.nbytes) };
    });
    const names = groups.map((group) => group.parameters);
    this.#state = takeOver(shared.optimizer, manifest.optimizer.kind, kept, flat.layout, names);
    shared.optimizer = this.#state;

    const scalar = (data: TypedArray, dtype: DType): Tensor => tensorOver(ort, dtype, data, [1]);
    const of = (value: number): TypedArray => ARRAYS[layout.dtype].of(value);
    const takes = (name: string): boolean => layout.inputs.includes(name);
    if (takes('gradient_norm')) this.#norm = of(0);
    const scalars = (groups.length ? groups : [{ learning_rate_scale: 1, weight_decay: 0 }]).map(
      ({ learning_rate_scale: scale, weight_decay: decay }): Feeds => {
        const value = new Float32Array(1);
        this.#rates.push({ value, scale });
        return {
          learning_rate: scalar(value, 'float32'),
          step: scalar(this.#step, 'int64'),
          ...(this.#norm && { gradient_norm: scalar(this.#norm, layout.dtype) }),
          ...(takes('weight_decay') && { weight_decay: scalar(of(decay), layout.dtype) }),
        };
      },
    );
    this.learningRate = this.#state.learningRate;

    const own = { axes: undefined, layout: flat.layout };
    const vectors: Vector[] = [
      { name: 'params', buffer: flat.parameters, ...own },
      { name: 'gradients', buffer: flat.gradients, ...own },
      ...kept,
    ];
    const owners = new Map(
      groups.flatMap(({ parameters }, i) => parameters.map((name) => [name, i])),
    );
    /** A run over a place in each vector. */
    const add = (group: number, place: (of: Vector) => Place, extra: Feeds = {}): void => {
      const tensors = vectors.map((vector) => {
        const { offset, nbytes, dims } = place(vector);
        const data = view(vector.buffer, layout.dtype, offset, nbytes);
        return [vector.name, tensorOver(ort, layout.dtype, data, dims)] as const;
      });
      const written = tensors.filter(([name]) => name !== 'gradients');
      const memory = byName(written.map(([name, tensor]) => [`${name}.out`, tensor] as const));
      const feeds = byName([...Object.entries({ ...scalars[group]!, ...extra }), ...tensors]);
      this.#graphs.push(new Graph(ort, session, feeds, memory, [],
        'load the last checkpoint: parameters may hold part of the step'));
    };
    if (layout.run === 'parameters') {
      for (const [index, { name, nbytes, dims }] of slots.entries()) {
        if (!nbytes) continue;
        const cut = matrixAxis(dims);
        const matrix = [product(dims.slice(0, cut)), product(dims.slice(cut))];
        const factored = scalar(Uint8Array.of(Number(dims.length > 1)), 'bool');
        add(owners.get(name) ?? 0, ({ axes = [0, 1], layout: { slots: places } }) => ({
          ...places[index]!, dims: matrix.map((size, axis) => (axes.includes(axis) ? size : 1)),
        }), { factored });
      }
      return;
    }
    const itemsize = this.#gradients.BYTES_PER_ELEMENT;
    const starts = slots
      .map(({ name, offset }) => ({ group: owners.get(name) ?? 0, start: offset / itemsize }))
      .filter(({ group }, i, rest) => group !== rest[i - 1]?.group);
    for (const [i, { group, start }] of starts.entries()) {
      const end = starts[i + 1]?.start ?? layout.elements;
      const piece = layout.run === 'whole' ? Math.max(end - start, 1) : layout.chunk_elements;
      for (let at = start; at < end; at += piece) {
        const size = Math.min(piece, end - at);
        add(group, () => ({ offset: at * itemsize, nbytes: size * itemsize, dims: [size] }));
      }
    }
  }

  /** Refuse a step or a save where another session has the moments and the step count. */
  requireOwn(): void {
    const { optimizer } = this.shared;
    demand(!optimizer || optimizer === this.#state, 'optimizer-mismatch',
      "A later session has the state's moments and step count.", '',
      'make the steps with that one, or with a new one if it is released');
  }

  get stepCount(): number {
    return this.#state.step;
  }

  get learningRate(): number {
    return this.#state.learningRate;
  }

  /** The rate of the steps to come, kept as float32; a group's scale multiplies it. */
  set learningRate(value: number) {
    const { rate, own } = this.checkRate(value);
    this.#state.learningRate = rate;
    for (const [i, { value: target }] of this.#rates.entries()) target[0] = own[i]!;
  }

  /** A rate as it is kept, and as it is in each group. */
  checkRate(value: number): { rate: number; own: number[] } {
    const rate = typeof value === 'number' ? Math.fround(value) : NaN;
    const own = this.#rates.map(({ scale }) => Math.fround(rate * scale));
    demand([rate, ...own].every((each) => each >= 0 && each < Infinity), 'bad-learning-rate',
      'The learning rate must be 0 or more, and finite in float32 in each group, not ' +
        `${typeof value === 'number' ? value : typeof value}.`, '', 'take for example 0.001');
    return { rate, own };
  }

  /** What a step model is fed for the next step; `advance` counts it. */
  next(): { rates: Float32Array; step: BigInt64Array } {
    const rates = Float32Array.from(this.#rates, ({ value }) => value[0]!);
    return { rates, step: BigInt64Array.of(BigInt(this.#state.step + 1)) };
  }

  advance(): void {
    this.#state.step += 1;
  }

  async step(options?: InferenceSession.RunOptions): Promise<void> {
    this.#step[0] = BigInt(this.#state.step + 1);
    if (this.#norm) {
      let sum = 0;
      for (const value of this.#gradients) sum += value * value;
      this.#norm[0] = Math.sqrt(sum);
    }
    for (const graph of this.#graphs) await graph.run(options);
    this.#state.step += 1;
  }
}

/** Before which axis a parameter is cut into the fewest rows and columns; the first of them. */
function matrixAxis(dims: Dims): number {
  let best = 0;
  let fewest = Infinity;
  for (let axis = 1; axis < dims.length; axis++) {
    const sum = product(dims.slice(0, axis)) + product(dims.slice(axis));
    if (sum < fewest) [best, fewest] = [axis, sum];
  }
  return best;
}

function storedDims(dims: Dims, axes: readonly number[]): Dims {
  const cut = matrixAxis(dims);
  return dims.map((size, axis) => (axes.includes(Number(axis >= cut)) ? size : 1));
}

/** A new state in the given vectors, with the values of the loaded one if it goes with them. */
function takeOver(
  loaded: OptimizerState | undefined, kind: string, vectors: readonly Vector[], layout: Layout,
  groups: readonly (readonly string[])[],
): OptimizerState {
  const moments = new Map<string, Stored[]>();
  for (const [index, { name }] of vectors.length ? layout.slots.entries() : []) {
    moments.set(name, vectors.map(({ layout: { slots }, buffer }) => {
      const { dtype, dims, offset, nbytes } = slots[index]!;
      return { dtype, dims, data: view(buffer, dtype, offset, nbytes) };
    }));
  }
  const rate = Math.fround(DEFAULT_LEARNING_RATE);
  const old: OptimizerState = loaded ?? { step: 0, learningRate: rate, moments: new Map(), groups };
  const count = old.moments.values().next().value?.length ?? 0;
  const fits = count === vectors.length && (old.kind ?? kind) === kind &&
    [...old.moments].every(([name, own]) =>
      own.every(({ dims }, i) => sameDims(moments.get(name)?.[i]?.dims ?? [-1], dims)));
  const idle = [...old.moments.values()].flat().every(({ data }) =>
    (data as Float32Array).every((value) => value === 0));
  // The reference saves one moment per parameter with SGD, and never uses it.
  const unused = idle && (old.step === 0 || (count === 1 && vectors.length === 0));
  demand(fits || unused, 'optimizer-mismatch',
    `The checkpoint holds another optimizer's state (${old.kind ?? `${count} moments`}) than ` +
      `the package's (${kind}, ${vectors.length} moments), or moments of other shapes.`, '',
    'use the optimizer that the checkpoint was saved with, or a checkpoint without its state');
  for (const [name, own] of fits ? old.moments : []) {
    const placed = moments.get(name)!;
    own.forEach(({ data }, i) => (placed[i]!.data as Float32Array).set(data as Float32Array));
  }
  return { step: old.step, learningRate: old.learningRate, moments, groups, kind };
}
